"""The AsyncAPI document of an app: by the function, and by ``escrowmq work --asyncapi``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pydantic
import pytest
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app as command
from escrowmq.handlers import App


class Line(msgspec.Struct):
    article: str
    count: int = 1


class Card(msgspec.Struct, tag=True):
    number: str


class Cash(msgspec.Struct, tag=True):
    pass


@dataclass
class Order:
    id: str
    lines: list[Line]
    paid: Card | Cash | None = None


class Item(pydantic.BaseModel):
    name: str


class Customer(pydantic.BaseModel):
    name: str
    items: list[Item]


def app_of_all_kinds() -> App:
    app = App()

    @app.handler("orders", "returns", group="cart")
    def add(order: Order) -> None:
        """Add an order to the cart."""

    @app.handler("orders", group="count")
    def count(message: mq.Received) -> None: ...

    @app.handler("customers", group="mail")
    async def greet(customer: Customer) -> None: ...

    @app.handler("texts", group="texts")
    def read(text: str) -> None: ...

    @app.handler("files", group="files")
    def keep(body: bytes) -> None: ...

    @app.handler("facts", group="facts")
    def note(fact: dict[str, int]) -> None: ...

    @app.handler("files", group="columns", batch=True)
    def columns(batch: pa.RecordBatch) -> None: ...

    return app


def resolve(document: dict[str, Any], ref: str) -> Any:
    """What a reference within the document means. Raises KeyError if there is nothing."""
    assert ref.startswith("#/")
    found: Any = document
    for part in ref[2:].split("/"):
        found = found[part]
    return found


def refs(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [ref for value in part.values() for ref in refs(value)]
    return [ref for value in part for ref in refs(value)] if isinstance(part, list) else []


def test_the_document_has_each_topic_operation_and_schema() -> None:
    document = app_of_all_kinds().asyncapi("shop", "2.1.0")
    assert json.loads(json.dumps(document)) == document
    assert (document["asyncapi"], document["info"]) == ("3.0.0", {"title": "shop", "version": "2.1.0"})
    assert sorted(document["channels"]) == ["customers", "facts", "files", "orders", "returns", "texts"]
    ids = ["cart.orders", "cart.returns", "columns", "count", "facts", "files", "mail", "texts"]
    assert sorted(document["operations"]) == ids
    assert sorted(document["components"]["schemas"]) == ["Card", "Cash", "Customer", "Item", "Line", "Order"]
    assert len(refs(document)) > 20
    for ref in refs(document):
        resolve(document, ref)
    messages = document["channels"]["orders"]["messages"]
    assert messages["count"] == {}, "it gets the message as it is"
    assert document["operations"]["cart.orders"]["description"] == "Add an order to the cart."
    order = resolve(document, messages["cart"]["payload"]["$ref"])
    assert (order["required"], sorted(order["properties"])) == (["id", "lines"], ["id", "lines", "paid"])
    assert "discriminator" not in json.dumps(document)
    contents = {name: each["messages"] for name, each in document["channels"].items()}
    assert contents["texts"]["texts"]["payload"] == {"type": "string"}
    assert contents["files"]["files"] == {"name": "bytes", "contentType": "application/octet-stream"}
    assert contents["facts"]["facts"]["payload"]["additionalProperties"] == {"type": "integer"}


@pytest.mark.parametrize("first", [Customer, msgspec.defstruct("Customer", ["name"])])
def test_two_types_of_one_name_are_an_error(first: Any) -> None:
    app, own = App(), msgspec.defstruct("Customer", ["name"])

    @app.handler("a", group="a")
    def one(body: first) -> None: ...

    @app.handler("b", group="b")
    def two(body: own) -> None: ...  # type: ignore[valid-type]

    with pytest.raises(mq.Misuse, match="is the name of two types"):
        app.asyncapi("shop")


def test_the_command_prints_it_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "described_app.py").write_text(
        "from escrowmq.handlers import App\napp = App()\n"
        "@app.handler('orders', group='cart')\ndef add(order: dict) -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(command, ["work", "described_app:app", "--asyncapi"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["info"]["title"] == "described_app:app"
    assert document["channels"]["orders"]["messages"]["cart"]["payload"] == {"type": "object"}
