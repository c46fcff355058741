"""The page ``/docs``: the OpenAPI document as plain HTML. It loads nothing from anywhere."""

from __future__ import annotations

from html import escape
from typing import Any

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code{font-family:ui-monospace,monospace}b{color:#0a5}section{border-top:1px solid #ddd;padding:.6rem 0}"
    "table{border-collapse:collapse}td{padding:.1rem .8rem .1rem 0;vertical-align:top}h2{margin-top:2rem}"
)


def page(document: dict[str, Any]) -> str:
    """HTML of an OpenAPI document: each operation, then each model with its fields."""
    info = document["info"]
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    models = "".join(_model(name, schema) for name, schema in document["components"]["schemas"].items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>"
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info.get('description', ''))} For programs: <a href=openapi.json>openapi.json</a>.</p>"
        f"{operations}<h2>Models</h2>{models}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(p['name'])}</code><td>{escape(p['in'])}<td>{escape(p.get('description', ''))}"
        for p in operation.get("parameters", ())
    )
    body = operation.get("requestBody", {}).get("content", {})
    kinds = "; ".join(f"{kind}: {_kind(content.get('schema', {}))}" for kind, content in body.items())
    given = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return (
        f"<section><b>{method.upper()}</b> <code>{escape(path)}</code><p>{escape(operation.get('description', ''))}</p>"
        f"<table>{rows}</table>{f'<p>Takes {escape(kinds)}</p>' if kinds else ''}<p>Gives "
        f"{escape(_kind(given))}</section>"
    )


def _model(name: str, schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(about))}<td>{escape(about.get('description', ''))}"
        for field, about in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return f"<section><code>{escape(name)}</code><p>{about}</p><table>{rows}</table></section>"


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(str(one) for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
