"""A migrated database of each kind with a business table, and brokers that ask soon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from barrier_race import orders

import escrowmq as mq
from escrowmq.outbox import migrate

QUICK = {"transaction_timeout": 0.2, "check_interval": 0.2, "check_max": 1_000_000}


@pytest.fixture
def shop(engine: sa.Engine) -> Iterator[sa.Engine]:
    """The engine of a database with EscrowMQ's tables and a table of orders."""
    migrate(engine)
    orders.create(engine)
    yield engine
    # a bus that closes does not wait for a check that is being answered, and that still holds a connection
    for thread in threading.enumerate():
        if thread.name.startswith("escrowmq-checker"):
            thread.join(60)


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
