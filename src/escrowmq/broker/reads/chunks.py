"""Scans the log by position: the rows of some kinds in a range, small frames joined to chunks of a fair size.

A range that has partly left with retention raises RANGE_PURGED (I41); "from 0 on" without an end, like no start at all,
means from the first that is stored. Where no end is given, reading stops at what was durable when it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from escrowmq.broker.reads.filters import joined
from escrowmq.broker.reads.readable import Readable
from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.log.seam import Frame
from escrowmq.schemas import Kind
from escrowmq.wire import ReadRequest

ROWS = 8192
"""Rows of one batch, at most."""
BYTES = 16 << 20
"""Bytes of one batch, about."""

Chunk = tuple[Int64s, pa.RecordBatch, Int64s]
"""Neighbouring rows of some kinds: their positions, columns and times."""


def kept(chunk: Chunk, mask: Bools) -> Chunk:
    """The rows of a chunk that a mask marks."""
    positions, rows, times = chunk
    return positions[mask], rows.filter(pa.array(mask)), times[mask]


def scan(engine: Readable, kinds: Sequence[Kind], columns: list[str], request: ReadRequest) -> Iterator[Chunk]:
    """Rows of some kinds by position, from ``start`` to before ``end`` of a read request."""
    start, end = request.get("start"), request.get("end")
    first, durable = engine.log.first_position, engine.look(lambda: engine.log.next_position).result()
    if start is None or (start == 0 and end is None):
        start = first
    if start < first and (end is None or start < end):
        raise error(Code.RANGE_PURGED, f"position {start} has left the log; the first is {first}")
    end = durable if end is None else min(end, durable)
    frames = engine.log.frames_at(start, kinds, end) if start < end else iter(())
    return _of_frames(frames, start, end, columns)


def _of_frames(frames: Iterator[Frame], start: int, end: int, columns: list[str]) -> Iterator[Chunk]:
    """The rows ``start`` .. ``end``-1 of some frames, as chunks of up to ``ROWS`` rows and about ``BYTES``."""
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
                yield _chunk(parts)
                parts, count, size = [], 0, 0
    if parts:
        yield _chunk(parts)


def _size(rows: pa.RecordBatch) -> int:
    """Bytes of a frame's rows, about: Arrow takes 50 us to count exactly, which is much for a frame of one row."""
    return int(rows.nbytes if rows.num_rows > 64 else rows.get_total_buffer_size())


def _chunk(parts: list[tuple[int, int, pa.RecordBatch]]) -> Chunk:
    firsts, times, batches = zip(*parts, strict=True)
    sizes = np.array([batch.num_rows for batch in batches])
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    positions = np.repeat(np.array(firsts, np.int64), sizes) + np.arange(sizes.sum()) - before
    return positions, joined(batches), np.repeat(np.array(times, np.int64), sizes)
