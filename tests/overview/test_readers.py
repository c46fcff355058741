"""Streaming queries as readers: their lag, by the reads that name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import escrowmq as mq
from escrowmq.broker import readers
from escrowmq.overview import status

Open = Callable[..., mq.Bus]


def read(bus: mq.Bus, end: int, batch: int, reader: str = "sums", **fields: Any) -> None:
    """Read offsets 0 to ``end`` as a task of a query does."""
    request: Any = {"source": "orders", "queue": 0, "start": 0, "end": end, "reader": reader, "batch": batch, **fields}
    for _ in bus.router.links[0].read(request):
        pass


def lags(bus: mq.Bus) -> dict[str, int]:
    return {one.reader: one.lag for one in status(bus).readers}


def test_the_lag_is_what_comes_after_the_last_batch(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(10)])
    assert lags(bus) == {}
    read(bus, 8, 3)
    read(bus, 4, 3)  # another task of the batch
    assert lags(bus) == {"sums": 2}
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(5)])
    assert lags(bus) == {"sums": 7}
    [one] = status(bus).readers
    assert (one.topic, one.read_us > 0) == ("orders", True)
    read(bus, 6, 0)  # a new checkpoint begins again
    assert lags(bus) == {"sums": 9}
    read(bus, 15, 0, "copies")
    assert lags(bus) == {"sums": 9, "copies": 0}
    bus.admin.delete_topic("orders", force=True)
    assert lags(bus) == {}


def test_only_reads_of_topics_with_an_end_count(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(10)])
    read(bus, 5, 0, source="%half")
    request: Any = {"source": "orders", "reader": "sums"}
    assert sum(batch.num_rows for batch in bus.router.links[0].read(request)) == 10
    assert lags(bus) == {}


def test_the_readers_of_a_broker_are_bounded_and_forgotten(opened: Open, monkeypatch: Any) -> None:
    monkeypatch.setattr(readers, "MOST", 2)
    bus = opened()
    bus.producer("shop").send("orders", b"")
    for name in ("one", "two", "one", "three", "x" * 300):
        read(bus, 1, 0, name)
    assert set(lags(bus)) == {"three", "x" * 200}
    monkeypatch.setattr(readers, "KEPT_US", -1)
    assert lags(bus) == {}
