"""What the tests of handlers share: a broker in this process whose retries are quick, and a database with effects."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from handler_world import effects

import escrowmq as mq
from escrowmq import outbox
from escrowmq.handlers import App

QUICK: dict[str, Any] = {"retry_backoff": 0.01, "retry_backoff_max": 0.01, "max_attempts": 3, "lease_seconds": 600.0}


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[mq.Bus]:
    with mq.connect(f"file:{tmp_path / 'broker'}", **QUICK) as bus:
        yield bus


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 60.0})
    effects.metadata.create_all(engine)
    outbox.migrate(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def ids(engine: sa.Engine) -> Callable[[], list[str]]:
    """The ids of all effects, sorted."""

    def read() -> list[str]:
        with engine.connect() as connection:
            return sorted(connection.execute(sa.select(effects.c.id)).scalars())

    return read
