"""Embedded brokers and a SQLite database for the overview."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox

NEVER = 600.0
"""Seconds that no test lives to see."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., mq.Bus]]:
    """Open a broker in this process, under a name."""
    buses: list[mq.Bus] = []

    def open_bus(name: str = "data", **settings: Any) -> mq.Bus:
        later = dict.fromkeys(("retry_backoff", "retry_backoff_max", "lease_seconds", "transaction_timeout"), NEVER)
        given = {"default_queues": 1, **later, **settings}
        buses.append(mq.connect(f"file:{tmp_path / name}", **given))
        return buses[-1]

    yield open_bus
    for bus in buses:
        bus.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    """A database with the tables."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    """Wait for a condition; what it gave."""

    def wait(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    return wait
