"""Brokers and workers for the tests of Celery."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery_world import TimedBroker, Workers

from escrowmq_lab.servers import escrow
from escrowmq_lab.servers.process import Server


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a broker for all tests that need nothing special; their queues do not meet."""
    with escrow.serving(tmp_path_factory.mktemp("broker"), "--retry-backoff", "0.05") as server:
        yield server.url


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Server]:
    """A broker for this test alone."""
    with escrow.serving(tmp_path, "--retry-backoff", "0.05") as server:
        yield server


@pytest.fixture
def timed_broker(tmp_path: Path) -> Iterator[TimedBroker]:
    """A broker whose time the test moves on."""
    broker = TimedBroker(tmp_path / "escrow")
    yield broker
    broker.stop()


@pytest.fixture
def make_workers(tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """Make workers of a broker, with transport options. They are killed at the end."""
    made: list[Workers] = []

    def make(url: str, **options: Any) -> Workers:
        made.append(Workers(tmp_path, url, **options))
        return made[-1]

    yield make
    for workers in made:
        workers.close()
