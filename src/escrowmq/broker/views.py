"""Reads: topics, dead letters and the system views as streams of batches, bounded by what is durable.

The ledger is asked on the writer for a few thousand rows at a time; bodies are read on the reader's thread, and only the
columns that are asked for are touched. A range that has partly left with retention raises RANGE_PURGED, it never gives
fewer rows (I41); "from 0 on" without an end, like no start at all, means from the first that is stored.

Filters: tags are looked up in the queue's index and times in the log's, before anything is read; keys are compared first,
and the rest is read of what has the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.broker.columns import DELIVERED, delivered_columns, owners_of, transaction_ids
from escrowmq.broker.engine import Engine
from escrowmq.broker.filters import Filter, chosen_columns, coalesced, joined, limited
from escrowmq.broker.requests import Fields
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.receiving import matching, tag_numbers
from escrowmq.log.seam import Frame
from escrowmq.schemas import DELIVERY, HALF_VIEW, OP_VIEW, STORED, Kind
from escrowmq.wire import DEAD_LETTER_PREFIX, HALF_VIEW_NAME, OP_VIEW_NAME

Int64s = npt.NDArray[np.int64]

ROWS = 8192
"""Rows of one batch, at most."""
BYTES = 16 << 20
"""Bytes of one batch, about."""
SPAN = 65_536
"""Offsets looked through at a time when tags are asked for."""


def open_view(engine: Engine, request: dict[str, Any]) -> pa.RecordBatchReader:
    """The stream of :meth:`escrowmq.wire.Link.read`; raises EscrowError for a bad request at once."""
    fields = Fields(request)
    source: str = fields.text("source")
    view = HALF_VIEW if source == HALF_VIEW_NAME else OP_VIEW if source == OP_VIEW_NAME else DELIVERY
    schema, wanted, most = chosen_columns(view, fields), Filter.of(fields), fields.integer("max_rows", None)
    if source == HALF_VIEW_NAME:
        batches = _halves(engine, fields, wanted, schema)
    elif source == OP_VIEW_NAME:
        if wanted.columns:
            raise error(Code.BAD_REQUEST, f"{OP_VIEW_NAME} has neither tags nor keys")
        batches = _decisions(engine, fields, wanted, schema)
    elif source.startswith(DEAD_LETTER_PREFIX):
        batches = _dead_letters(engine, source[len(DEAD_LETTER_PREFIX) :], _Rows(engine, schema, wanted))
    elif source.startswith("%"):
        raise error(Code.UNKNOWN_TOPIC, f"no system view {source!r}", f"there are {HALF_VIEW_NAME} and {OP_VIEW_NAME}")
    else:
        batches = _topic(engine, source, fields, _Rows(engine, schema, wanted))
    if wanted.active:
        batches = coalesced(batches, ROWS, BYTES)
    return pa.RecordBatchReader.from_batches(schema, limited(batches, most))


class _Rows:
    """Messages by position, as rows of some columns of DELIVERY, in batches of about ``BYTES``."""

    def __init__(self, engine: Engine, schema: pa.Schema, wanted: Filter) -> None:
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
        start = 0
        while start < len(positions):
            part = slice(start, min(start + self._page, len(positions)))
            found, places = positions[part], offsets[part]
            if looked_at:
                mask = self._wanted.content(self._engine.log.read(found, self._wanted.columns))
                found, places = found[mask], places[mask]
            stored = self._engine.log.read(found, self._columns)
            yield self._delivered(stored, found, places)
            start = part.stop
            row_bytes = max(stored.nbytes // max(stored.num_rows, 1), 1)
            self._page = int(np.clip(BYTES // row_bytes, 1, min(8 * self._page, ROWS)))

    def _delivered(self, stored: pa.RecordBatch, positions: Int64s, offsets: Int64s) -> pa.RecordBatch:
        transactions = None
        if "transaction" in self._schema.names:
            transactions = owners_of(stored, positions, self._engine.log.shard, self._engine.log.read)
        return delivered_columns(self._schema, stored, transactions, positions, offsets)


def _topic(engine: Engine, topic: str, fields: Fields, rows: _Rows) -> Iterator[pa.RecordBatch]:
    """A queue from ``start`` (its first offset) to ``end`` (its end now)."""
    number = fields.integer("queue", 0, most=(1 << 31) - 1)
    start, end = fields.integer("start", None), fields.integer("end", None)

    def bounds() -> tuple[int, int, int]:
        queue_id = engine.shard.ledger.queue_id(topic, number)
        queue = engine.shard.ledger.queue(queue_id)
        return queue_id, queue.head, queue.end

    queue_id, head, newest = engine.look(bounds).result()
    first = head if start is None or (start == 0 and end is None) else start
    last = newest if end is None else min(end, newest)
    if first < head and first < last:
        raise _purged(first, head)
    return _queue_rows(engine, queue_id, first, last, rows)


def _purged(start: int, head: int) -> EscrowError:
    return error(Code.RANGE_PURGED, f"offset {start} has left the log; the first is {head}")


def _queue_rows(engine: Engine, queue_id: int, start: int, end: int, rows: _Rows) -> Iterator[pa.RecordBatch]:
    topics, step = engine.shard.ledger.topics, ROWS if rows.tags is None else SPAN
    queue = engine.shard.ledger.queue(queue_id)
    while start < end:
        stop = min(start + step, end)

        def places(start: int = start, stop: int = stop) -> tuple[Int64s, Int64s]:
            if start < queue.head:
                raise _purged(start, queue.head)
            positions, offsets = queue.positions(start, stop), np.arange(start, stop)
            if (tags := tag_numbers(rows.tags or (), topics)) is None:
                return positions, offsets
            mask = matching(queue, start, stop, tags)
            return positions[mask], offsets[mask]

        yield from rows.read(*engine.look(places).result(), tagged=True)
        start = stop


def _dead_letters(engine: Engine, group: str, rows: _Rows) -> Iterator[pa.RecordBatch]:
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


Stretch = tuple[Int64s, pa.RecordBatch, Int64s]
"""Neighbouring rows of some kinds: their positions, columns and times."""


def _frames(engine: Engine, kinds: list[Kind], columns: list[str], fields: Fields) -> Iterator[Stretch]:
    """Rows of some kinds by position, small frames put together; from ``start`` to ``end`` or to what is durable now."""
    start, end = fields.integer("start", None), fields.integer("end", None)
    first, durable = engine.log.first_position, engine.look(lambda: engine.log.next_position).result()
    if start is None or (start == 0 and end is None):
        start = first
    if start < first and (end is None or start < end):
        raise error(Code.RANGE_PURGED, f"position {start} has left the log; the first is {first}")
    end = durable if end is None else min(end, durable)
    frames = engine.log.frames_at(start, kinds, end) if start < end else iter(())
    return _stretches(frames, start, end, columns)


def _stretches(frames: Iterator[Frame], start: int, end: int, columns: list[str]) -> Iterator[Stretch]:
    """The rows ``start`` .. ``end``-1 of some frames, as stretches of up to ``ROWS`` rows and about ``BYTES``."""
    parts: list[tuple[int, int, pa.RecordBatch]] = []  # first position, time, rows
    count = size = 0
    for frame in frames:
        rows = frame.batch.select(columns)
        low, high = max(start - frame.position, 0), min(end - frame.position, rows.num_rows)
        row_bytes = max(_size(rows) // rows.num_rows, 1)
        while low < high:
            part = min(high - low, ROWS - count, max((BYTES - size) // row_bytes, 1))
            parts.append((frame.position + low, frame.time_us, rows.slice(low, part)))
            low, count, size = low + part, count + part, size + part * row_bytes
            if count >= ROWS or size >= BYTES:
                yield _stretch(parts)
                parts, count, size = [], 0, 0
    if parts:
        yield _stretch(parts)


def _size(rows: pa.RecordBatch) -> int:
    """Bytes of a frame's rows, about: Arrow takes 50 us to count exactly, which is much for a frame of one row."""
    return int(rows.nbytes if rows.num_rows > 64 else rows.get_total_buffer_size())


def _stretch(parts: list[tuple[int, int, pa.RecordBatch]]) -> Stretch:
    firsts, times, batches = zip(*parts, strict=True)
    sizes = np.array([batch.num_rows for batch in batches])
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    positions = np.repeat(np.array(firsts, np.int64), sizes) + np.arange(sizes.sum()) - before
    return positions, joined(batches), np.repeat(np.array(times, np.int64), sizes)


def _halves(engine: Engine, fields: Fields, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    used = {"transaction", "epoch", *schema.names, *wanted.columns}
    columns = [name for name in STORED[Kind.HALF].names if name in used]
    stretches = _frames(engine, [Kind.HALF], columns, fields)

    def batches() -> Iterator[pa.RecordBatch]:
        for positions, stored, times in stretches:
            if wanted.active:
                mask = wanted.times(times) & wanted.content(stored)
                positions, stored, times = positions[mask], stored.filter(pa.array(mask)), times[mask]
            states, checks, due, first, epochs = _half_states(engine, positions)
            gone = first < 0
            own = stored.column("transaction").to_numpy(), stored.column("epoch").to_numpy().astype(np.int64)
            ids = transaction_ids(
                engine.log.shard, np.where(gone, own[1], epochs), np.where(gone, own[0], first).astype(np.int64)
            )
            made = {
                "position": pa.array(positions),
                "stored_us": pa.array(times),
                "due_us": pa.array(np.where(gone, 0, due)),
                "transaction": ids,
                "state": pa.array(states),
                "checks": pa.array(np.where(gone, 0, checks).astype(np.int32)),
            }
            arrays = [made[f.name] if f.name in made else stored.column(f.name) for f in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return batches()


def _half_states(engine: Engine, positions: Int64s) -> Any:
    return engine.look(lambda: engine.shard.ledger.half_states(positions)).result()


def _decisions(engine: Engine, fields: Fields, wanted: Filter, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    columns = STORED[Kind.DECIDED].names  # a batch's decisions have more, which tell of the batch
    stretches = _frames(engine, [Kind.DECIDED, Kind.BATCH_DECIDED], columns, fields)

    def batches() -> Iterator[pa.RecordBatch]:
        for positions, decided, times in stretches:
            # A batch of no transactions is a row without one.
            mask = (decided.column("transaction").to_numpy() >= 0) & wanted.times(times)
            if not mask.all():
                positions, decided, times = positions[mask], decided.filter(pa.array(mask)), times[mask]
            halves = decided.column("transaction").to_numpy()
            _, _, _, first, epochs = _half_states(engine, halves)
            own = decided.column("epoch").to_numpy().astype(np.int64)
            made = {
                "position": pa.array(positions),
                "half_position": decided.column("transaction"),
                "transaction": transaction_ids(engine.log.shard, np.where(first < 0, own, epochs), halves),
                "decided_us": pa.array(times),
            }
            arrays = [made[f.name] if f.name in made else decided.column(f.name) for f in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return batches()
