"""Scans a position range of the log for rows of given kinds and merges small frames into larger batches.

Where no end is given, reading stops at what was durable when it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from escrowmq.broker.reads.filters import joined
from escrowmq.broker.reads.marking import marked_frame
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.log.seam import Frame
from escrowmq.schemas import Kind
from escrowmq.wire import DAMAGED_COLUMN, ReadRequest

ROWS = 8192  # rows of one batch, at most
BYTES = 16 << 20  # bytes of one batch, about

Chunk = tuple[Int64s, pa.RecordBatch, Int64s]
"""Neighbouring rows of some kinds: their positions, columns and times."""


def range_of(request: ReadRequest, what: str, first: int, newest: int) -> tuple[int, int]:
    """From which ``what`` (offset or position) to before which a request reads, of those that are stored: ``first`` to
    before ``newest``. "From 0 on" without an end, like no start at all, means from the first. Raises RANGE_PURGED."""
    start, end = request.get("start"), request.get("end")
    if start is None or (start == 0 and end is None):
        start = first
    end = newest if end is None else min(end, newest)
    if start < first and start < end:
        raise purged(what, start, first)
    return start, end


def purged(what: str, start: int, first: int) -> EscrowError:
    """Return the refusal of a range that has partly left with retention (I41): a read never gives fewer rows
    instead."""
    return error(Code.RANGE_PURGED, f"{what} {start} has left the log; the first is {first}")


def kept(chunk: Chunk, mask: Bools) -> Chunk:
    """Return the rows of a chunk that a mask marks."""
    positions, rows, times = chunk
    return positions[mask], rows.filter(pa.array(mask)), times[mask]


def scan(
    engine: Readable,
    kinds: Sequence[Kind],
    columns: list[str],
    request: ReadRequest,
    schema: pa.Schema,
    alike: Callable[[Frame], Frame] | None = None,
) -> Iterator[Chunk]:
    """Return rows of some kinds by position, from ``start`` to before ``end`` of a read request. If ``schema`` has the
    column
    ``damaged``, damaged rows come, too; their chunks have the columns of ``marked_frame``. ``alike`` gives frames of
    different kinds the same ``columns``."""
    first, durable = engine.log.first_position, engine.look(lambda: engine.log.next_position).result()
    start, end = range_of(request, "position", first, durable)
    marking = DAMAGED_COLUMN in schema.names
    frames = engine.log.frames_at(start, kinds, end, damaged=marking) if start < end else iter(())
    return _of_frames(frames if alike is None else map(alike, frames), start, end, columns, marking)


def _of_frames(frames: Iterator[Frame], start: int, end: int, columns: list[str], marking: bool) -> Iterator[Chunk]:
    """Yield the rows ``start`` .. ``end``-1 of some frames, as chunks of up to ``ROWS`` rows and about ``BYTES``."""
    parts: list[tuple[int, int, pa.RecordBatch]] = []  # first position, time, rows
    count = size = 0
    for frame in frames:
        rows = marked_frame(frame, columns) if marking else frame.batch.select(columns)
        low, high = max(start - frame.position, 0), min(end - frame.position, rows.num_rows)
        row_bytes = max(_size(rows) // rows.num_rows, 1)
        while low < high:
            part = min(high - low, ROWS - count, max((BYTES - size) // row_bytes, 1))
            parts.append((frame.position + low, frame.time_us, rows.slice(low, part)))
            low, count, size = low + part, count + part, size + part * row_bytes
            if count >= ROWS or size >= BYTES:
                yield _chunk(parts)
                parts, count, size = [], 0, 0
    if parts:
        yield _chunk(parts)


def _size(rows: pa.RecordBatch) -> int:
    """Return bytes of a frame's rows, about: Arrow takes 50 us to count exactly, which is much for a frame of one
    row."""
    return int(rows.nbytes if rows.num_rows > 64 else rows.get_total_buffer_size())


def _chunk(parts: list[tuple[int, int, pa.RecordBatch]]) -> Chunk:
    firsts, times, batches = zip(*parts, strict=True)
    sizes = np.array([batch.num_rows for batch in batches])
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    positions = np.repeat(np.array(firsts, np.int64), sizes) + np.arange(sizes.sum()) - before
    return positions, joined(batches), np.repeat(np.array(times, np.int64), sizes)
