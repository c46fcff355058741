"""Streaming reads of format "escrow": offsets by topic partition, limits, ``availableNow``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from escrowmq.client.links.answers import away
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import Code, Misuse
from escrowmq.spark import brokers, planning
from escrowmq.spark.options import EARLIEST, ReadOptions
from escrowmq.spark.planning import Offsets, TopicPartition
from escrowmq.spark.reading import RangePartition, read_partition
from escrowmq.wire import DEAD_LETTER_PREFIX, Link

_log = logging.getLogger(__name__)


class EscrowStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Offsets are ``{"topic/shard/queue": next offset}``. New queues and brokers are read from their
    head. With several brokers, the query continues with the available ones; partitions of the others stay where they
    are until their broker returns. The first batch needs all brokers, unless it starts at the earliest offset."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        self.options = options
        self.schema = schema
        self._links: Sequence[Link] = ()
        self._router: Router | None = None
        self._missing: list[Missing] = []
        self._stop_at: Offsets | None = None

    def initialOffset(self) -> Offsets:
        """Return no offsets. The end of the first batch notes where it begins (see planning.add_beginnings)."""
        return {}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> Offsets:
        """Return the end of the next micro-batch: all available messages, or as many as the limit allows."""
        there = self._refresh_partitions()
        end = _list_ends(there)
        if self._stop_at is not None:
            end = {name: min(at, self._stop_at[name]) for name, at in end.items() if name in self._stop_at}
        before = planning.ends(start)
        if self._missing and not before and self.options.start != EARLIEST:
            raise away(self._missing, "where the query begins is only known when all brokers are there")
        known = planning.first_offsets(there, self.options.start)
        if before:
            known = planning.known_start(self._drop_missing(before, there), there)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        reached = before | planning.limit_rows({name: known[name] for name in end}, end, rows)
        if reached == before:
            return start
        return planning.add_beginnings(reached, {name: known[name] for name in reached.keys() - before.keys()})

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of option ``maxRowsPerTrigger``."""
        rows = self.options.trigger_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def reportLatestOffset(self) -> Offsets:
        """Return the end of every topic partition, for the query's progress report."""
        return _list_ends(self._refresh_partitions())

    def prepareForTriggerAvailableNow(self) -> None:
        """Note the current end of every topic partition. The query stops there."""
        self._stop_at = _list_ends(self._refresh_partitions())

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return the ranges between two sets of offsets. Raises RANGE_PURGED, and Misuse for offsets of another
        cluster."""
        there, first, last = self._refresh_partitions(), planning.find_starts(start, end), planning.ends(end)
        mine = self._drop_missing(last, there)
        if waits := sorted(name for name in last.keys() - mine.keys() if last[name] > first.get(name, 0)):
            raise away(self._missing, f"the batch has messages of {waits[0]}")
        found = planning.ranges(there, first, mine)
        return [RangePartition(one) for one in planning.cut(found, self.options.partition_rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, on an executor."""
        return read_partition(partition, self.schema, self.options)

    def stop(self) -> None:
        """Close the connections."""
        links, self._links = self._links, ()
        if self._router is not None:
            self._router.close()
        self._router = None
        for link in links:
            link.close()

    def _refresh_partitions(self) -> list[TopicPartition]:
        if not self._links or self.options.url.startswith("file:"):  # a folder is a view of one moment
            self.stop()
            self._links = brokers.open_links(self.options.url, self.options.token_file)
            self._router = Router(self._links)
        if (source := self.options.sources[0]).startswith(DEAD_LETTER_PREFIX):
            text = f"{source} cannot be streamed: dead letters come and go"
            raise Misuse(Code.BAD_SETTING, text, "read them as a batch")
        if len(self._links) == 1 or self._router is None:
            return brokers.topic_partitions(self._links, self.options)
        there, missing = brokers.partitions_there(self._router, self.options)
        if missing and missing != self._missing:
            names = ", ".join(f"{one['broker']} ({one['reason']})" for one in missing)
            _log.warning("the query goes on without %s", names)
        self._missing = missing
        return there

    def _drop_missing(self, offsets: Offsets, there: Sequence[TopicPartition]) -> Offsets:
        """Return the offsets without those at missing brokers."""
        if not self._missing:
            return offsets
        shards = {f"{partition.shard:08x}" for partition in there}
        return {name: at for name, at in offsets.items() if name.split("/")[-2] in shards}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_links": (), "_router": None}


def _list_ends(partitions: Sequence[TopicPartition]) -> Offsets:
    return {partition.name: partition.end for partition in partitions}
