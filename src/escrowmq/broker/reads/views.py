"""Streams topics, dead letters and system views (``system_views.py``) as batches, up to the last durable row.

The ledger is asked on the writer for a few thousand rows at a time; bodies are read on the reader's thread, and only the
columns that are asked for are touched.

Filters: tags are looked up in the queue's index and times in the log's, before anything is read; keys are compared first,
and the rest is read of what has the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import DELIVERED, delivered, owners_of
from escrowmq.broker.reads.chunks import BYTES, ROWS, purged, range_of
from escrowmq.broker.reads.filters import Filter, chosen_columns, coalesced, limited
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.reads.system_views import SYSTEM_VIEWS
from escrowmq.broker.requests import checked
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups.receiving import matching, tag_numbers
from escrowmq.schemas import DELIVERY
from escrowmq.settings import nearest
from escrowmq.wire import ACK_VIEW_NAME, DEAD_LETTER_PREFIX, VIEWS, ReadRequest

SPAN = 65_536
"""Offsets asked of the ledger at a time."""
SHARE = 1024
"""Rows of one frame that are worth a batch of their own: parts of several frames must be joined, which copies every body."""


def open_view(engine: Readable, content: Mapping[str, object]) -> pa.RecordBatchReader:
    """The stream of :meth:`escrowmq.wire.Link.read`; raises EscrowError for a bad request at once."""
    request = checked(ReadRequest, content)
    source = request["source"]
    schema, wanted = chosen_columns(VIEWS.get(source, DELIVERY), request.get("columns")), Filter.of(request)
    if wanted.group is not None and source != ACK_VIEW_NAME:
        raise error(Code.BAD_REQUEST, f"{source} has no consumer groups", f"{ACK_VIEW_NAME} has")
    if source in VIEWS:
        batches = SYSTEM_VIEWS[source](engine, request, wanted, schema)
    elif source.startswith(DEAD_LETTER_PREFIX):
        batches = _dead_letters(engine, source[len(DEAD_LETTER_PREFIX) :], _Rows(engine, schema, wanted))
    elif source.startswith("%"):
        names = [*VIEWS, DEAD_LETTER_PREFIX + "GROUP"]
        hint = nearest(source, names) or f"there are {', '.join(names)}"
        raise error(Code.UNKNOWN_TOPIC, f"no system view {source!r}", hint)
    else:
        batches = _topic(engine, request, _Rows(engine, schema, wanted))
    if wanted.active:
        batches = coalesced(batches, ROWS, BYTES)
    return pa.RecordBatchReader.from_batches(schema, limited(batches, request.get("max_rows")))


class _Rows:
    """Messages by position, as rows of some columns of DELIVERY, in batches of about ``BYTES``."""

    def __init__(self, engine: Readable, schema: pa.Schema, wanted: Filter) -> None:
        self._engine = engine
        self._schema = schema
        self._wanted = wanted
        self._columns = list(dict.fromkeys(name for f in schema for name in DELIVERED.get(f.name, (f.name,))))
        self._page = 256
        self.tags = wanted.tags

    def read(self, positions: Int64s, offsets: Int64s, *, tagged: bool) -> Iterator[pa.RecordBatch]:
        """The rows that the filter wants; ``tagged``: those of other tags are left out already."""
        if self._wanted.timed and len(positions):
            mask = self._wanted.times(self._engine.log.time_at(positions))
            positions, offsets = positions[mask], offsets[mask]
        looked_at = [name for name in self._wanted.columns if not (tagged and name == "tag")]
        ends = self._shares(positions)
        start = 0
        while start < len(positions):
            part = slice(start, min(start + self._page, int(ends[np.searchsorted(ends, start, side="right")])))
            at, numbers = positions[part], offsets[part]
            if looked_at:
                mask = self._wanted.content(self._engine.log.read(at, self._wanted.columns))
                at, numbers = at[mask], numbers[mask]
            stored = self._engine.log.read(at, self._columns)
            yield self._delivered(stored, at, numbers)
            start = part.stop
            row_bytes = max(stored.nbytes // max(stored.num_rows, 1), 1)
            self._page = int(np.clip(BYTES // row_bytes, 1, min(8 * self._page, ROWS)))

    def _shares(self, positions: Int64s) -> Int64s:
        """Where a batch must end: around every large share of one frame, and at the end."""
        if len(positions) < SHARE:
            return np.array([len(positions)])
        changes = np.flatnonzero(np.diff(self._engine.log.sequence_at(positions))) + 1
        edges = np.concatenate(([0], changes, [len(positions)]))
        large = np.flatnonzero(np.diff(edges) >= SHARE)
        return np.unique(np.concatenate((edges[large], edges[large + 1], edges[-1:])))

    def _delivered(self, stored: pa.RecordBatch, positions: Int64s, offsets: Int64s) -> pa.RecordBatch:
        transactions = None
        if "transaction" in self._schema.names:
            transactions = owners_of(stored, positions, self._engine.log.shard, self._engine.log.read)
        return delivered(stored, transactions, positions, offsets, schema=self._schema)


def _topic(engine: Readable, request: ReadRequest, rows: _Rows) -> Iterator[pa.RecordBatch]:
    """A queue from ``start`` (its first offset) to ``end`` (its end now)."""

    def bounds() -> tuple[int, int, int]:
        queue_id = engine.shard.ledger.queue_id(request["source"], request.get("queue", 0))
        queue = engine.shard.ledger.queue(queue_id)
        return queue_id, queue.head, queue.end

    queue_id, head, newest = engine.look(bounds).result()
    return _queue_rows(engine, queue_id, *range_of(request, "offset", head, newest), rows)


def _queue_rows(engine: Readable, queue_id: int, start: int, end: int, rows: _Rows) -> Iterator[pa.RecordBatch]:
    topics = engine.shard.ledger.topics
    queue = engine.shard.ledger.queue(queue_id)
    while start < end:
        stop = min(start + SPAN, end)

        def stored(start: int = start, stop: int = stop) -> tuple[Int64s, Int64s]:
            if start < queue.head:
                raise purged("offset", start, queue.head)
            positions, offsets = queue.positions(start, stop), np.arange(start, stop)
            if (tags := tag_numbers(rows.tags or (), topics)) is None:
                return positions, offsets
            mask = matching(queue, start, stop, tags)
            return positions[mask], offsets[mask]

        yield from rows.read(*engine.look(stored).result(), tagged=True)
        start = stop


def _dead_letters(engine: Readable, group: str, rows: _Rows) -> Iterator[pa.RecordBatch]:
    """The dead letters of a group: their offsets are those of their own queues."""

    def page(after: tuple[int, int] | None) -> list[dict[str, Any]]:
        ledger = engine.shard.ledger
        return ledger.groups.dead_letters(group, ledger.topics, ROWS, after)

    first = engine.look(lambda: page(None)).result()  # UNKNOWN_GROUP now, not in the middle of the stream

    def batches() -> Iterator[pa.RecordBatch]:
        letters = first
        while letters:
            positions = np.array([letter["position"] for letter in letters], np.int64)
            offsets = np.array([letter["offset"] for letter in letters], np.int64)
            yield from rows.read(positions, offsets, tagged=False)
            last = (letters[-1]["queue_id"], letters[-1]["offset"])
            letters = engine.look(lambda after=last: page(after)).result()  # type: ignore[misc]

    return batches()
