"""The tables of an audit: their types, whether ids are unique in them, and their rows as texts or checksums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from pyspark.sql import Column
from pyspark.sql import functions as f

from escrowmq.outbox import engines
from escrowmq.pipeline.audit.manifest import Manifest
from escrowmq.pipeline.audit.rows import Cell, Role, Rows, Speaker
from escrowmq.pipeline.sql import texts
from escrowmq.pipeline.sql.canonical import canonical
from escrowmq.pipeline.sql.source import SOURCE, TEXT_PARTITION_ROWS, cell, read_sums, read_texts
from escrowmq.pipeline.sql.text_reads import Sum, Text, TextRead, can_sum, reflect_texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def check_columns(manifest: Manifest, name: str, columns: Collection[str]) -> dict[str, str | None]:
    """Check that a table of the manifest has its id, these columns, and those of its conditions; return the native kind
    of every column of it by name. Raises as :func:`escrowmq.pipeline.sql.tables.check`."""
    table = manifest.tables[name]
    wanted = [table.id, *sorted(columns), *table.where]
    return dict(reflect_texts(manifest.table_url(name), table.table, wanted))


def make_read(manifest: Manifest, name: str) -> TextRead:
    """Return a read of only the ids of a table of the manifest (``name``), with its conditions. Raises as
    :func:`check_columns`."""
    table, natives = manifest.tables[name], check_columns(manifest, name, ())
    known = {column: native or "text" for column, native in natives.items()}
    id = Text(table.id, known[table.id], texts.id_kind(known[table.id]))
    where = tuple((column, known[column], text) for column, text in table.where.items())
    return TextRead(manifest.table_url(name), table.table, (id,), where)


@dataclass(frozen=True, slots=True, eq=False)
class TableSide:
    """A table with its roles and its read. ``keys`` are the columns of the read after the id, each with its kind.
    ``summed``: a server computes checksums of all its columns."""

    read: TextRead
    keys: tuple[str, ...]
    roles: tuple[Role, ...]
    unique: bool
    summed: bool
    dialect: str

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        name: str,
        roles: tuple[Role, ...],
        natives: Mapping[str, str | None],
        sample: int | None = None,
    ) -> TableSide:
        """Plan the read of the columns that these roles need from table ``name`` of the manifest. ``natives``: the
        native kinds of its columns; ``sample``: parts of SAMPLED_OF, None for all ids."""
        base = replace(make_read(manifest, name), sample=sample)
        keys = tuple(sorted({key for role in roles for key in role.columns}))
        named = [(kind, column) for kind, _, column in (key.partition(" ") for key in keys)]
        columns = [Text(column, natives[column] or "text", kind) for kind, column in named]
        dialect = engines.open_engine(base.url).dialect.name
        exact = all(texts.is_canonical(dialect, column.native, column.kind) for column in columns)
        read = replace(base, columns=(*base.columns, *columns))
        unique = manifest.tables[name].unique and is_unique(read)
        return cls(read, keys, roles, unique, exact and can_sum(read.url), dialect)

    def plain_keys(self) -> list[str]:
        """Return the keys (kind and column) whose values the database returns as plain text, so that Spark must make
        them canonical."""
        named = zip(self.keys, self.read.columns[1:], strict=True)
        return [key for key, one in named if not texts.is_canonical(self.dialect, one.native, one.kind)]

    def make_cells(self, number: int) -> dict[str, Column]:
        """Return by name the Spark columns that make the plain texts canonical, null in rows of other tables.
        ``number``: of this table in the frame."""
        columns = dict(zip(self.keys, enumerate(self.read.columns[1:], 1), strict=True))
        return {
            _name_cell(number, key): f.when(f.col(SOURCE) == number, canonical(cell(n), column.kind))
            for key, (n, column) in columns.items()
            if key in self.plain_keys()
        }

    def make_finder(self, number: int) -> Cell:
        """Return a function from a key to the column of the frame that has its canonical text. ``number``: of this
        table in the frame."""
        plain = self.plain_keys()
        return lambda key: f.col(f"`{_name_cell(number, key)}`" if key in plain else cell(1 + self.keys.index(key)))

    def sums(self, here: Collection[int]) -> tuple[Sum, ...]:
        """Return the checksums that the database, or the process that reads it, is to compute: one per role. ``here``:
        the comparisons that such a process can sum."""
        return tuple(
            Sum(role.comparison, role.expected, tuple(1 + self.keys.index(key) for key in role.columns))
            for role in self.roles
            if self.summed or role.comparison in here
        )


def read_tables(spark: SparkSession, sides: Sequence[TableSide], here: Collection[int]) -> Rows:
    """Return the rows of tables as one frame. Either all of them are summed by their servers, or none. ``here``: the
    comparisons that the processes that read can sum."""
    reads = [side.read for side in sides]
    speakers = [
        Speaker(side.roles, side.make_finder(n), f.col(SOURCE) == n, side.unique) for n, side in enumerate(sides)
    ]
    made = {name: column for n, side in enumerate(sides) for name, column in side.make_cells(n).items()}

    def read_slim() -> DataFrame:
        return read_texts(spark, [replace(read, columns=read.columns[:1]) for read in reads])

    served = sides[0].summed
    sums = [(side.read, its) for side in sides if (its := side.sums(here))]

    def sum_windows(count: int, portable: bool) -> DataFrame:
        found = [replace(read, windows=count, sums=its, portable=portable) for read, its in sums]
        if served:
            return read_sums(spark, found)
        return read_sums(spark, [replace(read, is_summed_here=True) for read in found], TEXT_PARTITION_ROWS)

    def select_windows(some: set[int], count: int, portable: bool) -> DataFrame:
        only = tuple(sorted(some)) if len(some) < count else None
        return read_texts(spark, [replace(read, windows=count, only=only, portable=portable) for read in reads])

    read = cache(partial(read_texts, spark, reads))
    rows = Rows(read, f.col(cell(0)), tuple(speakers), [made], read_slim, select_windows=select_windows)
    if not sums:
        return rows
    summed = {one.comparison for _, its in sums for one in its}
    return replace(rows, sum_windows=sum_windows, summed=summed, served=served)


def _name_cell(number: int, key: str) -> str:
    return f"_{number} {key}"


def is_unique(read: TextRead) -> bool:
    """Return whether no two rows of a read can have the same id: a unique index or primary key covers it, and all its
    values there have one type, and none is null."""
    within = {read.columns[0].name, *(name for name, _, _ in read.where)}
    with engines.opened(read.url) as engine, engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            return _is_unique_sqlite(connection, read.table, within)
        if engine.dialect.name == "postgresql":
            quoted = engine.dialect.identifier_preparer.quote_identifier(read.table)
            found = connection.execute(_PG_UNIQUE, {"name": quoted})
            return any(within.issuperset(names) for (names,) in found)
        inspector = sa.inspect(connection)
        required = {one["name"] for one in inspector.get_columns(read.table) if not one["nullable"]}
        indexes: list[Any] = [one["column_names"] for one in inspector.get_indexes(read.table) if one["unique"]]
        indexes.append(inspector.get_pk_constraint(read.table)["constrained_columns"])
        return any(names and (within & required).issuperset(names) for names in indexes)


_PG_UNIQUE = sa.text(
    """
    SELECT array_agg(a.attname::text) FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
    WHERE i.indrelid = to_regclass(:name) AND i.indisunique AND i.indisvalid
      AND i.indpred IS NULL AND i.indexprs IS NULL
    GROUP BY i.indexrelid HAVING bool_and(a.attnotnull)
    """
)
"""The columns of each unique index over all rows that a failed CREATE INDEX CONCURRENTLY did not leave behind."""


def _is_unique_sqlite(connection: sa.Connection, table: str, within: set[str]) -> bool:
    indexed = _find_unique_index(connection, table, within)
    if indexed is None:
        return False
    for name in indexed:  # 1 and '1', or two nulls, are different to an index
        value: sa.ColumnClause[Any] = sa.column(name)
        kinds = set(connection.scalars(sa.select(sa.func.typeof(value)).select_from(sa.table(table)).distinct()))
        if len(kinds) > 1 or not kinds <= {"text", "integer"}:
            return False
    return True


def _find_unique_index(connection: sa.Connection, table: str, within: set[str]) -> list[str] | None:
    """Return the columns of a unique index, or of a row id, of a SQLite table that has only columns of ``within``; None
    if there is none."""
    listed = 'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial'
    for (index,) in connection.exec_driver_sql(listed, (table,)).all():
        names = list(connection.exec_driver_sql("SELECT name FROM pragma_index_info(?)", (index,)).scalars())
        if within.issuperset(names):  # a null stands for an expression
            return names
    keys = "SELECT name, upper(type) FROM pragma_table_info(?) WHERE pk"
    found = connection.exec_driver_sql(keys, (table,)).all()
    if len(found) == 1 and found[0][1] == "INTEGER" and found[0][0] in within:
        return [found[0][0]]
    return None
