"""What a handler's signature may be, and the errors where it is decorated."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import escrowmq as mq
from escrowmq.errors import Misuse
from escrowmq.handlers import App


class Struct(msgspec.Struct):
    id: str
    parts: list["Struct"] = []


class Model(BaseModel):
    id: str


@dataclass
class Data:
    id: str


class Opaque:
    pass


def refused(app: App, function: Any, match: str, **choices: Any) -> None:
    with pytest.raises(Misuse, match=match):
        app.handler("orders", group="g", **choices)(function)
    assert not app.handlers


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        (bytes, b"\xff\x00", b"\xff\x00"),
        (str, "grün".encode(), "grün"),
        (dict, b'{"a": [1]}', {"a": [1]}),
        (list[int], b"[1, 2]", [1, 2]),
        (int | None, b"null", None),
        (Struct, b'{"id": "a", "parts": [{"id": "b"}]}', Struct("a", [Struct("b")])),
        (Data, b'{"id": "a"}', Data("a")),
        (Model, b'{"id": "a"}', Model(id="a")),
        (Any, b"1", 1),
    ],
)
def test_the_first_annotation_decodes_the_body(app: App, bus: mq.Bus, kind: Any, body: bytes, value: Any) -> None:
    got = []

    def handle(what: Any) -> None:
        got.append(what)

    handle.__annotations__["what"] = kind
    assert app.handler("orders", group="g")(handle) is handle, "the name stays the plain function"
    bus.producer("p").send("orders", body)
    assert [one.outcome for one in app.run_available(bus)] == ["acked"]
    assert got == [value]
    assert type(got[0]) is type(value)


def test_the_first_parameter_may_be_the_message(app: App, bus: mq.Bus) -> None:
    got: list[Any] = []

    @app.handler("orders", group="received")
    def received(message: mq.Received) -> None:
        got.append((message.key, message.attempt, message.body))

    @app.handler("orders", group="message")
    async def message(message: mq.Message, again: mq.Received, *, unknown: int = 7) -> None:
        got.append((message, again.message_id, unknown))

    receipt = bus.producer("p").send("orders", b"x", key="k", tag="t", properties={"a": "b"})
    app.run_available(bus)
    assert got[0] == ("k", 1, b"x")
    assert got[1][0] == mq.Message(
        "orders", b"x", "k", "t", {"a": "b"}, queue=receipt.queue, message_id=receipt.message_id
    )
    assert got[1][1:] == (receipt.message_id, 7)


def test_local_classes_and_annotations_as_text_are_known(app: App, bus: mq.Bus) -> None:
    class Local(msgspec.Struct):
        id: str

    got = []

    @app.handler("orders", group="g")
    def handle(order: "Local") -> None:
        got.append(order)

    bus.producer("p").send("orders", b'{"id": "a"}')
    app.run_available(bus)
    assert got == [Local("a")]


def test_what_no_body_becomes_is_refused(app: App) -> None:
    def nothing() -> None: ...
    def bare(body) -> None: ...  # type: ignore[no-untyped-def]
    def keyword(*, body: bytes) -> None: ...
    def opaque(body: Opaque) -> None: ...
    def nested(body: dict[str, list[Opaque]]) -> None: ...
    def unknown(body: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
    def generator(body: bytes):
        yield  # type: ignore[no-untyped-def]

    for function in (nothing, bare, keyword):
        refused(app, function, f"{function.__name__}: its first parameter has no annotation")
    refused(app, opaque, "opaque: no body becomes .*Opaque")
    refused(app, nested, "nested: no body becomes .*Opaque")
    refused(app, unknown, "unknown: an annotation is not known")
    refused(app, generator, "generator is a generator function")


def test_parameters_that_nothing_provides_are_refused(app: App) -> None:
    def opaque(body: bytes, thing: Opaque) -> None: ...
    def bare(body: bytes, thing) -> None: ...  # type: ignore[no-untyped-def]
    def session(body: bytes, session: Session) -> None: ...

    refused(app, opaque, "opaque: the parameter 'thing' is a Opaque, which nothing provides .*app.dependency")
    refused(app, bare, "bare: the parameter 'thing' has no annotation")
    refused(app, session, "session: the parameter 'session' is a Session, which nothing provides")


def test_choices_that_no_consumer_serves_are_refused(app: App) -> None:
    def handle(body: bytes) -> None: ...

    refused(app, handle, "concurrency = 0", concurrency=0)
    refused(app, handle, "batch = -1", batch=-1)
    refused(app, handle, "bytes.* is not for batches .*RecordBatch", batch=True)
    with pytest.raises(Misuse, match="has no topic"):
        app.handler(group="g")(handle)

    def batch(batch: pa.RecordBatch) -> None: ...

    refused(app, batch, "RecordBatch is for batches .*batch=True")
    app.handler("orders", group="g")(handle)
    with pytest.raises(Misuse, match="the group 'g' has a handler"):
        app.handler("others", group="g")(handle)
    with pytest.raises(Misuse, match="no handlers"):
        App().running(None)  # type: ignore[arg-type]


def test_once_and_the_function_belong_together(app: App) -> None:
    engine, later = sa.create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")

    def without(body: bytes) -> None: ...
    def twice(body: bytes, one: Session, other: sa.Connection) -> None: ...
    def plain(body: bytes, session: Session) -> None: ...
    async def awaited(body: bytes, session: Session) -> None: ...
    def core(body: bytes, connection: sa.Connection) -> None: ...

    refused(app, without, "without: once= gives one parameter the transaction, and 0 are", once=engine)
    refused(app, twice, "and 2 are", once=engine)
    refused(app, plain, "plain: once=AsyncEngine .*a plain function needs an Engine", once=later)
    refused(app, awaited, "awaited: once=Engine .*a coroutine function needs an AsyncEngine", once=engine)
    refused(app, awaited, "0 are annotated", once=later)
    refused(app, core, "a sessionmaker makes no Connection", once=sessionmaker(engine))
    refused(app, plain, "once=str", once="sqlite://")


def test_the_function_can_be_called_directly(app: App) -> None:
    @app.handler("orders", group="g")
    def double(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    assert double(json.loads("[1, 2]")) == [2, 4]
