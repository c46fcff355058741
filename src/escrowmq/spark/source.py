"""Format "escrow" for Spark: thin classes over planning.py (what), brokers.py (where from) and columns.py (as what).

Everything here is pickled and lives in short-lived processes of Spark's: nothing holds a connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition

from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.platform.failpoints import reach
from escrowmq.platform.memory import keep_freed_memory
from escrowmq.spark import brokers
from escrowmq.spark.columns import as_spark, choose, columns_of, spark_schema, wire_columns
from escrowmq.spark.filters import Pushed, push, pushable
from escrowmq.spark.options import ReadOptions, read_options
from escrowmq.spark.planning import Place, Range, cut, first_offsets, last_offsets, ranges

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


def register(spark: SparkSession) -> None:
    """Make format "escrow" known to a session, and let Spark push filters down to it."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(EscrowSource)


class EscrowSource(DataSource):
    """``spark.read.format("escrow")``, ``readStream``, ``write``, ``writeStream``; options in options.py."""

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "escrow"

    def schema(self) -> str:
        """All columns of the source, or those that option ``columns`` names."""
        options = read_options(self._readable())
        return spark_schema(choose(options.sources[0], options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read."""
        options = read_options(self.options)
        return EscrowReader(options, arrow_schema(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read."""
        from escrowmq.spark.streaming import EscrowStreamReader

        options = read_options(self.options, streaming=True)
        return EscrowStreamReader(options, arrow_schema(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write."""
        from escrowmq.spark.writing import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A streaming write, exactly once."""
        from escrowmq.spark.writing import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _readable(self) -> dict[str, str]:
        """The options without those of one kind of reading: a schema does not depend on them."""
        return {name: value for name, value in self.options.items() if name.lower() not in ("end", "maxrowspertrigger")}


@dataclass(frozen=True)
class Piece(InputPartition):
    """A range for one task."""

    range: Range
    pushed: Pushed


class EscrowReader(DataSourceReader):
    """Batch reads: ranges of queues, cut into pieces. The same options and range give the same pieces and rows."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        self.options = options
        self.schema = schema
        self.pushed = Pushed(key=options.key, tags=options.tags)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what ranges and brokers can do, give the rest back."""
        source = self.options.sources[0]
        self.pushed, left = push(filters, self.pushed, pushable(source, [column.name for column in columns_of(source)]))
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """The pieces. Raises UNKNOWN_TOPIC, RANGE_PURGED, Unknown(TIMED_OUT) for a broker that is away, ..."""
        options = self.options
        links = brokers.open_links(options.url)
        try:
            there = brokers.places(links, options)
        finally:
            for link in links:
                link.close()
        brokers.one_shard(there)
        pushed = timed(options, self.pushed)
        found = [
            narrowed(r, pushed)
            for r in ranges(there, first_offsets(there, options.start), last_offsets(there, options.end))
        ]
        pieces = cut([r for r in found if r is not None], options.partition_rows)
        return [Piece(piece, pushed) for piece in pieces] or [Nothing()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return told(partition, read_piece(partition, self.schema, self.options.timeout))


class Nothing(InputPartition):
    """Stands for no range at all: Spark wants at least one."""

    def __init__(self) -> None:
        super().__init__(None)


def timed(options: ReadOptions, pushed: Pushed) -> Pushed:
    """System views have no offsets by time: times of the options become filters."""
    if not options.sources[0].startswith("%"):
        return pushed
    start, end = options.start, options.end
    since, until = (at if isinstance(at, int) else None for at in (start, end))
    return replace(
        pushed,
        since_us=max((at for at in (since, pushed.since_us) if at is not None), default=None),
        until_us=min((at for at in (until, pushed.until_us) if at is not None), default=None),
    )


def narrowed(whole: Range, pushed: Pushed) -> Range | None:
    """The part of a range that the filters leave; None for nothing."""
    if pushed.queue is not None and whole.place.queue != pushed.queue:
        return None
    if whole.place.source.startswith("%"):  # their offsets are positions, which no filter is pushed for
        return whole
    start, end = max(whole.start, pushed.low), min(whole.end, pushed.high)
    return Range(whole.place, start, end) if start < end else None


def arrow_schema(options: ReadOptions, schema: StructType) -> pa.Schema:
    """What Spark wants to have, as Arrow. Misuse(BAD_SETTING) for a column or a type that the source does not have."""
    from pyspark.sql.pandas.types import to_arrow_schema

    for column in choose(options.sources[0], schema.names):
        if (asked := schema[column.name].dataType.simpleString()) != column.spark:
            raise Misuse(
                Code.BAD_SETTING, f"column {column.name!r} is {column.spark}, not {asked}", "cast it after reading"
            )
    return to_arrow_schema(schema, timezone="UTC")


def read_piece(partition: InputPartition, schema: pa.Schema, timeout: float) -> Iterator[pa.RecordBatch]:
    """The rows of a piece as Spark wants them."""
    if not isinstance(partition, Piece):
        return
    keep_freed_memory()
    place = partition.range.place
    chosen = choose(place.source, schema.names)
    wanted = wire_columns(place.source, chosen)
    for batch in brokers.read(partition.range, wanted, partition.pushed, timeout):
        yield as_spark(batch, chosen, place.shard, schema)


def told(partition: InputPartition, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same. A broker that stayed away is told of as Unknown(TIMED_OUT), with what was being read."""
    try:
        for batch in batches:
            yield batch
            reach("spark.read-some")
    except Unknown as problem:
        if problem.code is not Code.DISCONNECTED or not isinstance(partition, Piece):
            raise
        piece = partition.range
        raise Unknown(
            Code.TIMED_OUT,
            f"{piece.place.broker}: reading {piece.place.name} from {piece.start} to {piece.end}: {problem.message}",
            "run it again when the broker is back, or wait longer: 'timeout'",
        ) from problem


def check_places(there: list[Place], what: str) -> None:
    """Misuse for a view that cannot be streamed."""
    if any(place.source.startswith("%dead-letters.") for place in there):
        raise Misuse(Code.BAD_SETTING, f"{what} cannot be streamed: dead letters come and go", "read them as a batch")
