"""The databases of a sweep, and the connections of one task."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.engines import open_locking
from escrowmq.pipeline.sql.tables import absolute, check_there, inode, safe_url


@dataclass(frozen=True, slots=True, repr=False)
class Databases:
    """URLs of the order shards, in order, and of the product database. ``repr`` hides passwords."""

    orders: tuple[str, ...]
    products: str
    inodes: dict[str, int | None] = field(init=False, compare=False)
    """Of SQLite files, by URL, so that workers know the same files (see
    :func:`~escrowmq.pipeline.sql.tables.check_there`)."""

    def __post_init__(self) -> None:
        if not self.orders:
            raise Misuse(Code.BAD_ARGUMENT, "a sweep needs at least one database of orders")
        object.__setattr__(self, "orders", tuple(map(absolute, self.orders)))
        object.__setattr__(self, "products", absolute(self.products))
        object.__setattr__(self, "inodes", {url: inode(url) for url in (*self.orders, self.products)})
        if len(set(self.orders)) < len(self.orders):
            raise Misuse(Code.BAD_ARGUMENT, "two order databases are the same", "shards are numbered in their order")

    def __repr__(self) -> str:
        return f"Databases({', '.join(map(safe_url, self.orders))}; {safe_url(self.products)})"


class Connections(ExitStack):
    """Connections of one task, opened on first use. A failed attempt is not repeated. A context manager."""

    def __init__(self, databases: Databases) -> None:
        super().__init__()
        self._databases = databases
        self._made: dict[str, sa.Connection | sa.exc.SQLAlchemyError] = {}

    @property
    def products(self) -> sa.Connection:
        """The connection of the product database. Raises SQLAlchemyError if it is unavailable."""
        return self._connect(self._databases.products)

    def orders(self, shard: int | None) -> Sequence[sa.Connection]:
        """Return the connection of one order database, by its shard number, or of all for None. Raises SQLAlchemyError
        if one is unavailable."""
        urls = self._databases.orders if shard is None else self._databases.orders[shard : shard + 1]
        return [self._connect(url) for url in urls]

    def _connect(self, url: str) -> sa.Connection:
        made = self._made.get(url)
        if made is None:
            check_there(url, self._databases.inodes[url])
            engine = open_locking(url)
            self.callback(engine.dispose)
            try:
                made = self.enter_context(engine.connect())
            except sa.exc.SQLAlchemyError as problem:
                made = problem
            self._made[url] = made
        if isinstance(made, sa.exc.SQLAlchemyError):
            raise made
        return made
