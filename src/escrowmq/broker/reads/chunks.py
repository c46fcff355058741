"""Rows of a range of the log, in larger batches than its frames, and with damaged rows marked.

A read with the column ``damaged`` gets damaged rows with the place of the damage, and null for lost content. Any other
read raises Corrupt(DAMAGED) at a damaged row: an empty body must never pass for what a producer sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.columns import batch_of
from escrowmq.broker.reads.filters import joined
from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.log.report import RowDamage
from escrowmq.log.seam import Frame
from escrowmq.wire import DAMAGED_COLUMN, ReadRequest

ROWS = 8192  # rows of one batch, at most
BYTES = 16 << 20  # bytes of one batch, about

Chunk = tuple[Int64s, pa.RecordBatch, Int64s]  # positions, columns and times of neighbouring rows of some kinds


def range_of(request: ReadRequest, what: str, first: int, newest: int) -> tuple[int, int]:
    """Return the range (first, end) of offsets or positions (``what``) that a request reads, of those stored: ``first``
    to before ``newest``. Start 0 without an end, like no start, means from the first. Raises Rejected(RANGE_PURGED) if
    part of it was removed."""
    start, end = request.get("start"), request.get("end")
    if start is None or (start == 0 and end is None):
        start = first
    end = newest if end is None else min(end, newest)
    if start < first and start < end:
        raise purged(what, start, first)
    return start, end


def purged(what: str, start: int, first: int) -> EscrowError:
    """Return the error for a range that retention has partly removed (I41): a read never gives fewer rows instead.
    ``what``: offset or position."""
    return error(Code.RANGE_PURGED, f"{what} {start} has left the log; the first is {first}")


def kept(chunk: Chunk, mask: Bools) -> Chunk:
    """Return a chunk with only the rows that the mask selects."""
    positions, rows, times = chunk
    return positions[mask], rows.filter(pa.array(mask)), times[mask]


def chunked(frames: Iterable[Frame], start: int, end: int, columns: list[str], marking: bool) -> Iterator[Chunk]:
    """Yield the rows at positions ``start`` .. ``end``-1 of some frames, as chunks of up to ``ROWS`` rows and about
    ``BYTES``. ``marking``: the chunks have the columns of ``marked_frame``."""
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


# Damaged rows

LOST_COLUMN = "%lost"  # a column of chunks beside `damaged`: whether all of the row is lost, or its body alone


def marks_of(damaged: Mapping[int, RowDamage], rows: int) -> tuple[pa.Array, Bools]:
    """Return for each of ``rows`` rows the place of its damage (null if sound), and a mask of those that have lost more
    than their bodies. ``damaged``: by row."""
    texts: list[str | None] = [None] * rows
    lost = np.zeros(rows, np.bool_)
    for row, damage in damaged.items():
        texts[row], lost[row] = str(damage), not damage.body_only
    return pa.array(texts, pa.utf8()), lost


def marked_frame(frame: Frame, columns: list[str]) -> pa.RecordBatch:
    """Return some columns of a frame, then ``damaged`` (text: the place of the damage, null for a sound row) and
    :data:`LOST_COLUMN` (whether more than the row's body is lost)."""
    damaged: dict[int, RowDamage] = {}
    if (damage := frame.damage) is not None:
        for row in np.flatnonzero(damage.rows).tolist():
            damaged[row] = RowDamage(damage.place, frame.position + row, damage.bodies_only)
    texts, lost = marks_of(damaged, frame.batch.num_rows)
    rows = frame.batch.select(columns)
    return rows.append_column(DAMAGED_COLUMN, texts).append_column(LOST_COLUMN, pa.array(lost))


def lost_rows(rows: pa.RecordBatch) -> Bools:
    """Return a mask of the rows of a chunk that are lost but for their position and time; all False if the read rejects
    damaged rows."""
    if LOST_COLUMN not in rows.schema.names:
        return np.zeros(rows.num_rows, np.bool_)
    return np.asarray(rows.column(LOST_COLUMN).to_numpy(zero_copy_only=False), np.bool_)


Columns = Mapping[str, pa.Array]


def shown(schema: pa.Schema, made: Columns, rows: pa.RecordBatch, stored: frozenset[str]) -> pa.RecordBatch:
    """Return rows of a view: each column from ``made`` if it is there, else from the chunk's ``rows``. If ``schema``
    has the column ``damaged``, damaged rows have null in the columns ``stored``, see :func:`marked`."""
    if DAMAGED_COLUMN not in schema.names:
        return batch_of(schema, made, rows)
    own = pa.schema([field for field in schema if field.name != DAMAGED_COLUMN])
    marks = (rows.column(DAMAGED_COLUMN), lost_rows(rows))
    return marked(batch_of(own, made, rows), schema, marks, stored, {})


def marked(
    batch: pa.RecordBatch, schema: pa.Schema, marks: tuple[pa.Array, Bools], stored: frozenset[str], known: Columns
) -> pa.RecordBatch:
    """Return ``batch`` as rows of ``schema``, which has nullable columns and ``damaged``. In rows that are damaged
    (``marks``, see :func:`marks_of`) lost values of the columns in ``stored`` and of the body are null, or what is
    ``known`` from elsewhere."""
    texts, lost = marks
    made = {DAMAGED_COLUMN: texts}
    if texts.null_count < len(texts):
        for name in set(batch.schema.names) & (stored | {"body"}):
            gone = texts.is_valid() if name == "body" else pa.array(lost)
            column = pc.if_else(gone, pa.scalar(None, schema.field(name).type), batch.column(name))
            made[name] = pc.coalesce(column, known[name]) if name in known else column
    return batch_of(schema, made, batch)
