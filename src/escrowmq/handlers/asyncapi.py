"""The AsyncAPI document of an app: the topics that its handlers receive, and the JSON schemas of their bodies."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from escrowmq.errors import Code, Misuse
from escrowmq.handlers.decoding import is_pydantic

if TYPE_CHECKING:
    from escrowmq.handlers.handler import Handler

_SCHEMAS = "#/components/schemas/"
_TEXTS: dict[Any, dict[str, Any]] = {
    bytes: {"contentType": "application/octet-stream"},
    str: {"contentType": "text/plain", "payload": {"type": "string"}},
}


def describe(handlers: Iterable[Handler], title: str, version: str) -> dict[str, Any]:
    """Return an AsyncAPI 3.0 document. Raises Misuse(BAD_ARGUMENT) for two types of one name that cannot be told apart:
    of one module, or one of pydantic."""
    handlers = list(handlers)
    kinds = list(dict.fromkeys(each.body_type for each in handlers if each.decodes and each.body_type not in _TEXTS))
    payloads, schemas = _schemas_of(kinds)
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for handler in handlers:
        content: dict[str, Any] = {}
        if handler.decodes:
            known = _TEXTS.get(handler.body_type)
            content = known or {"contentType": "application/json", "payload": payloads[handler.body_type]}
            content = {"name": getattr(handler.body_type, "__name__", str(handler.body_type)), **content}
        topics = handler.choices.topics
        for topic in topics:
            channels.setdefault(topic, {"address": topic, "messages": {}})["messages"][handler.group] = content
            name = handler.group if len(topics) == 1 else f"{handler.group}.{topic}"
            operations[name] = {
                "action": "receive",
                "title": handler.name,
                "description": inspect.getdoc(handler.function) or "",
                "channel": {"$ref": f"#/channels/{topic}"},
                "messages": [{"$ref": f"#/channels/{topic}/messages/{handler.group}"}],
            }
    parts = {"channels": channels, "operations": operations, "components": {"schemas": schemas}}
    return {"asyncapi": "3.0.0", "info": {"title": title, "version": version}, **parts}


def _schemas_of(kinds: list[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the schema of each type, and the named schemas to which they refer."""
    models = [kind for kind in kinds if is_pydantic(kind)]
    others = [kind for kind in kinds if not is_pydantic(kind)]
    try:
        found, schemas = msgspec.json.schema_components(others, ref_template=_SCHEMAS + "{name}")
    except KeyError as problem:  # what msgspec raises for two types of one module and name
        raise _repeated(str(problem)) from problem
    payloads = dict(zip(others, found, strict=True))
    if models:
        from pydantic.json_schema import models_json_schema

        inputs = [(model, "validation") for model in models]
        by_model, rest = models_json_schema(inputs, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
        if repeated := sorted(set(rest["$defs"]) & set(schemas)):
            raise _repeated(repeated[0])
        schemas |= rest["$defs"]
        payloads |= {model: schema for (model, _), schema in by_model.items()}
    return {kind: _plain(schema) for kind, schema in payloads.items()}, _plain(schemas)


def _repeated(name: str) -> Misuse:
    return Misuse(Code.BAD_ARGUMENT, f"{name} is the name of two types", "rename one of them")


def _plain(schema: Any) -> Any:
    """Return a schema without the discriminators of OpenAPI, which mean something else in AsyncAPI."""
    if isinstance(schema, dict):
        is_foreign = isinstance(schema.get("discriminator"), dict) and "propertyName" in schema["discriminator"]
        return {key: _plain(value) for key, value in schema.items() if not (is_foreign and key == "discriminator")}
    return [_plain(each) for each in schema] if isinstance(schema, list) else schema
