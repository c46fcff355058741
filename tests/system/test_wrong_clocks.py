"""A broker whose machine's clock was set back between two runs: what waits, waits as long as it should, and no longer.

The clock is libfaketime's (Debian's package faketime), preloaded into a real broker process; the monotonic clock stays
the real one, as it does on a machine whose date is set.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from load import Broker

import escrowmq as mq

T = TypeVar("T")
DAY = 86_400
BACK = [pytest.param(3600, marks=pytest.mark.long), pytest.param(DAY, marks=pytest.mark.long), 10 * 365 * DAY]
SETTINGS = {
    "transaction_timeout": 1,
    "check_interval": 1,
    "check_max": 1000,
    "max_attempts": 100,
}


@pytest.fixture(scope="module")
def faketime() -> str:
    """The library; where this machine does not have it, the test is skipped, or fails (``CI``)."""
    found = next(
        (
            str(path)
            for path in (
                *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
                *Path("/usr/lib").glob("faketime/libfaketimeMT.so.1"),
            )
        ),
        None,
    )
    if found is None:
        text = "libfaketime is not installed (Debian: faketime)"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return found


@contextmanager
def clock_set_back(monkeypatch: pytest.MonkeyPatch, library: str, seconds: int) -> Iterator[None]:
    """Processes that are started here have a wall clock that is behind."""
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", library)
        patch.setenv("FAKETIME", f"-{seconds}s")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        patch.setenv("FAKETIME_DONT_RESET", "1")
        yield


class Asked:
    """A checker that says nothing but when it was asked."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._changed = threading.Condition()

    def __call__(self, check: mq.Check) -> mq.Outcome:
        with self._changed:
            self.times.setdefault(str(check.transaction_id), []).append(time.monotonic())
            self._changed.notify_all()
        return mq.UNKNOWN

    def wait(self, transaction: str, times: int) -> list[float]:
        with self._changed:
            self._changed.wait_for(lambda: len(self.times.get(transaction, ())) >= times)
            return self.times[transaction]


@pytest.mark.invariant("I36")
@pytest.mark.parametrize("back", BACK)
def test_a_broker_set_back_in_time_asks_delivers_and_waits_on_time(
    tmp_path: Path, faketime: str, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    with Broker(tmp_path / "data", **SETTINGS) as broker:
        with mq.connect(broker.url) as bus:
            shop = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
            before = str(shop.prepare("half", b"before").transaction_id)
            bus.producer("plain").send("delayed", b"before", delay=2.0)
            bus.producer("plain").send("leased", b"before")
            with patiently(lambda: bus.consumer("leasing", ["leased"], lease=3.0, timeout=1.0)) as dying:
                (leased,) = dying.receive(1, wait=60)
                broker.kill()
        with clock_set_back(monkeypatch, faketime, back):
            broker.start()
        with mq.connect(broker.url) as bus:
            checks_come_on_time(bus, before)
            delayed_messages_come_on_time(bus)
            leases_end_on_time(bus, leased.attempt)
            a_receive_waits(bus)
            (health,) = bus.admin.health()
            assert health["status"] == "ok"


def patiently(call: Callable[[], T]) -> T:
    """What a call gives that has little time, once it has had enough."""
    while True:
        try:
            return call()
        except mq.EscrowError as problem:
            if problem.code is not mq.Code.TIMED_OUT:
                raise


def checks_come_on_time(bus: mq.Bus, before: str) -> None:
    asked = Asked()
    producer = bus.producer("shop", checker=asked)
    asked.wait(before, 2)
    begun = time.monotonic()
    after = str(producer.prepare("half", b"after").transaction_id)
    assert asked.wait(after, 1)[0] - begun >= 1.0  # transaction_timeout
    # check_interval; what stood still before it was told of the first is told of the second sooner
    times = (asked.wait(after, number + 1)[number] for number in range(8))
    assert any(later - earlier >= 0.9 for earlier, later in pairwise(times))
    assert {found["id"] for found in bus.admin.transactions(older_than=0.5)} == {before, after}
    (stats,) = bus.admin.stats()
    assert 1.0 <= stats["oldest_half_age_seconds"] < 300.0


def delayed_messages_come_on_time(bus: mq.Bus) -> None:
    with bus.consumer("delaying", ["delayed"], start="earliest", lease=300.0) as consumer:
        assert [next(consumer.messages()).body] == [b"before"]
        begun = time.monotonic()
        bus.producer("plain").send("delayed", b"after", delay=1.0)
        assert next(consumer.messages()).body == b"after"
        assert time.monotonic() - begun >= 1.0


def leases_end_on_time(bus: mq.Bus, attempt: int) -> None:
    with bus.consumer("leasing", ["leased"], lease=1.0) as consumer:
        came = next(consumer.messages())
        assert came.body == b"before"
        assert came.attempt > attempt
        for _ in range(5):  # what stood still after a lease had begun sees the next sooner
            attempt, begun = came.attempt, time.monotonic()
            came = next(consumer.messages())  # not acknowledged: its lease ends
            assert came.attempt > attempt
            if time.monotonic() - begun >= 0.5:
                break
        else:
            raise AssertionError("leases end too early")
        came.ack()


def a_receive_waits(bus: mq.Bus) -> None:
    with bus.consumer("waiting", ["empty"]) as consumer:
        before = rounds(bus)
        begun = time.monotonic()
        assert not consumer.receive(1, wait=2.0)
        assert time.monotonic() - begun >= 1.9
        assert rounds(bus) - before < 60  # and not one per poll that returns at once


def rounds(bus: mq.Bus) -> float:
    (stats,) = bus.admin.stats()
    return float(stats["rounds_total"])
