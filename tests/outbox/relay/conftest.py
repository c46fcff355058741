"""A database with the tables, a target in memory, relays that are stopped at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from escrowmq import outbox
from escrowmq.outbox.relay import Relay
from escrowmq.platform import failpoints
from escrowmq.testing.memory_target import MemoryTarget

QUICK: dict[str, Any] = {
    "workers": 1,
    "lease": 600.0,
    "poll_interval": 0.02,
    "redelivery_interval": 0.02,
    "purge_interval": 0.01,
    "backoff": 0.002,
    "backoff_max": 0.005,
}
"""Options under which everything comes to pass within a test."""


@pytest.fixture
def tables(engine: sa.Engine) -> sa.Engine:
    """The engine of a database that has the tables."""
    outbox.migrate(engine)
    return engine


@pytest.fixture
def target() -> MemoryTarget:
    """A target that takes everything."""
    return MemoryTarget()


@pytest.fixture
def relay(tables: sa.Engine, target: MemoryTarget) -> Iterator[Callable[..., Relay]]:
    """Make relays from the database to the target, with quick options; all are stopped at the end."""
    made: list[Relay] = []

    def make(to: Any = None, **options: Any) -> Relay:
        relay = Relay(tables, to or target, **{**QUICK, **options})
        made.append(relay)
        return relay

    yield make
    failpoints.arm()
    for relay in made:
        relay.stop()
