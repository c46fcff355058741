"""Where the audit reads from: SQLite tables as a Spark data source, and the broker's log, copied range by range to Parquet.

A SQLite table is cut into ranges of its row ids, one Spark partition each; a partition is read on an executor with
Python's own ``sqlite3``, read-only, and handed over as Arrow batches. Nothing of a table passes through the driver.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS = 250_000
BATCH_ROWS = 8192


@dataclass(frozen=True)
class RowRange(InputPartition):
    """Row ids ``first`` .. ``last``, both included."""

    first: int
    last: int


def row_ranges(lowest: int, highest: int, rows: int, size: int) -> list[RowRange]:
    """Ranges that cover ``lowest`` .. ``highest``, each of about ``size`` of the ``rows`` rows; one when there are none.

    The number of ranges follows the number of rows, not of ids: one row with a far-off id must not make a million ranges.
    """
    if rows == 0:
        return [RowRange(0, -1)]
    count = -(-rows // size)
    step = -(-(highest - lowest + 1) // count)
    return [RowRange(first, min(first + step - 1, highest)) for first in range(lowest, highest + 1, step)]


def read_table(
    spark: SparkSession,
    database: Path,
    table: str,
    columns: Sequence[str],
    where: dict[str, str] | None = None,
    partition_rows: int = PARTITION_ROWS,
) -> DataFrame:
    """``columns`` of a SQLite table as text (SQLite's own ``CAST``), NULL as null, rows with ``where`` equal only.

    As text because SQLite's columns hold any type: what a hand typed into an amount must be *reported*, not fail the job.
    Raises Misuse(BAD_ARGUMENT) if the file, the table or a column is not there.
    """
    check_table(database, table, [*columns, *(where or {})])
    spark.dataSource.register(SqliteTable)
    return (
        spark.read.format(SqliteTable.name())
        .option("database", str(database.resolve()))
        .option("table", table)
        .option("columns", json.dumps(list(columns)))
        .option("where", json.dumps(where or {}))
        .option("partition_rows", str(partition_rows))
        .load()
    )


def check_table(database: Path, table: str, columns: Sequence[str]) -> None:
    """Raise Misuse(BAD_ARGUMENT), naming what is missing, unless the table can be read with these columns."""
    if not database.is_file():
        raise Misuse(Code.BAD_ARGUMENT, f"no database {database}", "was the run folder moved in parts?")
    try:
        connection = open_readonly(str(database))
        try:
            found = {row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}
        finally:
            connection.close()
    except sqlite3.Error as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"cannot read {database}: {problem}") from problem
    if not found:
        raise Misuse(Code.BAD_ARGUMENT, f"{database} has no table {table!r}")
    if missing := [name for name in columns if name not in found]:
        raise Misuse(Code.BAD_ARGUMENT, f"table {table!r} of {database} lacks {', '.join(missing)}")


def open_readonly(database: str) -> sqlite3.Connection:
    """A connection that cannot write; text that is not UTF-8 is read with replacement marks."""
    connection = sqlite3.connect(f"file:{quote(database)}?mode=ro", uri=True)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


class SqliteTable(DataSource):
    """Spark format ``escrowmq-sqlite``; options as :func:`read_table` gives them."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-sqlite"

    def schema(self) -> str:
        return ", ".join(f"`{name}` STRING" for name in json.loads(self.options["columns"]))

    def reader(self, schema: Any) -> DataSourceReader:
        return SqliteReader(dict(self.options))


class SqliteReader(DataSourceReader):
    """Reads one table by ranges of row ids. Pickled to executors: it holds options, no connection."""

    def __init__(self, options: dict[str, str]) -> None:
        self._database = options["database"]
        self._table = options["table"]
        self._columns: list[str] = json.loads(options["columns"])
        self._where: dict[str, str] = json.loads(options["where"])
        self._partition_rows = int(options["partition_rows"])

    def partitions(self) -> Sequence[InputPartition]:
        connection = open_readonly(self._database)
        try:
            lowest, highest, rows = connection.execute(
                f"SELECT coalesce(min(rowid), 0), coalesce(max(rowid), 0), count(*) FROM {_quoted(self._table)}"
            ).fetchone()
        finally:
            connection.close()
        return row_ranges(lowest, highest, rows, self._partition_rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RowRange)
        schema = pa.schema([(name, pa.utf8()) for name in self._columns])
        wanted = ", ".join(f"CAST({_quoted(name)} AS TEXT)" for name in self._columns)
        terms = ["rowid BETWEEN ? AND ?", *(f"CAST({_quoted(name)} AS TEXT) = ?" for name in self._where)]
        query = f"SELECT {wanted} FROM {_quoted(self._table)} WHERE {' AND '.join(terms)}"
        connection = open_readonly(self._database)
        try:
            rows = connection.execute(query, (partition.first, partition.last, *self._where.values()))
            while chunk := rows.fetchmany(BATCH_ROWS):
                columns = [pa.array(column, pa.utf8()) for column in zip(*chunk, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
        finally:
            connection.close()


def _quoted(name: str) -> str:
    """A SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
