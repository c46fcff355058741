"""Batch reads of format "escrow", and the Spark partition that batches and streams share: one range of offsets per task.

What is pickled here goes to short-lived processes of Spark: nothing holds a connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from escrowmq.errors import Code, Unknown
from escrowmq.platform.failpoints import reach
from escrowmq.platform.memory import keep_freed_memory
from escrowmq.spark import brokers
from escrowmq.spark.columns import as_spark, choose, columns_of, wire_columns
from escrowmq.spark.filters import Pushed, push, pushable
from escrowmq.spark.options import ReadOptions
from escrowmq.spark.planning import OffsetRange, cut, first_offsets, last_offsets, ranges


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """One range of offsets, with the filters that were pushed down; read by one task."""

    range: OffsetRange
    pushed: Pushed


class EmptyPartition(InputPartition):
    """Stands for no range at all: Spark wants at least one partition."""

    def __init__(self) -> None:
        super().__init__(None)


class EscrowReader(DataSourceReader):
    """A batch read. The same options and offsets give the same partitions and rows."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        self.options = options
        self.schema = schema
        self.pushed = Pushed(key=options.key, tags=options.tags)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that offsets or brokers evaluate, and give the rest back to Spark."""
        source = self.options.sources[0]
        self.pushed, left = push(filters, self.pushed, pushable(source, [column.name for column in columns_of(source)]))
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """One partition per range. Raises UNKNOWN_TOPIC, RANGE_PURGED, Unknown(TIMED_OUT) for a broker that is away, ..."""
        options = self.options
        links = brokers.open_links(options.url)
        try:
            there = brokers.topic_partitions(links, options)
        finally:
            for link in links:
                link.close()
        pushed = times_as_filters(options, self.pushed)
        whole = ranges(there, first_offsets(there, options.start), last_offsets(there, options.end))
        found = [part for one in whole if (part := _narrowed(one, pushed)) is not None]
        return [RangePartition(one, pushed) for one in cut(found, options.partition_rows)] or [EmptyPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, on an executor."""
        return read_partition(partition, self.schema, self.options.timeout)


def times_as_filters(options: ReadOptions, pushed: Pushed) -> Pushed:
    """System views have no offsets by time: for them the times of the options become filters."""
    if not options.sources[0].startswith("%"):
        return pushed
    since, until = (at if isinstance(at, int) else None for at in (options.start, options.end))
    return replace(
        pushed,
        since_us=max((at for at in (since, pushed.since_us) if at is not None), default=None),
        until_us=min((at for at in (until, pushed.until_us) if at is not None), default=None),
    )


def _narrowed(whole: OffsetRange, pushed: Pushed) -> OffsetRange | None:
    """The part of a range that the filters leave; None if they leave nothing."""
    if pushed.queue is not None and whole.partition.queue != pushed.queue:
        return None
    if whole.partition.source.startswith("%"):  # their offsets are positions, for which no filter is pushed
        return whole
    start, end = max(whole.start, pushed.low), min(whole.end, pushed.high)
    return OffsetRange(whole.partition, start, end) if start < end else None


def read_partition(partition: InputPartition, schema: pa.Schema, timeout: float) -> Iterator[pa.RecordBatch]:
    """The rows of a partition in Spark's ``schema``.

    Raises Unknown(TIMED_OUT), naming the range, for a broker that stayed away for ``timeout`` seconds.
    """
    if not isinstance(partition, RangePartition):
        return
    keep_freed_memory()
    wanted, source = partition.range, partition.range.partition
    chosen = choose(source.source, schema.names)
    try:
        for batch in brokers.read(wanted, wire_columns(source.source, chosen), partition.pushed, timeout):
            yield as_spark(batch, chosen, source.shard, schema)
            reach("spark.read-some")
    except Unknown as problem:
        if problem.code not in (Code.DISCONNECTED, Code.TIMED_OUT):
            raise
        raise Unknown(
            Code.TIMED_OUT,
            f"{source.broker}: reading {source.name} from {wanted.start} to {wanted.end}: {problem.message}",
            "run it again when the broker is back, or wait longer: 'timeout'",
        ) from problem
