"""A database that is locked or away says so in a line, now and then, and not in a traceback for every batch."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox import inbox

IDS = ["00000001-1-2a", "00000001-1-2b"]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0.01})
    outbox.migrate(engine)
    yield engine
    engine.dispose()


@contextmanager
def locked(shop: sa.Engine) -> Iterator[None]:
    """Nobody else can even read."""
    with closing(sqlite3.connect(str(shop.url.database), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def test_a_barrier_whose_database_is_locked_answers_unknown_and_says_so_once(
    shop: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    barrier = outbox.Barrier(shop, wait=0.01)
    caplog.set_level(logging.INFO, "escrowmq")
    with locked(shop):
        for _ in range(5):
            assert barrier.decide_ids(IDS).tolist() == [mq.UNKNOWN, mq.UNKNOWN]
    (said,) = caplog.records
    assert (said.levelname, said.exc_info) == ("WARNING", None)
    assert "DISCONNECTED" in said.message
    assert "database is locked" in said.message
    assert "\n" not in said.message
    caplog.clear()
    assert barrier.decide(IDS[0]) is mq.ROLLBACK
    assert [(r.levelname, r.message) for r in caplog.records] == [("INFO", "the barrier can read its database again")]


def test_a_consumer_whose_database_is_locked_says_so_in_a_line_each(
    shop: sa.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []
    with mq.connect(f"file:{tmp_path / 'data'}", retry_backoff=5, max_attempts=100) as bus:
        producer = bus.producer("shop")
        for number in range(3):
            producer.send("orders", b"%d" % number)
        with locked(shop), bus.consumer("cart", ["orders"]) as consumer:
            said: list[logging.LogRecord] = []
            while len(said) < 3:
                assert inbox.consume(consumer, shop, lambda _, m: seen.append(m.body), idle_timeout=0.5) == 0
                said = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert all(record.exc_info in (None, False) and "database is locked" in record.message for record in said)
    assert not seen
