"""Reads: topics, dead letters and the system views as streams of batches, bounded by what is durable.

The ledger is asked on the writer for a few thousand rows at a time; bodies are read on the reader's thread. A range that
has partly left with retention raises RANGE_PURGED, it never gives fewer rows (I41); "from 0 on" without an end, like no
start at all, means from the first that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.broker.columns import delivery, owners_of, transaction_ids
from escrowmq.broker.engine import Engine
from escrowmq.broker.requests import Fields
from escrowmq.errors import Code, EscrowError, error
from escrowmq.schemas import DELIVERY, HALF_VIEW, OP_VIEW, Kind
from escrowmq.wire import DEAD_LETTER_PREFIX, HALF_VIEW_NAME, OP_VIEW_NAME

Int64s = npt.NDArray[np.int64]

ROWS = 8192
"""Rows read at a time."""
BYTES = 16 << 20
"""Bytes of one batch, about."""


class _Pages:
    """Slices of positions whose stored rows take about ``BYTES``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows = 256

    def read(self, positions: Int64s) -> Iterator[tuple[slice, pa.RecordBatch]]:
        """The stored rows, with the part of ``positions`` that they are."""
        start = 0
        while start < len(positions):
            part = slice(start, min(start + self._rows, len(positions)))
            stored = self._engine.log.read(positions[part])
            yield part, stored
            start = part.stop
            row_bytes = max(stored.nbytes // max(stored.num_rows, 1), 1)
            self._rows = int(np.clip(BYTES // row_bytes, 1, min(8 * self._rows, ROWS)))


def open_view(engine: Engine, request: dict[str, Any]) -> pa.RecordBatchReader:
    """The stream of :meth:`escrowmq.wire.Link.read`; raises EscrowError for a bad request at once."""
    fields = Fields(request)
    source: str = fields.text("source")
    if source == HALF_VIEW_NAME:
        schema, batches = HALF_VIEW, _halves(engine, fields)
    elif source == OP_VIEW_NAME:
        schema, batches = OP_VIEW, _decisions(engine, fields)
    elif source.startswith(DEAD_LETTER_PREFIX):
        schema, batches = DELIVERY, _dead_letters(engine, source[len(DEAD_LETTER_PREFIX) :])
    elif source.startswith("%"):
        raise error(Code.UNKNOWN_TOPIC, f"no system view {source!r}", f"there are {HALF_VIEW_NAME} and {OP_VIEW_NAME}")
    else:
        schema, batches = DELIVERY, _topic(engine, source, fields)
    most = fields.integer("max_rows", None)
    columns = fields.list("columns", str) if "columns" in fields else schema.names
    return _select(schema, columns, _limit(batches, most))


def _select(schema: pa.Schema, columns: list[str], batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    unknown = [name for name in columns if name not in schema.names]
    if unknown:
        raise error(Code.BAD_REQUEST, f"no columns {unknown}", f"there are {', '.join(schema.names)}")
    chosen = pa.schema([schema.field(name) for name in columns])
    return pa.RecordBatchReader.from_batches(chosen, (batch.select(columns) for batch in batches))


def _limit(batches: Iterator[pa.RecordBatch], most: int | None) -> Iterator[pa.RecordBatch]:
    left = most
    for batch in batches:
        if left is not None:
            batch = batch.slice(0, left)
            left -= batch.num_rows
        if batch.num_rows:
            yield batch
        if left == 0:
            return


def _topic(engine: Engine, topic: str, fields: Fields) -> Iterator[pa.RecordBatch]:
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
    return _queue_rows(engine, queue_id, first, last)


def _purged(start: int, head: int) -> EscrowError:
    return error(Code.RANGE_PURGED, f"offset {start} has left the log; the first is {head}")


def _queue_rows(engine: Engine, queue_id: int, start: int, end: int) -> Iterator[pa.RecordBatch]:
    queue, pages = engine.shard.ledger.queue(queue_id), _Pages(engine)
    while start < end:
        stop = min(start + ROWS, end)

        def positions(start: int = start, stop: int = stop) -> Int64s:
            if start < queue.head:
                raise _purged(start, queue.head)
            return queue.positions(start, stop)

        found = engine.look(positions).result()
        offsets = np.arange(start, stop)
        for part, stored in pages.read(found):
            yield _browsed(engine, stored, found[part], offsets[part])
        start = stop


def _browsed(engine: Engine, stored: pa.RecordBatch, positions: Int64s, offsets: Int64s) -> pa.RecordBatch:
    transactions = owners_of(stored, positions, engine.log.shard, engine.log.read)
    return delivery(stored, transactions, positions, offsets)


def _dead_letters(engine: Engine, group: str) -> Iterator[pa.RecordBatch]:
    """The dead letters of a group: their offsets are those of their own queues."""

    def page(after: tuple[int, int] | None) -> list[dict[str, Any]]:
        ledger = engine.shard.ledger
        return ledger.groups.dead_letters(group, ledger.topics, ROWS, after)

    first = engine.look(lambda: page(None)).result()  # UNKNOWN_GROUP now, not in the middle of the stream

    def batches() -> Iterator[pa.RecordBatch]:
        letters, pages = first, _Pages(engine)
        while letters:
            positions = np.array([letter["position"] for letter in letters], np.int64)
            offsets = np.array([letter["offset"] for letter in letters], np.int64)
            for part, stored in pages.read(positions):
                yield _browsed(engine, stored, positions[part], offsets[part])
            last = (letters[-1]["queue_id"], letters[-1]["offset"])
            letters = engine.look(lambda after=last: page(after)).result()  # type: ignore[misc]

    return batches()


def _frames(engine: Engine, kinds: Sequence[Kind], fields: Fields) -> Iterator[tuple[Int64s, pa.RecordBatch, int]]:
    """Rows of some kinds by position: positions, rows, time; from ``start`` to ``end`` or to what is durable now."""
    start, end = fields.integer("start", None), fields.integer("end", None)
    first, durable = engine.log.first_position, engine.look(lambda: engine.log.next_position).result()
    if start is None or (start == 0 and end is None):
        start = first
    if start < first and (end is None or start < end):
        raise error(Code.RANGE_PURGED, f"position {start} has left the log; the first is {first}")
    end = durable if end is None else min(end, durable)

    def rows() -> Iterator[tuple[Int64s, pa.RecordBatch, int]]:
        if start >= end:
            return
        for frame in engine.log.frames_at(start, kinds, end):
            low, high = max(start - frame.position, 0), min(end - frame.position, frame.batch.num_rows)
            for at in range(low, high, ROWS):
                size = min(ROWS, high - at)
                positions = np.arange(frame.position + at, frame.position + at + size)
                yield positions, frame.batch.slice(at, size), frame.time_us

    return rows()


def _halves(engine: Engine, fields: Fields) -> Iterator[pa.RecordBatch]:
    rows = _frames(engine, [Kind.HALF], fields)

    def batches() -> Iterator[pa.RecordBatch]:
        for positions, stored, time_us in rows:
            look: Callable[[], Any] = lambda at=positions: engine.shard.ledger.half_states(at)  # type: ignore[misc] # noqa: E731
            states, checks, due, first, epochs = engine.look(look).result()
            gone = first < 0
            own = stored.column("transaction").to_numpy(), stored.column("epoch").to_numpy().astype(np.int64)
            ids = transaction_ids(
                engine.log.shard, np.where(gone, own[1], epochs), np.where(gone, own[0], first).astype(np.int64)
            )
            made = {
                "position": pa.array(positions),
                "stored_us": pa.array(np.full(len(positions), time_us)),
                "due_us": pa.array(np.where(gone, 0, due)),
                "transaction": ids,
                "state": pa.array(states),
                "checks": pa.array(np.where(gone, 0, checks).astype(np.int32)),
            }
            arrays = [made[f.name] if f.name in made else stored.column(f.name) for f in HALF_VIEW]
            yield pa.RecordBatch.from_arrays(arrays, schema=HALF_VIEW)

    return batches()


def _decisions(engine: Engine, fields: Fields) -> Iterator[pa.RecordBatch]:
    rows = _frames(engine, [Kind.DECIDED, Kind.BATCH_DECIDED], fields)

    def batches() -> Iterator[pa.RecordBatch]:
        for positions, decided, time_us in rows:
            real = decided.column("transaction").to_numpy() >= 0  # a batch of no transactions is a row without one
            if not real.all():
                positions, decided = positions[real], decided.filter(pa.array(real))
            halves = decided.column("transaction").to_numpy()
            look: Callable[[], Any] = lambda at=halves: engine.shard.ledger.half_states(at)  # type: ignore[misc] # noqa: E731
            _, _, _, first, epochs = engine.look(look).result()
            own = decided.column("epoch").to_numpy().astype(np.int64)
            made = {
                "position": pa.array(positions),
                "half_position": decided.column("transaction"),
                "transaction": transaction_ids(engine.log.shard, np.where(first < 0, own, epochs), halves),
                "decided_us": pa.array(np.full(len(positions), time_us)),
            }
            arrays = [made[f.name] if f.name in made else decided.column(f.name) for f in OP_VIEW]
            yield pa.RecordBatch.from_arrays(arrays, schema=OP_VIEW)

    return batches()
