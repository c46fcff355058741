"""Batch reads of format "escrow", and the Spark partition of batches and streams: one range of offsets per task.

These classes are pickled for short-lived Spark processes, so none of them holds a connection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from escrowmq.errors import Code, Unknown, error
from escrowmq.platform.failpoints import reach
from escrowmq.platform.memory import keep_freed_memory
from escrowmq.spark import brokers
from escrowmq.spark.columns import as_spark, choose, wire_columns
from escrowmq.spark.options import ReadOptions
from escrowmq.spark.planning import OffsetRange, cut, first_offsets, last_offsets, ranges, skip_purged

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RangePartition(InputPartition):
    """One range of offsets, read by one task."""

    range: OffsetRange


class EmptyPartition(InputPartition):
    """Placeholder for an empty read: Spark needs at least one partition."""

    def __init__(self) -> None:
        super().__init__(None)


class EscrowReader(DataSourceReader):
    """A batch read. The same options and offsets give the same partitions and rows. It must not define ``pushFilters``.
    Spark (4.3.0) stores the reader with the filters of one query in the DataFrame, so every later query of that
    DataFrame would miss rows. Filters for the broker are options instead."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        self.options = options
        self.schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return one partition per range. Raises UNKNOWN_TOPIC, RANGE_PURGED, Unknown(TIMED_OUT) if a broker is
        unavailable, ..."""
        options = self.options
        with brokers.opened(options.url, options.token_file) as links:
            there = brokers.topic_partitions(links, options)
        if options.pattern and not there:
            raise error(Code.UNKNOWN_TOPIC, f"no topic matches {options.pattern!r}")
        first, last = first_offsets(there, options.start), last_offsets(there, options.end)
        if options.skip_purged:
            first, gone = skip_purged(there, first, last)
            log_skipped(gone)
        found = ranges(there, first, last)
        return [RangePartition(one) for one in cut(found, options.partition_rows)] or [EmptyPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, on an executor."""
        return read_partition(partition, self.schema, self.options)


def log_skipped(gone: Iterable[OffsetRange]) -> None:
    """Log purged offsets that a read skips, on the process that plans it."""
    for one in gone:
        text = "%s: skipped %d offsets, %d to %d: they left the log before they were read"
        _log.warning(text, one.partition.name, one.end - one.start, one.start, one.end - 1)


def read_partition(
    partition: InputPartition, schema: pa.Schema, options: ReadOptions, reader: Mapping[str, Any] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition, filtered by the options, in Spark's ``schema``. ``reader``: the fields of the read
    that name a streaming query. Raises Unknown(TIMED_OUT), with the range, if the broker stays unavailable for
    ``options.timeout`` seconds."""
    if not isinstance(partition, RangePartition):
        return
    keep_freed_memory()
    wanted, source = partition.range, partition.range.partition
    chosen = choose(source.source, schema.names)
    asked = {**options.filters, **(reader or {})}
    columns = wire_columns(source.source, chosen)
    try:
        for batch in brokers.read(wanted, columns, asked, options.timeout, options.token_file):
            yield as_spark(batch, chosen, source.shard, schema)
            reach("spark.read-some")
    except Unknown as problem:
        if problem.code not in (Code.DISCONNECTED, Code.TIMED_OUT):
            raise
        text = f"{source.broker}: reading {source.name} from {wanted.start} to {wanted.end}: {problem.message}"
        hint = "run it again when the broker is back, or wait longer: 'timeout'"
        raise Unknown(Code.TIMED_OUT, text, hint) from problem
