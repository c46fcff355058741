"""Whatever comes in, a problem or an answer of the documented shape goes out: requests made up from the OpenAPI
document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_runs import Client
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.connecting import links
from escrowmq.gateway import beside
from escrowmq.gateway.models import Problem

WORDS = st.sampled_from(
    ["t", "g", "0000000a-1-1", "commit", "earliest", "eA==", "", "%half", "../../etc", "\ud800", "\0"]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 70),
    st.floats(allow_nan=True),
    WORDS,
    st.text(max_size=20),
    st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
)
ANYTHING = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, dict[str, Any]]]:
    over = links(f"file:{tmp_path_factory.mktemp('fuzz') / 'data'}", {"max_topics": 50, "max_groups": 50})
    with beside(lambda _: over, listen="127.0.0.1:0") as ready:
        client = Client(ready["http"])
        yield client, client.get("/openapi.json")[1]
        client.http.close()


def like(schema: dict[str, Any], models: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema may describe, and now and then something else."""
    if "$ref" in schema:
        return st.deferred(lambda: like(models[schema["$ref"].rpartition("/")[2]], models))
    if "anyOf" in schema:
        return st.one_of([like(one, models) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | VALUES
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: like(one, models) for name, one in schema["properties"].items() if name != "wait"}
        needed = {name: fields[name] for name in schema.get("required", ()) if name in fields}
        return st.fixed_dictionaries(needed, optional={k: v for k, v in fields.items() if k not in needed}) | ANYTHING
    if kind == "array":
        return st.lists(like(schema["items"], models), max_size=3)
    known: dict[Any, st.SearchStrategy[Any]] = {
        "string": WORDS | st.text(max_size=10),
        "integer": st.integers(-1, 1 << 32),
        "number": st.floats(0, 0.01),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return known.get(kind, ANYTHING)


@st.composite
def requests(draw: st.DrawFn, document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An operation of the document, and a request for it as the arguments of httpx."""
    models = document["components"]["schemas"]
    operations = [
        (path, method, operation)
        for path, methods in sorted(document["paths"].items())
        for method, operation in sorted(methods.items())
    ]
    path, method, operation = operations[draw(st.integers(0, len(operations) - 1))]
    names = st.sampled_from(["t", "g", "0000000a-1-1", "x" * 200, "%25half", "a%2Fb", "%00", "ü"])
    filled = re.sub(r"\{\w+\}", lambda _: draw(names), path)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    content = None if body is None else json.dumps(draw(like(body, models) | ANYTHING)).encode()
    queries = st.fixed_dictionaries(
        {},
        optional={
            one["name"]: like(one["schema"], models).map(lambda value: str(value).encode("utf-8", "replace"))
            for one in operation.get("parameters", ())
            if one["in"] == "query"
        },
    )
    headers = {} if content is None else {"content-type": "application/json"}
    request = {"method": method.upper(), "url": filled, "params": draw(queries), "content": content, "headers": headers}
    return operation, request


@pytest.mark.invariant("I47")
def test_every_answer_is_one_of_those_documented(gateway: tuple[Client, dict[str, Any]]) -> None:
    client, document = gateway

    @settings(max_examples=100)
    @given(requests(document))
    def check(drawn: tuple[dict[str, Any], dict[str, Any]]) -> None:
        operation, request = drawn
        answer = client.http.request(**request)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 300:
            Problem.model_validate(answer.json())
        elif answer.status_code in (200, 202, 207):
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            _check(answer.json(), schema, document["components"]["schemas"])

    check()


def _check(value: Any, schema: dict[str, Any], models: dict[str, Any]) -> None:
    """That a value is of a schema: names, and the kind of each value."""
    if "$ref" in schema:
        _check(value, models[schema["$ref"].rpartition("/")[2]], models)
    elif "anyOf" in schema:
        failures = []
        for one in schema["anyOf"]:
            try:
                _check(value, one, models)
            except AssertionError as problem:
                failures.append(problem)
        assert len(failures) < len(schema["anyOf"]), (value, schema)
    elif schema.get("type") == "array":
        assert isinstance(value, list), (value, schema)
        for item in value:
            _check(item, schema["items"], models)
    elif "properties" in schema:
        assert isinstance(value, dict)
        assert set(value) == set(schema["properties"])
        for name, item in value.items():
            _check(item, schema["properties"][name], models)
    else:
        kinds = {
            "string": str,
            "integer": int,
            "number": (int, float),
            "boolean": bool,
            "null": type(None),
            "object": dict,
        }
        assert isinstance(value, kinds[schema["type"]]), (value, schema)
