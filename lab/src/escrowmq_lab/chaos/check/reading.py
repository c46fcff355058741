"""Reads the books of all nodes as Arrow columns, a mode at a time: 10^7 ids are no Python objects.

Each database is read as it is at one moment, beside whoever writes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

from escrowmq_lab.chaos.books import body_of, business, confirmed, effects, hash_of, intended
from escrowmq_lab.databases import snapshot

ROWS = 20_000
"""Rows that are fetched at a time."""
ASKED = 400
"""Ids in one statement."""

Engines = Mapping[str, sa.Engine]
"""By the name of the node whose database it is."""
STRINGS = pa.large_string()


def modes_in(producers: Engines, consumers: Engines) -> list[str]:
    """Return the names of the modes that stand anywhere in the books."""
    found: set[str] = set()
    for engines, tables in ((producers, (intended, business, confirmed)), (consumers, (effects,))):
        for engine in engines.values():
            with snapshot(engine) as connection:
                for table in tables:
                    found.update(connection.scalars(sa.select(table.c.mode).distinct()))
    return sorted(found)


class Column:
    """Ids of one table and mode, of all databases, in the order of reading, and the columns beside them."""

    def __init__(
        self,
        table: sa.Table,
        columns: Sequence[str],
        make: Callable[[Sequence[Any], str], Sequence[Any]] | None = None,
        numbers: int | None = None,
    ):
        self.ids = pa.chunked_array([], STRINGS)
        """The ids, as large strings."""
        self.beside = np.empty((0, len(columns) if numbers is None else numbers), np.int64)
        """A row for each id: numbers."""
        self._table, self._names, self._make = table, ("id", *columns), make

    def read(self, engines: Engines, mode: str) -> Column:
        """Fill it; returns itself. What ``make`` gives of a row and the name of its node is its id and so many
        ``numbers``."""
        chunks: list[pa.Array] = []
        numbers: list[np.ndarray[Any, Any]] = [self.beside]
        columns = [self._table.c[name] for name in self._names]
        for node, engine in engines.items():
            with snapshot(engine) as connection:
                for rows in _partitions(connection, sa.select(*columns).where(self._table.c.mode == mode)):
                    made = rows if self._make is None else [self._make(row, node) for row in rows]
                    chunks.append(pa.array([row[0] for row in made], STRINGS))
                    numbers.append(
                        np.array([row[1:] for row in made], np.int64).reshape(len(made), self.beside.shape[1])
                    )
        self.ids, self.beside = pa.chunked_array(chunks, STRINGS), np.concatenate(numbers)
        return self


def read_intended(producers: Engines, mode: str) -> Column:
    """Beside each id: 1 if its business will be rolled back."""
    return Column(intended, ("dooms",)).read(producers, mode)


def read_business(producers: Engines, mode: str) -> Column:
    """Beside each id: microseconds since 1970."""
    return Column(business, ("at_us",)).read(producers, mode)


def read_confirmed(producers: Engines, mode: str) -> Column:
    """Beside each id: microseconds since 1970."""
    return Column(confirmed, ("at_us",)).read(producers, mode)


def read_effects(consumers: Engines, mode: str) -> Column:
    """Beside each id: microseconds since 1970, 1 if the hash is that of its body, and 1 if it names no other consumer
    than that of the database. An id stands here as often as it had an effect."""
    return Column(effects, ("at_us", "hash"), _judged, numbers=3).read(consumers, mode)


def _judged(row: Sequence[Any], node: str) -> tuple[str, int, int, int]:
    identity, at_us, found = row
    named = identity.rpartition(".")[2]
    at_home = not named.isdecimal() or named == node.rpartition("-")[2]
    return identity, at_us, int(bytes(found) == hash_of(body_of(identity))), int(at_home)


def ids_in(engines: Engines, table: sa.Table, mode: str) -> pa.ChunkedArray:
    """Return all ids of a mode in one table of all databases."""
    return Column(table, ()).read(engines, mode).ids


def known(engines: Engines, table: sa.Table, ids: Iterable[str], *names: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of ``ids``: the name of their node, and the columns ``names`` (all if none is named)."""
    wanted = list(ids)
    columns = [table.c[name] for name in names] or list(table.c)
    for name, engine in engines.items():
        with snapshot(engine) as connection:
            for first in range(0, len(wanted), ASKED):
                some = table.c.id.in_(wanted[first : first + ASKED])
                for row in connection.execute(sa.select(*columns).where(some)):
                    yield name, row


def without(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return those of ``ids`` that are not among ``others``."""
    return ids.filter(pc.invert(pc.is_in(ids, value_set=others.combine_chunks())))


def rows_in(connection: sa.Connection, table: sa.Table) -> int:
    """Return how many rows a table of the books has. Nothing is ever deleted there, so SQLite's last row number is
    their
    number: no scan."""
    if connection.dialect.name == "sqlite":
        return connection.exec_driver_sql(f"SELECT max(rowid) FROM {table.name}").scalar() or 0
    return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def _partitions(connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Sequence[Any]]:
    yield from connection.execution_options(yield_per=ROWS).execute(statement).partitions()
