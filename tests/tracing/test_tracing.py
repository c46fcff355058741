"""One trace from the send to the effect, whichever way a message goes; and none of it where nobody asked for it."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import escrowmq as mq
from escrowmq import hooks, outbox, tracing
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target


class Spans:
    """What was recorded, and a tracer for the spans of the application."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("shop")

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.all(name)
        return found


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    tracing.instrument(made.provider)
    yield made
    tracing.uninstrument()


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert parent.context is not None
    return span.parent is not None and (span.parent.trace_id, span.parent.span_id) == (
        parent.context.trace_id,
        parent.context.span_id,
    )


def test_from_the_outbox_over_relay_and_broker_to_the_effect_it_is_one_trace(spans: Spans, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    with spans.tracer.start_as_current_span("checkout"), engine.begin() as connection:
        identity = outbox.send_tx(connection, "orders", b"one", key="o-1", properties={"shop": "north"})
    target = open_target(f"file:{tmp_path / 'data'}")
    assert Relay(engine, target).drain(60.0)
    target.close()
    with mq.connect(f"file:{tmp_path / 'data'}") as bus, bus.consumer("cart", "orders") as consumer:
        for message in consumer:
            assert message.properties["shop"] == "north"
            with spans.tracer.start_as_current_span("put into the cart"), engine.begin() as connection:
                assert outbox.inbox.claim_tx(connection, message, group="cart")
            message.ack()
            break
    engine.dispose()
    checkout, create, process, effect = map(
        spans.one, ("checkout", "create orders", "process orders", "put into the cart")
    )
    assert len({trace_of(span) for span in (checkout, create, process, effect)}) == 1
    assert is_child(create, checkout)
    assert is_child(process, create)
    assert is_child(effect, process)
    relay = spans.one("relay")
    assert [link.context.span_id for link in relay.links] == [create.context.span_id]  # type: ignore[union-attr]
    assert process.attributes is not None
    assert process.attributes["messaging.message.id"] == identity.hex()
    assert process.attributes["messaging.system"] == "escrowmq"
    assert process.kind is trace.SpanKind.CONSUMER


def test_a_transaction_its_commit_and_what_is_consumed(spans: Spans, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        with spans.tracer.start_as_current_span("order"), producer.transaction() as txn:
            txn.send("orders", b"one")
            txn.send("points", b"two")
        with bus.consumer("cart", ["orders", "points"]) as consumer:
            found = {message.topic: message for message in _some(consumer, 2)}
    order, commit = spans.one("order"), spans.one("commit")
    assert is_child(commit, order)
    assert commit.attributes is not None
    for topic in found:
        prepare, process = spans.one(f"prepare {topic}"), spans.one(f"process {topic}")
        assert is_child(prepare, order)
        assert is_child(process, prepare)
        assert prepare.attributes is not None
        assert (
            prepare.attributes["messaging.escrowmq.transaction_id"]
            == commit.attributes["messaging.escrowmq.transaction_id"]
        )


def _some(consumer: mq.Consumer, count: int) -> Iterator[mq.Received]:
    for number, message in enumerate(consumer, 1):
        message.ack()
        yield message
        if number == count:
            return


async def test_tasks_keep_their_traces_apart(spans: Spans, tmp_path: Path) -> None:
    async with await mq.aconnect(f"file:{tmp_path}", default_queues=1) as bus:
        producer = bus.producer("shop")

        async def order(number: int) -> None:
            with spans.tracer.start_as_current_span(f"order {number}"):
                await producer.send("orders", b"%d" % number, key=f"{number}")

        await asyncio.gather(*map(order, range(20)))
        consumer = await bus.consumer("cart", "orders")
        seen: dict[str, int] = {}
        async for message in consumer:
            seen[message.body.decode()] = trace.get_current_span().get_span_context().trace_id
            await message.ack()
            if len(seen) == 20:
                break
        await consumer.close()
    assert seen == {f"{n}": trace_of(spans.one(f"order {n}")) for n in range(20)}


def test_a_batch_is_linked_with_the_traces_of_its_messages(spans: Spans, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}", default_queues=1) as bus:
        producer = bus.producer("shop")
        producer.send_batch([mq.Message("orders", b"%d" % n) for n in range(3)]).check()
        producer.send_batch(pa.table({"topic": ["orders"], "body": [b"columns"]})).check()
        with bus.consumer("cart", "orders") as consumer:
            for batch in consumer.batches(100):
                assert len(batch) == 4
                batch.ack()
                break
    send, columns = spans.all("send")
    assert columns.attributes is not None
    assert columns.attributes["messaging.batch.message_count"] == 1
    process = spans.one("process")
    assert [trace_of_link.context.span_id for trace_of_link in process.links] == [send.context.span_id] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("act", ["ack", "nack", "reject", "release"])
def test_a_settlement_is_linked_with_its_message(spans: Spans, tmp_path: Path, act: str) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        bus.producer("shop").send("orders", b"one")
        with bus.consumer("cart", "orders") as consumer:
            for message in consumer:
                getattr(message, act)()
                break
    send, process, settle = map(spans.one, ("send orders", "process orders", f"{act} orders"))
    assert settle.kind is trace.SpanKind.CLIENT
    assert is_child(settle, process)
    assert [link.context.span_id for link in settle.links] == [send.context.span_id]  # type: ignore[union-attr]
    assert settle.attributes is not None
    assert settle.attributes["messaging.operation.type"] == "settle"
    assert settle.attributes["messaging.operation.name"] == act
    assert settle.attributes["messaging.message.id"] == message.message_id.hex()


async def test_settlements_of_tasks_and_batches_are_linked_too(
    spans: Spans, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with await mq.aconnect(f"file:{tmp_path}", default_queues=1) as bus:
        producer = bus.producer("shop")
        for number in range(3):
            await producer.send("orders", b"%d" % number)
        consumer = await bus.consumer("cart", "orders")
        async for batch in consumer.batches(100):
            await batch.ack()
            break
        await producer.send("orders", b"3")
        (message,) = await consumer.receive(1, wait=60.0)
        await message.extend(30)
        await message.nack()
        await consumer.close()
    assert not [one for one in caplog.records if one.name == "opentelemetry.context"]  # of the abandoned loop
    *first, last = (span.context.span_id for span in spans.all("send orders") if span.context is not None)
    whole, one = spans.one("ack"), spans.one("nack orders")
    assert [link.context.span_id for link in whole.links] == first
    assert whole.attributes is not None
    assert whole.attributes["messaging.batch.message_count"] == 3
    assert [link.context.span_id for link in one.links] == [last]


def test_what_a_handler_raises_is_in_the_span_of_its_message(spans: Spans, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        bus.producer("shop").send("orders", b"one")
        with bus.consumer("cart", "orders") as consumer:
            for message in consumer:
                with pytest.raises(ValueError, match="spoilt"), tracing.processing(message):
                    raise ValueError("spoilt")
                message.ack()
                break
    process = spans.one("process orders")
    assert process.status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in process.events] == ["exception"]
    assert not trace.get_current_span().get_span_context().is_valid, "no context is left behind"


def test_a_refused_send_is_an_error_with_its_code(spans: Spans, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus, pytest.raises(mq.Rejected):
        bus.producer("shop").send("orders", bytes(5 << 20))
    span = spans.one("send orders")
    assert span.attributes is not None
    assert span.attributes["error.type"] == "BODY_TOO_LARGE"


def test_a_context_never_makes_a_message_too_large_nor_replaces_another(spans: Spans, tmp_path: Path) -> None:
    full = {"p": "x" * ((32 << 10) - 1)}
    own = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    with mq.connect(f"file:{tmp_path}", default_queues=1) as bus:
        producer = bus.producer("shop")
        producer.send("orders", b"1", properties=full)
        producer.send(mq.Message("orders", b"2", properties=own))
        with pytest.raises(mq.EscrowError):
            producer.send("orders", b"3", properties={"p": 1})  # type: ignore[dict-item]
        with bus.consumer("cart", "orders") as consumer:
            one, two = _some(consumer, 2)
    assert dict(one.properties) == full
    assert dict(two.properties) == own
    other = spans.all("process orders")[1]
    assert trace_of(other) == int("1" * 32, 16)


@pytest.mark.parametrize("text", ["", "00-zz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10_000, "\n"])
def test_a_context_that_cannot_be_read_begins_a_trace_of_its_own(spans: Spans, tmp_path: Path, text: str) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        bus.producer("shop").send("orders", b"1", properties={"traceparent": text})
        with bus.consumer("cart", "orders") as consumer:
            list(_some(consumer, 1))
    assert spans.one("process orders").parent is None


def test_without_instrumentation_there_is_no_hook_and_nothing_is_added(tmp_path: Path) -> None:
    provider = TracerProvider()
    tracing.instrument(provider)
    tracing.instrument(provider)
    assert len(hooks.installed) == 2, "spans, and metrics"
    tracing.uninstrument()
    tracing.uninstrument()
    assert hooks.installed == ()
    with mq.connect(f"file:{tmp_path}") as bus:
        bus.producer("shop").send("orders", b"1")
        with bus.consumer("cart", "orders") as consumer:
            (message,) = _some(consumer, 1)
    assert dict(message.properties) == {}


def test_without_a_recording_provider_messages_stay_as_they_are(tmp_path: Path) -> None:
    tracing.instrument()
    try:
        with mq.connect(f"file:{tmp_path}") as bus:
            bus.producer("shop").send("orders", b"1")
            with bus.consumer("cart", "orders") as consumer:
                (message,) = _some(consumer, 1)
    finally:
        tracing.uninstrument()
    assert dict(message.properties) == {}


def test_the_command_of_opentelemetry_finds_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["opentelemetry_instrumentor"]["escrowmq"].partition(":")
    assert (module, getattr(tracing, name)) == ("escrowmq.tracing", tracing.EscrowMQInstrumentor)
