"""Streaming reads of format "escrow": offsets by place, limits, ``availableNow``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from escrowmq.spark import brokers
from escrowmq.spark.filters import Pushed
from escrowmq.spark.options import ReadOptions
from escrowmq.spark.planning import Offsets, Place, begun, cut, ends, first_offsets, known_start, limited, noted, ranges
from escrowmq.spark.source import Piece, check_places, read_piece, timed, told
from escrowmq.wire import Link


class EscrowStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are ``{"topic/shard/queue": next offset}``. Queues and brokers' topics that come later join by themselves."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        self.options = options
        self.schema = schema
        self._links: Sequence[Link] = ()
        self._stop_at: Offsets | None = None

    def initialOffset(self) -> Offsets:
        """None yet: the end of the first batch notes where it begins (see planning.noted)."""
        return {}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> Offsets:
        """How far the next micro-batch goes: to the end, or as far as the limit."""
        there = self._places()
        end = {place.name: place.end for place in there}
        if self._stop_at is not None:
            end = {name: min(at, self._stop_at[name]) for name, at in end.items() if name in self._stop_at}
        before = ends(start)
        known = known_start(before, there) if before else first_offsets(there, self.options.start)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        reached = before | limited({name: known[name] for name in end}, end, rows)
        if reached == before:
            return start
        return noted(reached, {name: known[name] for name in reached.keys() - before.keys()})

    def getDefaultReadLimit(self) -> ReadLimit:
        """Option ``maxRowsPerTrigger``."""
        rows = self.options.trigger_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def reportLatestOffset(self) -> Offsets:
        """The end of every place, for the query's progress."""
        return {place.name: place.end for place in self._places()}

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember what is there now: the query ends with it."""
        self._stop_at = {place.name: place.end for place in self._places()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """The pieces between two offsets. Raises RANGE_PURGED, and Misuse for the offsets of another cluster."""
        pushed = timed(self.options, Pushed(key=self.options.key, tags=self.options.tags))
        found = ranges(self._places(), begun(start, end), ends(end))
        return [Piece(piece, pushed) for piece in cut(found, self.options.partition_rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return told(partition, read_piece(partition, self.schema, self.options.timeout))

    def stop(self) -> None:
        """Let the connections go."""
        links, self._links = self._links, ()
        for link in links:
            link.close()

    def _places(self) -> list[Place]:
        if not self._links or self.options.url.startswith("file:"):  # a folder is a view of one moment
            self.stop()
            self._links = brokers.open_links(self.options.url)
        there = brokers.places(self._links, self.options)
        brokers.one_shard(there)
        check_places(there, self.options.sources[0])
        return there

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_links": ()}
