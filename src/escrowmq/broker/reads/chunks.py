"""Merges rows of small frames in a position range of the log into larger batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from escrowmq.broker.reads.filters import joined
from escrowmq.broker.reads.marking import marked_frame
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.log.seam import Frame
from escrowmq.wire import ReadRequest

ROWS = 8192  # rows of one batch, at most
BYTES = 16 << 20  # bytes of one batch, about

Chunk = tuple[Int64s, pa.RecordBatch, Int64s]
"""Neighbouring rows of some kinds: their positions, columns and times."""


def range_of(request: ReadRequest, what: str, first: int, newest: int) -> tuple[int, int]:
    """Return the first ``what`` (offset or position) that a request reads, and the end, of those stored: ``first`` to
    before ``newest``. Start 0 without an end, like no start, means from the first. Raises RANGE_PURGED."""
    start, end = request.get("start"), request.get("end")
    if start is None or (start == 0 and end is None):
        start = first
    end = newest if end is None else min(end, newest)
    if start < first and start < end:
        raise purged(what, start, first)
    return start, end


def purged(what: str, start: int, first: int) -> EscrowError:
    """Return the error for a range that retention has partly removed (I41): a read never gives fewer rows instead."""
    return error(Code.RANGE_PURGED, f"{what} {start} has left the log; the first is {first}")


def kept(chunk: Chunk, mask: Bools) -> Chunk:
    """Return the rows of a chunk that a mask marks."""
    positions, rows, times = chunk
    return positions[mask], rows.filter(pa.array(mask)), times[mask]


def chunked(frames: Iterable[Frame], start: int, end: int, columns: list[str], marking: bool) -> Iterator[Chunk]:
    """Yield the rows ``start`` .. ``end``-1 of some frames, as chunks of up to ``ROWS`` rows and about ``BYTES``.
    ``marking``: the chunks have the columns of ``marked_frame``."""
    parts: list[tuple[int, int, pa.RecordBatch]] = []  # first position, time, rows
    count = size = 0
    for frame in frames:
        rows = marked_frame(frame, columns) if marking else frame.batch.select(columns)
        low, high = max(start - frame.position, 0), min(end - frame.position, rows.num_rows)
        # counting exactly takes Arrow 50 us, which is much for a frame of one row
        row_bytes = max(int(rows.nbytes if rows.num_rows > 64 else rows.get_total_buffer_size()) // rows.num_rows, 1)
        while low < high:
            part = min(high - low, ROWS - count, max((BYTES - size) // row_bytes, 1))
            parts.append((frame.position + low, frame.time_us, rows.slice(low, part)))
            low, count, size = low + part, count + part, size + part * row_bytes
            if count >= ROWS or size >= BYTES:
                yield _chunk(parts)
                parts, count, size = [], 0, 0
    if parts:
        yield _chunk(parts)


def _chunk(parts: list[tuple[int, int, pa.RecordBatch]]) -> Chunk:
    firsts, times, batches = zip(*parts, strict=True)
    sizes = [batch.num_rows for batch in batches]
    positions = np.concatenate([np.arange(first, first + size) for first, size in zip(firsts, sizes, strict=True)])
    return positions, joined(batches), np.repeat(np.array(times, np.int64), sizes)
