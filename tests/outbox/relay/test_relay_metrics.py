"""A relay's numbers for Prometheus: what was sent and refused, what the table still holds, and what is said while the
database is away.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry, generate_latest
from relay_checks import put

from escrowmq.errors import Code
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.relay import metrics as module
from escrowmq.outbox.relay.metrics import BACKLOG, METRICS, Backlog, Statistics, collector
from escrowmq.testing.memory_target import MemoryTarget


def exported(made: Any) -> dict[str, float]:
    """By name and labels, what Prometheus would read."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(made)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_what_is_sent_refused_and_left_is_exported(sqlite_shop: sa.Engine, target: MemoryTarget) -> None:
    target.answer = lambda row: Code.BODY_TOO_LARGE if row.key == "bad" else Code.OK
    running = Relay(sqlite_shop, target, redeliveries=0)
    put(sqlite_shop, ("good", "1"), ("good", "2"), ("bad", "1"), ("bad", "2"))
    assert running.drain(60.0)
    numbers = exported(collector("memory", lambda: running.statistics, running.backlog))
    assert numbers['escrowmq_relay_sent_total{target="memory"}'] == 2
    assert numbers['escrowmq_relay_given_up_total{target="memory"}'] == 1
    assert numbers["escrowmq_outbox_waiting"] == 1
    assert numbers["escrowmq_outbox_held"] == 1
    assert numbers["escrowmq_outbox_pending"] == 0
    assert len(numbers) == len(METRICS) + len(BACKLOG)


def test_rows_are_counted_now_and_then_however_often_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def count() -> Backlog:
        counts.append(1)
        return Backlog(pending=len(counts))

    monkeypatch.setattr(module, "COUNT_SECONDS", 3600.0)
    made = collector("memory", Statistics, count)
    assert [exported(made)["escrowmq_outbox_pending"] for _ in range(3)] == [1, 1, 1]
    monkeypatch.setattr(module, "COUNT_SECONDS", 0.0)
    assert exported(made)["escrowmq_outbox_pending"] == 2


def test_while_the_database_is_away_the_relays_own_numbers_are_there(caplog: pytest.LogCaptureFixture) -> None:
    def away() -> Backlog:
        raise sa.exc.OperationalError("SELECT", {}, Exception("connection refused"))

    numbers = exported(collector("memory", Statistics, away))
    assert len(numbers) == len(METRICS)
    assert "could not be counted" in caplog.text
