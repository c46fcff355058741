"""The databases of a sweep, and engines on which a transaction that reads a row under lock can go on to write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines
from escrowmq.pipeline.sql.tables import absolute, check_there, safe_url

_SQLITE_PATIENCE = 30.0
"""Seconds that a transaction waits for a SQLite file's one lock."""


@dataclass(frozen=True, slots=True, repr=False)
class Databases:
    """URLs: the order shards in their order, and the product database. ``repr`` shows no passwords."""

    orders: tuple[str, ...]
    products: str

    def __post_init__(self) -> None:
        if not self.orders:
            raise Misuse(Code.BAD_ARGUMENT, "a sweep needs at least one database of orders")
        object.__setattr__(self, "orders", tuple(map(absolute, self.orders)))
        object.__setattr__(self, "products", absolute(self.products))
        if len(set(self.orders)) < len(self.orders):
            raise Misuse(Code.BAD_ARGUMENT, "two order databases are the same", "shards are numbered in their order")

    def __repr__(self) -> str:
        return f"Databases({', '.join(map(safe_url, self.orders))}; {safe_url(self.products)})"


def open_locking(url: str, **options: Any) -> sa.Engine:
    """An engine for the acts. Raises as :func:`escrowmq.outbox.engines.open_engine`.

    PostgreSQL and MariaDB: READ COMMITTED, so that a read that waited for a lock sees what its holder committed. SQLite has
    one lock a file, taken when the transaction begins (BEGIN IMMEDIATE): a deferred one would fail between read and write.
    """
    if not url.startswith("sqlite"):
        return engines.open_engine(url, isolation_level="READ COMMITTED", **options)
    patience = {"timeout": _SQLITE_PATIENCE, **options.pop("connect_args", {})}
    engine = engines.open_engine(url, connect_args=patience, **options)

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


class Connections:
    """Connections of one task, made when first asked for. A database that cannot be reached is asked once."""

    def __init__(self, databases: Databases, stack: ExitStack) -> None:
        self._databases = databases
        self._stack = stack
        self._made: dict[str, sa.Connection | sa.exc.SQLAlchemyError] = {}

    @property
    def products(self) -> sa.Connection:
        """The product database. Raises SQLAlchemyError if it is away."""
        return self._to(self._databases.products)

    def orders(self, shard: int | None) -> Sequence[sa.Connection]:
        """A shard, or all of them. Raises SQLAlchemyError if one is away."""
        urls = self._databases.orders if shard is None else self._databases.orders[shard : shard + 1]
        return [self._to(url) for url in urls]

    def _to(self, url: str) -> sa.Connection:
        made = self._made.get(url)
        if made is None:
            check_there(url)
            engine = open_locking(url)
            self._stack.callback(engine.dispose)
            try:
                made = self._stack.enter_context(engine.connect())
            except sa.exc.SQLAlchemyError as problem:
                made = problem
            self._made[url] = made
        if isinstance(made, sa.exc.SQLAlchemyError):
            raise made
        return made


@contextmanager
def connections(databases: Databases) -> Iterator[Connections]:
    """Connections for the time of a task."""
    with ExitStack() as stack:
        yield Connections(databases, stack)
