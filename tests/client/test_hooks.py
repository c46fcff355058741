"""Hooks run around sends, prepares, decisions, stored rows, relay steps and handling, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry

import escrowmq as mq
from escrowmq import client_metrics, hooks, outbox
from escrowmq.model import Act
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target


class Recorder:
    """A hook that keeps the calls, with what became of them."""

    def __init__(self) -> None:
        self.calls: list[hooks.Call] = []
        self.ends: list[tuple[str, str]] = []

    @contextmanager
    def __call__(self, call: hooks.Call) -> Iterator[None]:
        self.calls.append(call)
        try:
            yield
            self.ends.append((call.operation, "done"))
        except Exception as problem:
            self.ends.append((call.operation, type(problem).__name__))
            raise

    def operations(self) -> list[tuple[str, str | None, int]]:
        return [(call.operation, call.topic, call.count) for call in self.calls]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    remove = hooks.add(made)
    yield made
    remove()
    assert hooks.installed == ()


def test_each_operation_of_a_program_is_one_call(recorder: Recorder, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("shop", unasked=True)
        with producer.transaction() as txn:
            txn.send("orders", b"1", key="k")
        plain = bus.producer("till")
        plain.send("orders", b"2")
        plain.send_batch([mq.Message("orders", b"3"), mq.Message("orders", b"4")])
        plain.send_batch(pa.table({"topic": ["orders"], "body": [b"5"]}))
        producer.prepare("orders", b"6", message_id="own")
        producer.rollback("own")
        with bus.consumer("cart", "orders") as consumer:
            for message in islice(consumer, 2):
                message.ack()
    prepare = ("prepare", "orders", 1)
    end = ("end", None, 1)
    sent = [prepare, end, ("send", "orders", 1), ("send", None, 2), ("send", None, 1), prepare, end]
    assert recorder.operations()[:7] == sent
    assert {one[0] for one in recorder.operations()[7:]} == {"handle", "settle"}
    settles = [call for call in recorder.calls if call.operation == "settle"]
    assert [(call.topic, call.count, call.outcome) for call in settles] == [("orders", 1, Act.ACK)] * 2
    first, commit = recorder.calls[:2]
    assert (first.messages[0].body, first.result.transaction_id) == (b"1", commit.transaction_id)
    assert (commit.outcome, commit.result) == (mq.COMMIT, mq.Code.COMMITTED)
    assert recorder.calls[6].outcome is mq.ROLLBACK


async def test_the_awaited_face_has_the_same_calls(recorder: Recorder, tmp_path: Path) -> None:
    async with await mq.aconnect(f"file:{tmp_path}") as bus:
        producer = bus.producer("shop", unasked=True)
        async with producer.transaction() as txn:
            await txn.send("orders", b"1")
        await bus.producer("till").send("orders", b"2")
        consumer = await bus.consumer("cart", "orders")
        async for batch in consumer.batches(10, idle_timeout=60):
            await batch.ack()
            break
    assert [one[0] for one in recorder.operations()] == ["prepare", "end", "send", "handle", "settle"]
    assert recorder.calls[3].columns.num_rows == recorder.calls[3].count


def test_a_hook_changes_properties_of_what_is_sent_and_stored(tmp_path: Path) -> None:
    @contextmanager
    def stamp(call: hooks.Call) -> Iterator[None]:
        if call.properties is not None:
            call.properties[:] = [{**(given or {}), "by": call.operation} for given in call.properties]
        yield

    remove = hooks.add(stamp)
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    with mq.connect(f"file:{tmp_path / 'data'}") as bus:
        bus.producer("shop").send("orders", b"1", properties={"a": "b"})
        bus.producer("shop").send_batch([mq.Message("orders", b"2")])
        with engine.begin() as connection:
            outbox.send_tx(connection, "orders", b"3", properties={"c": "d"})
    target = open_target(f"file:{tmp_path / 'data'}")
    assert Relay(engine, target).drain(60.0)
    target.close()
    remove()
    with mq.connect(f"file:{tmp_path / 'data'}") as bus, bus.consumer("cart", "orders") as consumer:
        found = {message.body: dict(message.properties) for message in islice(consumer, 3)}
    assert found == {b"1": {"a": "b", "by": "send"}, b"2": {"by": "send"}, b"3": {"c": "d", "by": "store"}}


def test_a_relay_step_is_a_call_with_its_codes(recorder: Recorder, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    with engine.begin() as connection:
        outbox.send_batch_tx(connection, [mq.Message("orders", b"1"), mq.Message("bills", b"2")])
    target = open_target(f"file:{tmp_path / 'data'}")
    assert Relay(engine, target).drain(60.0)
    target.close()
    store, *relayed = [call for call in recorder.calls if call.operation in ("store", "relay")]
    assert (store.operation, store.topic, store.count) == ("store", None, 2)
    assert sum(call.count for call in relayed) == 2
    assert all(call.operation == "relay" and not call.result.any() for call in relayed)


def test_what_a_hook_raises_before_the_operation_prevents_it(tmp_path: Path) -> None:
    @contextmanager
    def forbid(call: hooks.Call) -> Iterator[None]:
        if call.topic == "secret":
            raise PermissionError(call.topic)
        yield

    remove = hooks.add(forbid)
    try:
        with mq.connect(f"file:{tmp_path}") as bus:
            producer = bus.producer("shop")
            producer.send("orders", b"1")
            with pytest.raises(PermissionError):
                producer.send("secret", b"2")
            assert [one["name"] for one in bus.admin.topics()] == ["orders"]
    finally:
        remove()


def test_hooks_see_what_the_operation_raises_and_nest_in_their_order(recorder: Recorder, tmp_path: Path) -> None:
    inner = Recorder()
    remove = hooks.add(inner)
    try:
        with mq.connect(f"file:{tmp_path}") as bus, pytest.raises(mq.Rejected):
            bus.producer("shop").send("a/b", b"1")
    finally:
        remove()
        remove()
    assert recorder.ends == inner.ends == [("send", "Rejected")]
    assert recorder.calls[0] is inner.calls[0]


def test_wrong_arguments_are_refused_as_without_hooks(recorder: Recorder, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("shop")
        with pytest.raises(mq.Misuse, match="has its own body"):
            producer.send(mq.Message("orders", b"1"), b"2")  # type: ignore[call-overload]
        with pytest.raises(mq.Misuse):
            producer.send("orders", None)  # type: ignore[call-overload]


def test_metrics_of_a_client_count_operations_messages_and_failures(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    registry = CollectorRegistry()
    stop = client_metrics.instrument(registry)
    request.addfinalizer(stop)
    with mq.connect(f"file:{tmp_path}") as bus:
        producer = bus.producer("shop")
        producer.send_batch([mq.Message("orders", b"1")] * 3)
        with pytest.raises(mq.Rejected):
            producer.send("a/b", b"1")
        with bus.consumer("cart", "orders") as consumer:
            for number, message in enumerate(consumer.messages(idle_timeout=60), 1):
                message.ack()
                if number == 3:
                    consumer.stop()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"escrowmq_client_{name}", labels)

    assert value("messages_total", operation="send") == 3
    assert value("operations_total", operation="send", result="OK") == 1
    assert value("operations_total", operation="send", result="BAD_TOPIC_NAME") == 1
    assert value("operations_total", operation="handle", result="OK") == 3
    assert value("messages_total", operation="handle") == 3
    assert value("operation_seconds_count", operation="handle") == 3
    stop()
    assert hooks.installed == ()
    assert list(registry.collect()) == []


def test_tasks_of_one_loop_share_the_hooks(recorder: Recorder, tmp_path: Path) -> None:
    async def run() -> None:
        async with await mq.aconnect(f"file:{tmp_path}") as bus:
            producer = bus.producer("shop")
            await asyncio.gather(*(producer.send("orders", b"1") for _ in range(50)))

    asyncio.run(run())
    assert recorder.operations() == [("send", "orders", 1)] * 50
    assert (
        len({call.result.offset for call in recorder.calls}) + len({call.result.queue for call in recorder.calls}) > 2
    )
