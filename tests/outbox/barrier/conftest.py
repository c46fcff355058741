"""A migrated database of each kind with a business table, and brokers that ask soon."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from barrier_race import orders

import escrowmq as mq
from escrowmq.outbox import migrate

QUICK = {"transaction_timeout": 0.2, "check_interval": 0.2}


@pytest.fixture
def shop(engine: sa.Engine) -> Iterator[sa.Engine]:
    """The engine of a database with EscrowMQ's tables and a table of orders."""
    migrate(engine)
    orders.create(engine)
    yield engine
    # a bus that closes does not wait for a check that is being answered, and that still holds a connection
    for thread in threading.enumerate():
        if thread.name.startswith("escrowmq-checker"):
            thread.join(30)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[mq.Bus]:
    """An embedded broker that asks after a fifth of a second."""
    with mq.connect(f"file:{tmp_path / 'broker'}", **QUICK) as bus:
        yield bus


@pytest.fixture
def patient_bus(tmp_path: Path) -> Iterator[mq.Bus]:
    """An embedded broker that does not ask within a test."""
    with mq.connect(f"file:{tmp_path / 'broker'}", transaction_timeout=3600) as bus:
        yield bus


@pytest.fixture
def t() -> str:
    """A topic's name."""
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Poll a condition and return what it gave: for states that have no signal of their own."""

    def wait(condition: Callable[[], Any], timeout: float = 30.0) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < deadline, "it did not come to pass"
            time.sleep(0.005)
        return found

    return wait
