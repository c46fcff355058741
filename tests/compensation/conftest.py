"""A broker in this process for a module's tests, and a business database of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from compensation_world import World, business

import escrowmq as mq


@pytest.fixture(scope="module")
def compensation_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mq.Bus]:
    with mq.connect(f"file:{tmp_path_factory.mktemp('broker')}", retry_backoff=0.02) as bus:
        yield bus


@pytest.fixture(scope="module")
def compensation_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Engine]:
    engine = business(Path(tmp_path_factory.mktemp("business")))
    yield engine
    engine.dispose()


@pytest.fixture
def world(compensation_bus: mq.Bus, compensation_database: sa.Engine) -> Callable[..., World]:
    """Makes a compensation of its own, on the broker and database of the module."""

    def make(sets: Any = None, **options: Any) -> World:
        return World(compensation_bus, compensation_database, sets, **options)

    return make
