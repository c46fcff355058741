"""OpenTelemetry's metrics of a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import escrowmq as mq
from escrowmq import outbox, tracing
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target

Numbers = Callable[[str], dict[tuple[str, ...], Any]]


@pytest.fixture
def numbers() -> Iterator[Numbers]:
    """The points of a metric by operation, topic and error."""
    reader = InMemoryMetricReader()
    tracing.instrument(meter_provider=MeterProvider([reader]))

    def named(attributes: Mapping[str, Any]) -> tuple[str, ...]:
        names = ("messaging.operation.name", "messaging.destination.name", "error.type")
        return tuple(str(attributes[name]) for name in names if name in attributes)

    def get(wanted: str) -> dict[tuple[str, ...], Any]:
        data = reader.get_metrics_data()
        every = [one for of in data.resource_metrics for scope in of.scope_metrics for one in scope.metrics]
        (points,) = [one.data.data_points for one in every if one.name == wanted]
        assert all(point.attributes["messaging.system"] == "escrowmq" for point in points)
        return {named(point.attributes): getattr(point, "value", getattr(point, "count", None)) for point in points}

    yield get
    tracing.uninstrument()


def test_each_operation_is_counted_and_timed(numbers: Numbers, tmp_path: Path) -> None:
    """What a relay sends to EscrowMQ is also a send of its client."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    with engine.begin() as connection:
        outbox.send_tx(connection, "orders", b"0")
    target = open_target(f"file:{tmp_path / 'data'}")
    assert Relay(engine, target).drain(60.0)
    target.close()
    engine.dispose()
    with mq.connect(f"file:{tmp_path / 'data'}") as bus:
        bus.producer("shop").send("orders", b"1")
        bus.producer("shop").send_batch([mq.Message("orders", b"2"), mq.Message("points", b"3")])
        with pytest.raises(mq.Rejected):
            bus.producer("shop").send("orders", b"4", tag="x" * 10_000)
        with bus.producer("till", unasked=True).transaction() as txn:
            txn.send("orders", b"5")
        with bus.consumer("cart", ["orders", "points"]) as consumer:
            taken = []
            for message in consumer:
                taken.append(message.body)
                message.ack() if message.topic == "orders" else message.nack()
                if len(taken) == 5:
                    break
    assert sorted(taken) == [b"0", b"1", b"2", b"3", b"5"]
    sent = numbers("messaging.client.sent.messages")
    failed = {name: value for name, value in sent.items() if len(name) == 3}
    assert list(failed.values()) == [1]
    assert sent == {("relay",): 1, ("send", "orders"): 1, ("send",): 3, ("prepare", "orders"): 1, **failed}
    assert numbers("messaging.client.operation.duration").keys() == {
        *sent,
        ("commit",),
        ("ack", "orders"),
        ("nack", "points"),
    }
    consumed = numbers("messaging.client.consumed.messages")
    assert consumed == {("handle", "orders"): 4, ("handle", "points"): 1}
    assert numbers("messaging.process.duration") == consumed


def test_nothing_is_measured_after_the_end(numbers: Numbers, tmp_path: Path) -> None:
    with mq.connect(f"file:{tmp_path}") as bus:
        bus.producer("shop").send("orders", b"1")
        tracing.uninstrument()
        bus.producer("shop").send("orders", b"2")
    assert numbers("messaging.client.sent.messages") == {("send", "orders"): 1}
