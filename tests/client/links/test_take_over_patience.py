"""A shard of several brokers that is silent: calls that can go elsewhere do, those that belong to it wait for a
take-over, and not for longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.client.bus import Bus
from escrowmq.client.links import presence
from escrowmq.client.links.router import broker_of
from escrowmq.errors import Code, Overloaded, unsent
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange, ExchangeOptions
from escrowmq.wire.link import BrokerState, Phase

QUIET = 0.1
EAST, WEST = (next(key for key in map(str, range(99)) if broker_of(key, 2) == number) for number in (0, 1))
"""A key of either shard."""


class Moving(TwinLink):
    """A shard of several brokers. While ``nobody`` leads each request is refused by the connection."""

    nobody = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.state = BrokerState(Phase.UP, several=True)

    def when_there(self, call: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        if self.nobody:
            refused: Future[pa.RecordBatch] = Future()
            refused.set_exception(unsent("nobody leads"))
            return refused
        return super().exchange(kind, batch, options)

    def action(self, name: str, request: Mapping[str, Any], timeout: float) -> Any:
        if self.nobody:
            raise unsent("nobody leads")
        return super().action(name, request, timeout)


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bus, Moving]]:
    monkeypatch.setattr(presence, "AWAY_SECONDS", QUIET)
    east, west = TwinLink(1, "east:1"), Moving(2, "west:1")
    with Bus([east, west]) as bus:
        yield bus, west


def until_quiet(bus: Bus) -> None:
    bus.router.presence.suspect(1)
    while not bus.router.presence.quiet(1):
        time.sleep(0.005)


def test_keyed_calls_wait_for_a_take_over_and_others_go_elsewhere(
    shards: tuple[Bus, Moving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "TAKE_OVER_SECONDS", 3600.0)
    bus, west = shards
    producer = bus.producer("p", checker=lambda _: mq.UNKNOWN, timeout=120.0)
    producer.send("t", b"first", key=WEST)
    half = producer.prepare("t", b"half", key=WEST)
    west.nobody = True
    until_quiet(bus)
    done: list[object] = []

    def keyed() -> None:
        done.append(producer.send("t", b"keyed", key=WEST))
        done.append(producer.commit(half.transaction_id))

    waiting = threading.Thread(target=keyed)
    waiting.start()
    producer.send("t", b"any")  # at the other shard, while nobody leads this one
    producer.send("t", b"its own", key=EAST)
    assert not done
    assert bus.missing() == []
    west.nobody = False
    waiting.join()
    assert len(done) == 2
    assert done[1] is Code.COMMITTED


def test_a_shard_that_nobody_takes_over_is_away_at_last(
    shards: tuple[Bus, Moving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "TAKE_OVER_SECONDS", 3 * QUIET)
    bus, west = shards
    producer = bus.producer("p")
    producer.send("t", b"first", key=WEST)
    west.nobody = True
    with pytest.raises(Overloaded) as refused:
        producer.send("t", b"keyed", key=WEST)
    assert refused.value.code is Code.BROKER_AWAY
    assert [one["broker"] for one in bus.missing()] == ["west:1"]
    with pytest.raises(Overloaded):
        producer.send_batch([mq.Message("t", b"more", key=WEST)])
