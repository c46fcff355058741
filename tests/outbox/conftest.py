"""Databases with the outbox's tables in them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from outbox_world import Base

from escrowmq.outbox import migrate


@pytest.fixture
def shop(engine: sa.Engine) -> sa.Engine:
    """A database of each kind with orders and the outbox's tables."""
    Base.metadata.create_all(engine)
    migrate(engine)
    return engine


@pytest.fixture
def sqlite_shop(tmp_path: Path) -> Iterator[sa.Engine]:
    """The same on SQLite alone, for what does not depend on the database."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 60.0})
    Base.metadata.create_all(engine)
    migrate(engine)
    yield engine
    engine.dispose()
