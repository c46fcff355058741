"""Streaming reads of format "escrow": offsets by topic partition, limits, ``availableNow``."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from escrowmq.client.links.answers import away
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import Code, Misuse
from escrowmq.spark import brokers, planning
from escrowmq.spark.options import EARLIEST, ReadOptions
from escrowmq.spark.planning import OffsetRange, Offsets, TopicPartition
from escrowmq.spark.reading import RangePartition, log_skipped, read_partition
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
        self._planned = -inf
        """Time (s, monotonic clock) at which the last batch was planned."""
        self._late: dict[tuple[str, int], OffsetRange] = {}
        """Skipped since the last end was noted, by name and start: a batch that is repeated lost them after it was
        planned, and may be planned several times."""

    def initialOffset(self) -> Offsets:
        """Return no offsets. The end of the first batch notes where it begins (see planning.add_beginnings)."""
        return {}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> Offsets:
        """Return the end of the next micro-batch: all available messages, or as many as the limits allow. Spark passes
        one limit; unless it asks for all, the options have the others."""
        before = planning.ends(start)
        there = self._refresh_partitions()
        there += self._list_deleted(before, there)
        end = _list_ends(there)
        if self._stop_at is not None:
            end = {name: min(at, self._stop_at[name]) for name, at in end.items() if name in self._stop_at}
        if self._missing and not before and self.options.start != EARLIEST:
            raise away(self._missing, "where the query begins is only known when all brokers are there")
        known = planning.first_offsets(there, self.options.start)
        if start:  # a query that has begun reads what is new from its first message
            known = planning.known_start(self._drop_missing(before, there), there)
        gone: list[OffsetRange] = []
        if self.options.skip_purged:
            known, gone = planning.skip_purged(there, known, end)
        begins = {name: known[name] for name in end}
        has_news = bool(gone or self._late or not start)
        limited = self._limit(there, begins, end, limit, has_news)
        if limited is None or (before | limited == before and not has_news):
            return start
        reached = before | limited
        log_skipped(gone)
        gone = [*self._late.values(), *gone]
        self._late, self._planned = {}, time.monotonic()
        moved = {one.partition.name for one in gone} & end.keys() | (reached.keys() - before.keys())
        return planning.add_skipped(
            planning.add_beginnings(reached, {name: known[name] for name in moved}), gone, start
        )

    def _limit(
        self, there: Sequence[TopicPartition], start: Offsets, end: Offsets, limit: ReadLimit, has_news: bool
    ) -> Offsets | None:
        """Return the end of a micro-batch within the limits, None if fewer rows wait than it needs."""
        options = self.options
        if isinstance(limit, ReadAllAvailable):
            return planning.limit_rows(start, end, None)
        waiting = sum(max(at - start[name], 0) for name, at in end.items())
        is_due = has_news or self._stop_at is not None or time.monotonic() >= self._planned + options.trigger_delay
        if waiting < options.waiting_rows and not is_due:
            return None
        end = planning.limit_rows(start, end, options.trigger_rows)
        if options.trigger_bytes is None:
            return end
        fit = partial(brokers.count_fitting, options=options)
        return end | planning.limit_bytes(planning.ranges(there, start, end), options.trigger_bytes, fit)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return one of the limits of the options, so that Spark asks for all only where its trigger says so."""
        options = self.options
        if options.trigger_rows is not None:
            return ReadMaxRows(options.trigger_rows)
        if options.trigger_bytes is not None:
            return ReadMaxBytes(int(options.trigger_bytes))
        return ReadMinRows(options.waiting_rows) if options.waiting_rows > 1 else ReadAllAvailable()

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
        if self.options.skip_purged:
            there += self._list_deleted(mine, there)
            first, gone = planning.skip_purged(there, first, mine)
            self._late |= {(one.partition.name, one.start): one for one in gone}
            log_skipped(gone)
        found = planning.ranges(there, first, mine)
        return [RangePartition(one) for one in planning.cut(found, self.options.partition_rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, on an executor."""
        return read_partition(partition, self.schema, self.options, _name_reader())

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
        if (source := self.options.first_source).startswith(DEAD_LETTER_PREFIX):
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

    def _list_deleted(self, offsets: Offsets, there: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions of deleted topics, empty, if a pattern chooses the topics and purged offsets are
        skipped."""
        if not (self.options.pattern and self.options.skip_purged):
            return []
        shards, names = {partition.shard for partition in there}, {partition.name for partition in there}
        deleted = []
        for name in sorted(offsets.keys() - names):
            topic, shard, queue = name.rsplit("/", 2)
            if int(shard, 16) in shards:
                deleted.append(TopicPartition(topic, int(shard, 16), int(queue), "", offsets[name], offsets[name]))
        return deleted

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_links": (), "_router": None}


def _name_reader() -> dict[str, Any]:
    """Return the fields of a read that name the query and batch of this task; the broker lists them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    if context is None or query is None:
        return {}
    # Spark gives tasks no name of the query, but it begins the description of its jobs: NAME, a line end, id = ...
    found = re.match(r"(.+?)(?:<br/>|\n)id = ", context.getLocalProperty("spark.job.description") or "", re.DOTALL)
    batch = int(context.getLocalProperty("streaming.sql.batchId") or 0)
    return {"reader": found[1] if found else query, "batch": batch}


def _list_ends(partitions: Sequence[TopicPartition]) -> Offsets:
    return {partition.name: partition.end for partition in partitions}
