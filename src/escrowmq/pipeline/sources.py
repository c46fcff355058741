"""SQLite tables as one DataFrame, without JDBC: a Python data source.

Every table is cut into ranges of its row ids, one Spark partition each; a partition is read on an executor with Python's
own ``sqlite3``, read-only, and handed over as Arrow batches. Nothing of a table passes through the driver.

All tables come through *one* source, because Spark starts Python processes of their own to plan each: for a handful of
small tables that would cost more than all the rest of an audit.
"""

from __future__ import annotations

import itertools
import json
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS = 250_000
BATCH_ROWS = 8192

_BATCH = pa.schema([("name", pa.utf8()), ("cells", pa.list_(pa.utf8()))])

Range = tuple[int, int]
"""First and last row id, both included."""


@dataclass(frozen=True, slots=True)
class TableRead:
    """What to read of one table: ``columns`` of the rows whose columns equal the texts of ``where``."""

    name: str
    database: str
    table: str
    columns: tuple[str, ...]
    where: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise Misuse(BAD_ARGUMENT), naming what is missing, unless it can be read."""
        if not Path(self.database).is_file():
            raise Misuse(Code.BAD_ARGUMENT, f"no database {self.database}", "was the run folder moved in parts?")
        try:
            with closing(open_readonly(self.database)) as connection:
                query = "SELECT name FROM pragma_table_info(?)"
                found = {row[0] for row in connection.execute(query, (self.table,))}
        except sqlite3.Error as problem:
            raise Misuse(Code.BAD_ARGUMENT, f"cannot read {self.database}: {problem}") from problem
        if not found:
            raise Misuse(Code.BAD_ARGUMENT, f"{self.database} has no table {self.table!r}")
        if missing := [name for name in (*self.columns, *self.where) if name not in found]:
            raise Misuse(Code.BAD_ARGUMENT, f"table {self.table!r} of {self.database} lacks {', '.join(missing)}")

    def ranges(self, size: int) -> list[Range]:
        """Ranges of about ``size`` rows."""
        query = f"SELECT coalesce(min(rowid), 0), coalesce(max(rowid), 0), count(*) FROM {_quoted(self.table)}"
        with closing(open_readonly(self.database)) as connection:
            lowest, highest, rows = connection.execute(query).fetchone()
        return row_ranges(lowest, highest, rows, size)

    def is_unique(self, column: str) -> bool:
        """Whether no two rows can have the same text in ``column``: a unique index or primary key of the database says so for all
        values there are, each being a text or each a whole number."""
        with closing(open_readonly(self.database)) as connection:
            indexed = self._unique_columns(connection, {column, *self.where})
            if indexed is None:
                return False
            for name in indexed:  # 1 and '1', or two nulls, are different to an index
                kinds = {
                    row[0]
                    for row in connection.execute(f"SELECT DISTINCT typeof({_quoted(name)}) FROM {_quoted(self.table)}")
                }
                if len(kinds) > 1 or not kinds <= {"text", "integer"}:
                    return False
        return True

    def _unique_columns(self, connection: sqlite3.Connection, within: set[str]) -> list[str] | None:
        """The columns of a unique index, or a row id, that has no others than ``within``; None if there is none."""
        listed = connection.execute(
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (self.table,)
        )
        for (index,) in listed.fetchall():
            names = [row[0] for row in connection.execute("SELECT name FROM pragma_index_info(?)", (index,))]
            if within.issuperset(names):  # a null stands for an expression
                return names
        keys = "SELECT name, upper(type) FROM pragma_table_info(?) WHERE pk"
        found = connection.execute(keys, (self.table,)).fetchall()
        if len(found) == 1 and found[0][1] == "INTEGER" and found[0][0] in within:
            return [found[0][0]]
        return None

    def read(self, rows: Range) -> Iterator[pa.RecordBatch]:
        """The rows of a range: ``name``, ``cells`` (list of text, one a column)."""
        wanted = ", ".join(f"CAST({_quoted(name)} AS TEXT)" for name in self.columns)
        terms = ["rowid BETWEEN ? AND ?", *(f"CAST({_quoted(name)} AS TEXT) = ?" for name in self.where)]
        query = f"SELECT {wanted} FROM {_quoted(self.table)} WHERE {' AND '.join(terms)}"
        with closing(open_readonly(self.database)) as connection:
            connection.text_factory = bytes  # no text is made here, cell by cell
            found = connection.execute(query, (*rows, *self.where.values()))
            while chunk := found.fetchmany(BATCH_ROWS):
                names = pa.repeat(pa.scalar(self.name, pa.utf8()), len(chunk))
                yield pa.RecordBatch.from_arrays([names, _lists(chunk, len(self.columns))], schema=_BATCH)


def read_tables(spark: SparkSession, reads: Sequence[TableRead], partition_rows: int = PARTITION_ROWS) -> DataFrame:
    """Rows of all tables → ``name`` string (the TableRead's), ``cells`` array of string in the order of its columns.

    As text (SQLite's own ``CAST``, NULL as null) because SQLite's columns hold any type: what a hand typed into an amount
    must be *reported*, not fail the job. Raises Misuse(BAD_ARGUMENT) if a file, a table or a column is not there.
    """
    for read in reads:
        read.check()
    spark.dataSource.register(SqliteTables)
    return (
        spark.read.format(SqliteTables.name())
        .option("reads", json.dumps([asdict(read) for read in reads]))
        .option("partition_rows", str(partition_rows))
        .load()
    )


def row_ranges(lowest: int, highest: int, rows: int, size: int) -> list[Range]:
    """Ranges that cover ``lowest`` .. ``highest``, each of about ``size`` of the ``rows`` rows; none when there are none.

    The number of ranges follows the number of rows, not of ids: one row with a far-off id must not make a million ranges.
    """
    if rows == 0:
        return []
    count = -(-rows // size)
    step = -(-(highest - lowest + 1) // count)
    return [(first, min(first + step - 1, highest)) for first in range(lowest, highest + 1, step)]


def open_readonly(database: str) -> sqlite3.Connection:
    """A connection that cannot write; text that is not UTF-8 is read with replacement marks.

    Raises Misuse(BAD_ARGUMENT) if there is no such file: a worker on another machine may not see what the driver saw.
    """
    if not Path(database).is_file():
        hint = "every worker of a cluster must see the run folder under the same path"
        raise Misuse(Code.BAD_ARGUMENT, f"{socket.gethostname()} has no database {database}", hint)
    connection = sqlite3.connect(f"file:{quote(database)}?mode=ro", uri=True)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


class SqliteTables(DataSource):
    """Spark format ``escrowmq-sqlite``; options as :func:`read_tables` gives them."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-sqlite"

    def schema(self) -> str:
        return "name STRING, cells ARRAY<STRING>"

    def reader(self, schema: Any) -> DataSourceReader:
        reads = [TableRead(**{**one, "columns": tuple(one["columns"])}) for one in json.loads(self.options["reads"])]
        return SqliteReader(reads, int(self.options["partition_rows"]))


@dataclass(frozen=True)
class TableRange(InputPartition):
    """One range of one table."""

    read: TableRead
    rows: Range


class SqliteReader(DataSourceReader):
    """Reads tables by ranges. Pickled to executors: it holds no connection."""

    def __init__(self, reads: list[TableRead], partition_rows: int) -> None:
        self._reads = reads
        self._partition_rows = partition_rows

    def partitions(self) -> Sequence[InputPartition]:
        found = [TableRange(read, rows) for read in self._reads for rows in read.ranges(self._partition_rows)]
        return found or [TableRange(self._reads[0], (0, -1))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TableRange)
        return partition.read.read(partition.rows)


def _lists(rows: Sequence[Sequence[bytes | None]], width: int) -> pa.Array:
    """Rows of texts as a list column: one array of all cells, and where each row begins."""
    cells = pa.array(list(itertools.chain.from_iterable(rows)), pa.binary())
    try:
        texts = cells.cast(pa.utf8())
    except pa.ArrowInvalid:  # not UTF-8 everywhere
        plain = [None if cell is None else cell.decode("utf-8", "replace") for cell in cells.to_pylist()]
        texts = pa.array(plain, pa.utf8())
    return pa.ListArray.from_arrays(pa.array(np.arange(len(rows) + 1, dtype=np.int32) * width), texts)


def _quoted(name: str) -> str:
    """A SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
