"""Database tables as one DataFrame: a Python data source of Spark over tables.py.

There is one Spark partition per range of keys. Filters run in the database, rows go from there to the executor as
Arrow, and nothing passes through the driver. All tables are read through *one* source, because Spark starts separate
Python processes to plan each source: for a few small tables that would cost more than the rest of an audit.

URLs may contain passwords. They are passed in an option whose name Spark redacts, and in the pickled reader; no plan
shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.sql.tables import KINDS, Bounds, SqlRead, absolute, inode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS = 50_000
TEXT_PARTITION_ROWS = 250_000
SOURCE = "source"
"""The column with the number of the read of a row."""
CELLS = "cells"
"""The column with the texts of a row, in a read of texts."""


@dataclass(frozen=True)
class SqlRange(InputPartition):
    """The rows of one read, by its number, whose ``key`` is within ``bounds``."""

    number: int
    key: str
    bounds: Bounds


def read_sql(spark: SparkSession, reads: Sequence[SqlRead], partition_rows: int = PARTITION_ROWS) -> DataFrame:
    """Return the rows of all reads → ``source`` int, the number of the read, and their columns (the same in all).
    Raises Misuse(BAD_ARGUMENT) if a table, a column or a primary key is missing, or columns differ between reads;
    Misuse(BAD_URL); and Unknown(DISCONNECTED) if a database is unavailable."""
    reads = [replace(read, url=absolute(read.url)) for read in reads]
    schemas = [read.check() for read in reads]
    kinds = [[schema[name] for name in reads[0].columns] for schema in schemas]
    for read, found in zip(reads, kinds, strict=True):
        if found != kinds[0] or read.columns != reads[0].columns:
            what = f"{read} has {', '.join(found)}; {reads[0]} has {', '.join(kinds[0])}"
            raise Misuse(Code.BAD_ARGUMENT, what, "tables that are read as one must have the same columns")
    columns = ", ".join(f"`{name}` {kind}" for name, kind in zip(reads[0].columns, kinds[0], strict=True))
    return _load(spark, reads, columns, partition_rows)


def read_texts(spark: SparkSession, reads: Sequence[SqlRead], partition_rows: int = TEXT_PARTITION_ROWS) -> DataFrame:
    """Return the rows of all reads, which are of ``texts`` → ``source`` int, ``cells`` array of string in the order of
    a read's columns. Values are text because SQLite columns hold any type: an invalid manual entry must be *reported*,
    not fail the job. NULL stays null. Raises Misuse(BAD_ARGUMENT) if a file, a table or a column is missing."""
    for read in reads:
        read.check()
    return _load(spark, reads, f"{CELLS} ARRAY<STRING>", partition_rows)


def _load(spark: SparkSession, reads: Sequence[SqlRead], columns: str, partition_rows: int) -> DataFrame:
    spark.dataSource.register(SqlTables)
    reads = [replace(read, inode=inode(read.url)) for read in reads]
    return (
        spark.read.format(SqlTables.name())
        .schema(f"{SOURCE} INT, {columns}")
        .option("urls", json.dumps([asdict(read) for read in reads]))  # "url" in its name: redacted
        .option("partition_rows", str(partition_rows))
        .load()
    )


class SqlTables(DataSource):
    """Spark format ``escrowmq-sql``. :func:`read_sql` sets its options."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-sql"

    def reader(self, schema: Any) -> DataSourceReader:
        given = [
            SqlRead(**{**one, "columns": tuple(one["columns"]), "where": tuple(map(tuple, one["where"]))})
            for one in json.loads(self.options["urls"])
        ]
        kinds = [field.dataType.simpleString() for field in schema.fields[1:]]
        return SqlReader(given, kinds, int(self.options["partition_rows"]))


class SqlReader(DataSourceReader):
    """Reads by ranges of keys. Pickled to executors: it holds no connection. ``kinds``: simple names of the columns'
    types."""

    def __init__(self, reads: Sequence[SqlRead], kinds: Sequence[str], partition_rows: int) -> None:
        self._reads = reads
        self._kinds = kinds
        self._partition_rows = partition_rows

    def partitions(self) -> Sequence[InputPartition]:
        every = enumerate(self._reads)
        return [SqlRange(number, *one) for number, read in every for one in read.ranges(self._partition_rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SqlRange)
        read = self._reads[partition.number]
        kinds = [] if read.texts else [KINDS[name] for name in self._kinds]
        names = [CELLS] if read.texts else read.columns
        for rows, columns in read.batches(partition.key, partition.bounds, kinds):
            source = pa.array([partition.number] * rows, pa.int32())
            yield pa.RecordBatch.from_arrays([source, *columns], names=[SOURCE, *names])
