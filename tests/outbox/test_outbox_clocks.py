"""One clock, the database's: a machine whose own clock is wrong neither makes marks look old nor hides work that is
left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from escrowmq import outbox
from escrowmq.outbox import dialects, inbox
from escrowmq.outbox.modes.journal import Journal, Stage
from escrowmq.outbox.tables import trans_barrier, trans_driven, trans_recv_log

TEN_YEARS_NS = 10 * 365 * 86400 * 10**9


@contextmanager
def wall_clock(monkeypatch: pytest.MonkeyPatch, ahead_ns: int) -> Iterator[None]:
    now_ns = time.time_ns
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: now_ns() + ahead_ns)
        patched.setattr(time, "time", lambda: (now_ns() + ahead_ns) / 1e9)
        yield


@pytest.fixture
def tables(engine: sa.Engine) -> sa.Engine:
    outbox.migrate(engine)
    return engine


@pytest.mark.invariant("I36")
@pytest.mark.parametrize("ahead_ns", [-TEN_YEARS_NS, TEN_YEARS_NS])
def test_marks_are_purged_by_the_databases_clock(
    tables: sa.Engine, monkeypatch: pytest.MonkeyPatch, ahead_ns: int
) -> None:
    """Of a machine that is ten years behind, a fresh mark would be ten years old; to one that is ahead, every mark
    is."""
    with wall_clock(monkeypatch, min(ahead_ns, 0)), tables.begin() as connection:
        assert outbox.claim_tx(connection, message_id="order-1", group="cart")
        outbox.bind_tx(connection, "00000001-1-2a")
    with wall_clock(monkeypatch, max(ahead_ns, 0)):
        assert inbox.purge_seen(tables, 30 * 86400) == 0
        assert outbox.Barrier(tables).purge(30 * 86400) == 0
    with tables.connect() as connection:
        told = connection.scalar(sa.select(dialects.Dialect(tables).now_us))
        for moment in (trans_recv_log.c.seen_us, trans_barrier.c.decided_us):
            assert abs(told - connection.scalar(sa.select(moment))) < 3600e6


@pytest.mark.invariant("I36")
def test_what_is_driven_is_redriven_by_the_databases_clock(tables: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with tables.begin() as connection:
        row: dict[str, Any] = {column.name: None for column in trans_driven.c}
        row |= {
            "id": b"1" * 16,
            "producer_group": "shop",
            "state": int(Stage.COMMITTING),
            "topic": "orders",
            "body": b"",
        }
        created_us = dialects.database_now_us(connection) - 120_000_000
        connection.execute(sa.insert(trans_driven), {**row, "delay_us": 0, "attempts": 0, "created_us": created_us})
    for ahead_ns in (-TEN_YEARS_NS, TEN_YEARS_NS):
        with wall_clock(monkeypatch, ahead_ns):
            assert sum(batch.num_rows for batch, _ in Journal(tables, "shop").pages(Stage.COMMITTING, 60.0)) == 1
            assert not list(Journal(tables, "shop").pages(Stage.COMMITTING, 600.0))
