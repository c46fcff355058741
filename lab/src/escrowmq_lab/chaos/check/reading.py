"""Reading of the books of all nodes as Arrow columns, one mode at a time: 10^7 ids are too many for Python objects.
Each database is read in one snapshot, while others write to it."""

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
"""Rows fetched at a time."""
IDS_PER_STATEMENT = 400
"""Ids in one statement."""

Engines = Mapping[str, sa.Engine]
"""Engines by the name of the database's node."""
STRINGS = pa.large_string()


def modes_in(producers: Engines, consumers: Engines) -> list[str]:
    """Return the names of all modes in the books."""
    found: set[str] = set()
    for engines, tables in ((producers, (intended, business, confirmed)), (consumers, (effects,))):
        for engine in engines.values():
            with snapshot(engine) as connection:
                for table in tables:
                    found.update(connection.scalars(sa.select(table.c.mode).distinct()))
    return sorted(found)


class Column:
    """Ids of one table and mode over all databases, in reading order, with numbers for each."""

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
        """A row of numbers for each id."""
        self._table, self._names, self._make = table, ("id", *columns), make

    def read(self, engines: Engines, mode: str) -> Column:
        """Read the column and return it. ``make`` converts a row and its node's name into an id and numbers."""
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
    """Read the intended ids, each with 1 if its business will be rolled back."""
    return Column(intended, ("dooms",)).read(producers, mode)


def read_business(producers: Engines, mode: str) -> Column:
    """Read the business ids, each with microseconds since 1970."""
    return Column(business, ("at_us",)).read(producers, mode)


def read_confirmed(producers: Engines, mode: str) -> Column:
    """Read the confirmed ids, each with microseconds since 1970."""
    return Column(confirmed, ("at_us",)).read(producers, mode)


def read_effects(consumers: Engines, mode: str) -> Column:
    """Read the effects, one row each: microseconds since 1970, 1 if the hash matches the body, 1 if it is in the right
    consumer's database."""
    return Column(effects, ("at_us", "hash"), _judge, numbers=3).read(consumers, mode)


def _judge(row: Sequence[Any], node: str) -> tuple[str, int, int, int]:
    identity, at_us, found = row
    named = identity.rpartition(".")[2]
    at_home = not named.isdecimal() or named == node.rpartition("-")[2]
    return identity, at_us, int(bytes(found) == hash_of(body_of(identity))), int(at_home)


def ids_in(engines: Engines, table: sa.Table, mode: str) -> pa.ChunkedArray:
    """Return all ids of a mode in one table of all databases."""
    return Column(table, ()).read(engines, mode).ids


def known(engines: Engines, table: sa.Table, ids: Iterable[str], *names: str) -> Iterator[tuple[str, Any]]:
    """Read the rows of ``ids``: the name of their node, and the columns ``names`` (default: all)."""
    wanted = list(ids)
    columns = [table.c[name] for name in names] or list(table.c)
    for name, engine in engines.items():
        with snapshot(engine) as connection:
            for first in range(0, len(wanted), IDS_PER_STATEMENT):
                some = table.c.id.in_(wanted[first : first + IDS_PER_STATEMENT])
                for row in connection.execute(sa.select(*columns).where(some)):
                    yield name, row


def without(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the ``ids`` that are not among ``others``."""
    return ids.filter(pc.invert(pc.is_in(ids, value_set=others.combine_chunks())))


def rows_in(connection: sa.Connection, table: sa.Table) -> int:
    """Return the number of rows. Rows are never deleted, so SQLite's last row number is the count, without a scan."""
    if connection.dialect.name == "sqlite":
        return connection.exec_driver_sql(f"SELECT max(rowid) FROM {table.name}").scalar() or 0
    return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def _partitions(connection: sa.Connection, statement: sa.Select[Any]) -> Iterator[Sequence[Any]]:
    yield from connection.execution_options(yield_per=ROWS).execute(statement).partitions(ROWS)
