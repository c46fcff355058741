"""Database tables as one DataFrame: a Python data source of Spark over tables.py and text_reads.py.

There is one Spark partition per range of keys. Filters run in the database, rows go from there to the executor as
Arrow, and nothing passes through the driver. All tables are read through *one* source, because Spark starts separate
Python processes to plan each source: for a few small tables that would cost more than the rest of an audit.

URLs may contain passwords. They are passed in an option whose name Spark redacts, and in the pickled reader; no plan
shows them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.sql.summing import SUMS
from escrowmq.pipeline.sql.tables import BATCH_ROWS, KINDS, Bounds, SqlRead, absolute, inode
from escrowmq.pipeline.sql.text_reads import TextRead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_ROWS = 50_000
TEXT_PARTITION_ROWS = 250_000
SUM_PARTITION_ROWS = 1_000_000
SOURCE = "source"
"""The column with the number of the read of a row."""


@dataclass(frozen=True)
class SqlRange(InputPartition):
    """The rows of one read, by its number, whose ``key`` is within ``bounds``."""

    number: int
    key: str
    bounds: Bounds


def read_sql(spark: SparkSession, reads: Sequence[SqlRead], partition_rows: int = PARTITION_ROWS) -> DataFrame:
    """Return the rows of all reads → ``source`` int, the number of the read, and their columns (the same in all), with
    about ``partition_rows`` rows per Spark partition. Raises Misuse(BAD_ARGUMENT) if a table, a column or a primary key
    is missing, or columns differ between reads; Misuse(BAD_URL); and Unknown(DISCONNECTED) if a database is
    unavailable."""
    reads = [replace(read, url=absolute(read.url)) for read in reads]
    schemas = [read.check() for read in reads]
    kinds = [[schema[name] for name in reads[0].columns] for schema in schemas]
    for read, found in zip(reads, kinds, strict=True):
        if found != kinds[0] or read.columns != reads[0].columns:
            what = f"{read} has {', '.join(found)}; {reads[0]} has {', '.join(kinds[0])}"
            raise Misuse(Code.BAD_ARGUMENT, what, "tables that are read as one must have the same columns")
    columns = ", ".join(f"`{name}` {kind}" for name, kind in zip(reads[0].columns, kinds[0], strict=True))
    return _load(spark, "rows", reads, f"{SOURCE} INT, {columns}", partition_rows)


def read_texts(spark: SparkSession, reads: Sequence[TextRead], partition_rows: int = TEXT_PARTITION_ROWS) -> DataFrame:
    """Return the rows of all reads → ``source`` int, the number of the read, and the texts of a read's columns in their
    order as :func:`cell` 0 and so on; ``partition_rows`` as in :func:`read_sql`. Values are text because SQLite columns
    hold any type: an invalid manual entry must be *reported*, not fail the job. NULL stays null."""
    width = max(len(read.columns) for read in reads)
    cells = ", ".join(f"{cell(n)} STRING" for n in range(width))
    return _load(spark, "texts", reads, f"{SOURCE} INT, {cells}", partition_rows)


def read_sums(spark: SparkSession, reads: Sequence[TextRead], partition_rows: int = SUM_PARTITION_ROWS) -> DataFrame:
    """Return the checksums of all reads → SUMS, one row per checksum, window that has rows, and range of about
    ``partition_rows`` rows."""
    return _load(spark, "sums", reads, SUMS, partition_rows)


def cell(number: int) -> str:
    """Return the name of the column of :func:`read_texts` that has the text of a read's column with this number:
    ``c0``, ..."""
    return f"c{number}"


def _load(spark: SparkSession, what: str, reads: Sequence[Any], schema: str, partition_rows: int) -> DataFrame:
    spark.dataSource.register(SqlTables)
    reads = [replace(read, inode=inode(read.url)) for read in reads]
    return (
        spark.read.format(SqlTables.name())
        .schema(schema)
        .option("urls", msgspec.json.encode(reads).decode())  # "url" in its name: redacted
        .option("what", what)
        .option("partition_rows", str(partition_rows))
        .load()
    )


class SqlTables(DataSource):
    """Spark format ``escrowmq-sql``. :func:`read_sql` and others set its options."""

    @classmethod
    def name(cls) -> str:
        return "escrowmq-sql"

    def reader(self, schema: Any) -> DataSourceReader:
        text, rows = self.options["urls"], int(self.options["partition_rows"])
        kinds = [field.dataType.simpleString() for field in schema.fields[1:]]
        if self.options["what"] == "rows":
            return SqlReader(msgspec.json.decode(text, type=list[SqlRead]), kinds, rows)
        reads = msgspec.json.decode(text, type=list[TextRead])
        return SumReader(reads, [], rows) if self.options["what"] == "sums" else TextReader(reads, kinds, rows)


class SqlReader(DataSourceReader):
    """Reads by ranges of keys. Pickled to executors: it holds no connection. ``kinds``: simple names of the columns'
    types."""

    def __init__(self, reads: Sequence[Any], kinds: Sequence[str], partition_rows: int) -> None:
        self._reads = reads
        self._kinds = kinds
        self._partition_rows = partition_rows

    def partitions(self) -> Sequence[InputPartition]:
        every = enumerate(self._reads)
        return [SqlRange(number, *one) for number, read in every for one in read.ranges(self._partition_rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SqlRange)
        read: SqlRead = self._reads[partition.number]
        for columns in read.batches(partition.key, partition.bounds, [KINDS[name] for name in self._kinds]):
            yield _number(partition.number, columns, read.columns)


class TextReader(SqlReader):
    """Reads texts. Reads of fewer columns than others are filled up with nulls."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SqlRange)
        _search_cycles_seldom()
        read: TextRead = self._reads[partition.number]
        for columns in read.batches(partition.key, partition.bounds):
            rest = [pa.nulls(len(columns[0]), pa.utf8())] * (len(self._kinds) - len(columns))
            yield _number(partition.number, [*columns, *rest], [cell(n) for n in range(len(self._kinds))])


class SumReader(SqlReader):
    """Reads checksums."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SqlRange)
        _search_cycles_seldom()
        read: TextRead = self._reads[partition.number]
        names = [column.split()[0] for column in SUMS.split(", ")]
        yield pa.RecordBatch.from_arrays(read.read_sums(partition.key, partition.bounds), names=names)


def _search_cycles_seldom() -> None:
    """Set the threshold at which tuples are searched for cycles so high that not each page is searched."""
    gc.set_threshold(10 * BATCH_ROWS)


def _number(number: int, columns: Sequence[pa.Array], names: Sequence[str]) -> pa.RecordBatch:
    source = pa.array([number] * len(columns[0]), pa.int32())
    return pa.RecordBatch.from_arrays([source, *columns], names=[SOURCE, *names])
