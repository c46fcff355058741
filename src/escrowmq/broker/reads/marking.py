"""Damaged rows in reads: marked with the place of the damage, null where their content is lost.

That is for reads with the column ``damaged``. Any other read raises Corrupt(DAMAGED) at a damaged row: an empty body
must never pass for what a producer sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.columns import batch_of
from escrowmq.ledger.columns.arrays import Bools
from escrowmq.log.report import RowDamage
from escrowmq.log.seam import Frame
from escrowmq.wire import DAMAGED_COLUMN

LOST_COLUMN = "%lost"  # a column of chunks beside `damaged`: whether all of the row is lost, or its body alone


def marks_of(damaged: Mapping[int, RowDamage], rows: int) -> tuple[pa.Array, Bools]:
    """Return for each of ``rows`` rows its place if it is damaged (else null), and whether more than its body is
    lost."""
    texts: list[str | None] = [None] * rows
    lost = np.zeros(rows, np.bool_)
    for row, damage in damaged.items():
        texts[row], lost[row] = str(damage), not damage.body_only
    return pa.array(texts, pa.utf8()), lost


def marked_frame(frame: Frame, columns: list[str]) -> pa.RecordBatch:
    """Return some columns of a frame that may be damaged, then ``damaged`` and :data:`LOST_COLUMN`."""
    damaged: dict[int, RowDamage] = {}
    if (damage := frame.damage) is not None:
        for row in np.flatnonzero(damage.rows).tolist():
            damaged[row] = RowDamage(damage.place, frame.position + row, damage.bodies_only)
    texts, lost = marks_of(damaged, frame.batch.num_rows)
    rows = frame.batch.select(columns)
    return rows.append_column(DAMAGED_COLUMN, texts).append_column(LOST_COLUMN, pa.array(lost))


def lost_rows(rows: pa.RecordBatch) -> Bools:
    """Return which rows of a chunk are lost but for their position and time; none if the read rejects damaged rows."""
    if LOST_COLUMN not in rows.schema.names:
        return np.zeros(rows.num_rows, np.bool_)
    return np.asarray(rows.column(LOST_COLUMN).to_numpy(zero_copy_only=False), np.bool_)


Columns = Mapping[str, pa.Array]


def shown(schema: pa.Schema, made: Columns, rows: pa.RecordBatch, stored: frozenset[str]) -> pa.RecordBatch:
    """Return rows of a view: the columns that were ``made``, the others as they are in the chunk's ``rows``;
    damaged ones as in :func:`marked`, if the schema has that column."""
    if DAMAGED_COLUMN not in schema.names:
        return batch_of(schema, made, rows)
    own = pa.schema([field for field in schema if field.name != DAMAGED_COLUMN])
    marks = (rows.column(DAMAGED_COLUMN), lost_rows(rows))
    return marked(batch_of(own, made, rows), schema, marks, stored, {})


def marked(
    batch: pa.RecordBatch, schema: pa.Schema, marks: tuple[pa.Array, Bools], stored: frozenset[str], known: Columns
) -> pa.RecordBatch:
    """Return ``batch`` as rows of ``schema``, which has nullable columns and ``damaged``: in damaged rows the columns
    in ``stored`` (and the body) are null, or what is ``known`` from elsewhere."""
    texts, lost = marks
    made = {DAMAGED_COLUMN: texts}
    if texts.null_count < len(texts):
        for name in set(batch.schema.names) & (stored | {"body"}):
            gone = texts.is_valid() if name == "body" else pa.array(lost)
            column = pc.if_else(gone, pa.scalar(None, schema.field(name).type), batch.column(name))
            made[name] = pc.coalesce(column, known[name]) if name in known else column
    return batch_of(schema, made, batch)
