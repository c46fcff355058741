"""Streams topics, dead letters, files and system views (``system_views.py``) as batches, up to the last durable row.

The ledger is read on the writer, a few thousand rows at a time; bodies are read on the reader's thread. Only the
requested columns are read.

Filters: tags are found in the queue's index and times in the log's, before anything is read; keys are compared first,
and the other columns are read only for matching rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.broker.columns import DELIVERED, delivered, owners_of
from escrowmq.broker.reads.chunks import BYTES, ROWS, marked, marks_of, purged, range_of
from escrowmq.broker.reads.filters import Filter, chosen_columns, coalesced, limited
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.reads.system_views import OF_GROUPS, read_view
from escrowmq.broker.requests import checked
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.groups.dead.listing import died_between
from escrowmq.ledger.groups.receiving import match_tags, tag_numbers
from escrowmq.ledger.groups.reports import positions_of
from escrowmq.ledger.queues.queues import Place, QueueIndex
from escrowmq.log.report import RowDamage
from escrowmq.schemas import FILE_PIECE
from escrowmq.settings import nearest
from escrowmq.wire import DAMAGED_COLUMN, DEAD_LETTER_PREFIX, FILE_PREFIX, VIEWS, BatchStream, ReadRequest

SPAN = 65_536  # offsets read from the ledger at a time
PROBE_ROWS = 16  # rows whose size sizes the first batch: a message may be as large as a quarter of a batch
FIRST_ROWS = 256  # rows of the first batch, at most
PIECE_BYTES = 1 << 20
FILE_BYTES = 64 << 20  # of a file in one read: a backup writes these before it requests more, so a stop need not wait
SHARE = 1024  # rows of one frame that make a batch of their own: joining parts of frames copies every body


def open_view(engine: Readable, content: Mapping[str, object]) -> BatchStream:
    """Return the stream of batches for a read of a topic, view or file (:meth:`escrowmq.wire.Link.read`). Raises
    EscrowError for a bad request at once."""
    request = checked(ReadRequest, content)
    source = request["source"]
    if source.startswith(FILE_PREFIX):
        return _open_file(engine, request)
    schema, wanted = chosen_columns(source, request.get("columns")), Filter.of(request)
    if wanted.group is not None and source not in OF_GROUPS:
        raise error(Code.BAD_REQUEST, f"{source} has no consumer groups", f"{' and '.join(OF_GROUPS)} have")
    if source in VIEWS:
        batches = read_view(engine, request, wanted, schema)
    elif source.startswith(DEAD_LETTER_PREFIX):
        batches = _dead_letters(engine, request, _Rows(engine, schema, wanted))
    elif source.startswith("%"):
        names = [*VIEWS, DEAD_LETTER_PREFIX + "GROUP", FILE_PREFIX + "NAME"]
        hint = nearest(source, names) or f"there are {', '.join(names)}"
        raise error(Code.UNKNOWN_TOPIC, f"no system view {source!r}", hint)
    else:
        batches = _topic(engine, request, _Rows(engine, schema, wanted))
    if wanted.active:
        batches = coalesced(batches, ROWS, BYTES)
    return BatchStream(schema, limited(batches, request.get("max_rows")))


PlacesOf = Callable[[Int64s], list[Place]]  # the queues of messages by position, known without reading rows
_FROM_ROWS = frozenset({"topic", "key", "tag", "properties", "body", "message_id", "queue", "born_us", "transaction"})


class _Rows:
    """Messages by position, as rows of some columns of DELIVERY, in batches of about ``BYTES``."""

    def __init__(self, engine: Readable, schema: pa.Schema, wanted: Filter) -> None:
        self._engine = engine
        self._schema = schema
        self._wanted = wanted
        self._columns = list(dict.fromkeys(name for f in schema for name in DELIVERED.get(f.name, (f.name,))))
        self._page = 0  # not known yet
        self._marked = DAMAGED_COLUMN in schema.names
        self.tags = wanted.tags

    def read(self, positions: Int64s, offsets: Int64s, places: PlacesOf, *, tagged: bool) -> Iterator[pa.RecordBatch]:
        """Yield those of the messages at these log positions that the filter selects, in batches. ``offsets``: theirs
        in their queues. ``places`` finds their queues. ``tagged``: the caller has filtered by tag already."""
        if self._wanted.timed and len(positions):
            mask = self._wanted.times(self._engine.log.time_at(positions))
            positions, offsets = positions[mask], offsets[mask]
        by_content = bool(set(self._wanted.columns) - ({"tag"} if tagged else set()))
        ends = self._find_shares(positions)
        if not self._page and len(positions):
            few, _ = self._engine.log.salvage(positions[:PROBE_ROWS], self._columns)
            self._page = int(np.clip(BYTES * few.num_rows // max(few.nbytes, 1), 1, FIRST_ROWS))
        start = 0
        while start < len(positions):
            part = slice(start, min(start + self._page, int(ends[np.searchsorted(ends, start, side="right")])))
            at, numbers = positions[part], offsets[part]
            if by_content:
                stored, damaged = self._stored(at, self._wanted.columns)
                mask = self._wanted.content(stored)
                mask[[row for row, damage in damaged.items() if not damage.body_only]] = True  # unknown: marked instead
                at, numbers = at[mask], numbers[mask]
            batch = self._rows_at(at, numbers, places)
            yield batch
            start = part.stop
            row_bytes = max(batch.nbytes // max(batch.num_rows, 1), 1)
            self._page = int(np.clip(BYTES // row_bytes, 1, min(8 * self._page, ROWS)))

    def _stored(self, positions: Int64s, columns: list[str]) -> tuple[pa.RecordBatch, Mapping[int, RowDamage]]:
        log = self._engine.log
        return log.salvage(positions, columns) if self._marked else (log.read(positions, columns), {})

    def _find_shares(self, positions: Int64s) -> Int64s:
        """Return the indices in ``positions`` at which a batch must end: before and after each run of ``SHARE`` rows or
        more of one frame, and at the end."""
        if len(positions) < SHARE:
            return np.array([len(positions)])
        changes = np.flatnonzero(np.diff(self._engine.log.sequence_at(positions))) + 1
        edges = np.concatenate(([0], changes, [len(positions)]))
        large = np.flatnonzero(np.diff(edges) >= SHARE)
        return np.unique(np.concatenate((edges[large], edges[large + 1], edges[-1:])))

    def _rows_at(self, positions: Int64s, offsets: Int64s, places_of: PlacesOf) -> pa.RecordBatch:
        stored, damaged = self._stored(positions, self._columns)
        has_ids = "transaction" in self._schema.names
        transactions = owners_of(stored, positions, self._engine.log) if has_ids else None
        own = pa.schema([field for field in self._schema if field.name != DAMAGED_COLUMN])
        rows = delivered(stored, transactions, positions, offsets, schema=own)
        if not self._marked:
            return rows
        known = {}
        if damaged:
            places = places_of(positions)
            known["topic"] = pa.array([place.topic for place in places], pa.utf8())
            known["queue"] = pa.array([place.queue for place in places], pa.int32())
        return marked(rows, self._schema, marks_of(damaged, rows.num_rows), _FROM_ROWS, known)


def _topic(engine: Readable, request: ReadRequest, rows: _Rows) -> Iterator[pa.RecordBatch]:
    """Return an iterator over the messages of a queue, from ``start`` (default: its first offset) to ``end`` (default:
    its end now) of the request."""

    def look() -> tuple[QueueIndex, int, int]:
        ledger = engine.shard.ledger
        queue = ledger.queue(ledger.queue_id(request["source"], request.get("queue", 0)))
        return queue, queue.head, queue.end

    queue, head, newest = engine.look(look).result()
    return _queue_rows(engine, queue, *range_of(request, "offset", head, newest), rows)


def _queue_rows(engine: Readable, queue: QueueIndex, start: int, end: int, rows: _Rows) -> Iterator[pa.RecordBatch]:
    topics = engine.shard.ledger.topics
    while start < end:
        stop = min(start + SPAN, end)

        def stored(start: int = start, stop: int = stop) -> tuple[Int64s, Int64s]:
            if start < queue.head:
                raise purged("offset", start, queue.head)
            positions, offsets = queue.positions(start, stop), np.arange(start, stop)
            if (tags := tag_numbers(rows.tags or (), topics)) is None:
                return positions, offsets
            mask = match_tags(queue, start, stop, tags)
            return positions[mask], offsets[mask]

        yield from rows.read(*engine.look(stored).result(), lambda some: [queue.place] * len(some), tagged=True)
        start = stop


def _find_deaths(engine: Readable, group: str, start_us: int, end_us: int, rows: _Rows) -> Iterator[pa.RecordBatch]:
    ledger = engine.shard.ledger
    letters = engine.look(lambda: ledger.groups.dead(group, ledger.topics)).result()
    queue_ids, offsets = died_between(letters, start_us, end_us)

    def look() -> Int64s:
        return positions_of(ledger.topics, queue_ids, offsets, ledger.groups.by_name.get(group))

    positions = engine.look(look).result()
    stored = positions >= 0
    positions, offsets = positions[stored], offsets[stored]
    where = dict(zip(positions.tolist(), queue_ids[stored].tolist(), strict=True))

    def places(some: Int64s) -> list[Place]:
        return [ledger.topics.queues[where[position]].place for position in some.tolist()]

    return rows.read(positions, offsets, places, tagged=False)


def _dead_letters(engine: Readable, request: ReadRequest, rows: _Rows) -> Iterator[pa.RecordBatch]:
    """Return an iterator over the dead letters of a group, with the offsets of their own queues: by queue and offset;
    with ``start`` or ``end``, those that died in that time, by time. Raises Rejected(UNKNOWN_GROUP)."""
    group = request["source"][len(DEAD_LETTER_PREFIX) :]
    start_us, end_us = request.get("start"), request.get("end")
    if start_us or end_us is not None:
        return _find_deaths(engine, group, start_us or 0, NEVER_US if end_us is None else end_us, rows)

    def page(after: tuple[int, int] | None) -> list[dict[str, Any]]:
        ledger = engine.shard.ledger
        return ledger.groups.dead_letters(group, ledger.topics, ROWS, after)

    first = engine.look(lambda: page(None)).result()  # UNKNOWN_GROUP now, not in the middle of the stream

    def batches() -> Iterator[pa.RecordBatch]:
        letters = first
        while letters:
            positions = np.array([letter["position"] for letter in letters], np.int64)
            offsets = np.array([letter["offset"] for letter in letters], np.int64)
            where = {letter["position"]: Place(letter["topic"], letter["queue"]) for letter in letters}

            def places(some: Int64s, where: dict[int, Place] = where) -> list[Place]:
                return [where[position] for position in some.tolist()]

            yield from rows.read(positions, offsets, places, tagged=False)
            last = (letters[-1]["queue_id"], letters[-1]["offset"])
            letters = engine.look(lambda after=last: page(after)).result()  # type: ignore[misc]

    return batches()


# Files of the log


def _open_file(engine: Readable, request: ReadRequest) -> BatchStream:
    """Return a stream of the bytes of the log's file ``%file.NAME`` from ``start`` to before ``end``, for a backup.
    They are read from disk and not mapped: if the disk fails, a read reports that, while a mapped page would end the
    process."""
    if others := sorted(set(request) - {"source", "start", "end"}):
        raise error(Code.BAD_REQUEST, f"a file is read whole: no {others[0]!r}")
    start, end = request.get("start") or 0, request.get("end")
    if end is None or not 0 <= end - start <= FILE_BYTES:
        raise error(Code.BAD_REQUEST, f"'end' must be 'start' to 'start' + {FILE_BYTES}")
    name = request["source"].removeprefix(FILE_PREFIX)
    first = engine.log.read_file(name, start, min(PIECE_BYTES, end - start))  # now, so that errors come at once
    return BatchStream(FILE_PIECE, _pieces(engine, name, start, end, first))


def _pieces(engine: Readable, name: str, start: int, end: int, piece: bytes) -> Iterator[pa.RecordBatch]:
    while piece:
        yield pa.RecordBatch.from_arrays([pa.array([start]), pa.array([piece], pa.binary())], schema=FILE_PIECE)
        start += len(piece)
        piece = engine.log.read_file(name, start, min(PIECE_BYTES, end - start)) if start < end else b""
