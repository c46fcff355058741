"""Damaged rows in what is read: marked with the place of the damage, null where their content is lost.

A read that asks for the column ``damaged`` gets them so. One that does not raises Corrupt(DAMAGED) when it comes to
one: an empty body must never pass for what somebody sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.broker.columns import batch_of
from escrowmq.ledger.columns.arrays import Bools
from escrowmq.log.report import FrameDamage, RowDamage
from escrowmq.log.seam import Frame
from escrowmq.wire import DAMAGED_COLUMN

LOST_COLUMN = "%lost"
"""A column of chunks beside ``damaged``: whether everything of the row is lost, or its body alone."""
_BODY = frozenset({"body"})


def marks_of(damaged: Mapping[int, RowDamage], rows: int) -> tuple[pa.Array, Bools]:
    """For each of ``rows`` rows its place if it is damaged (else null), and whether more than its body is lost."""
    texts: list[str | None] = [None] * rows
    lost = np.zeros(rows, np.bool_)
    for row, damage in damaged.items():
        texts[row], lost[row] = str(damage), not damage.body_only
    return pa.array(texts, pa.utf8()), lost


def marked_frame(frame: Frame, columns: list[str]) -> pa.RecordBatch:
    """Return some columns of a frame that may be damaged, then ``damaged`` and :data:`LOST_COLUMN`."""
    texts, lost = marks_of({} if frame.damage is None else row_damages(frame, frame.damage), frame.batch.num_rows)
    rows = frame.batch.select(columns)
    return rows.append_column(DAMAGED_COLUMN, texts).append_column(LOST_COLUMN, pa.array(lost))


def row_damages(frame: Frame, damage: FrameDamage) -> dict[int, RowDamage]:
    """Return the damaged rows of a frame, by their number in it."""
    bad = np.flatnonzero(damage.rows).tolist()
    return {row: RowDamage(damage.place, frame.position + row, damage.bodies_only) for row in bad}


def lost_rows(rows: pa.RecordBatch) -> Bools:
    """Return which rows of a chunk are lost but for their position and time; none if damaged rows were not asked
    for."""
    if LOST_COLUMN not in rows.schema.names:
        return np.zeros(rows.num_rows, np.bool_)
    return np.asarray(rows.column(LOST_COLUMN).to_numpy(zero_copy_only=False), np.bool_)


def shown(
    schema: pa.Schema,
    made: Mapping[str, pa.Array],
    rows: pa.RecordBatch,
    stored: frozenset[str],
    known: Mapping[str, pa.Array],
) -> pa.RecordBatch:
    """Return rows of a view: the columns that were ``made``, the others as they are in the chunk's ``rows``;
    damaged ones as in :func:`marked`, if the schema has that column."""
    if DAMAGED_COLUMN not in schema.names:
        return batch_of(schema, made, rows)
    own = pa.schema([field for field in schema if field.name != DAMAGED_COLUMN])
    marks = (rows.column(DAMAGED_COLUMN), lost_rows(rows))
    return marked(batch_of(own, made, rows), schema, marks, stored, known)


def marked(
    batch: pa.RecordBatch,
    schema: pa.Schema,
    marks: tuple[pa.Array, Bools],
    stored: frozenset[str],
    known: Mapping[str, pa.Array],
) -> pa.RecordBatch:
    """``batch`` as rows of ``schema``, which has nullable columns and ``damaged``: the columns of which ``stored`` says
    that they come from the damaged rows themselves are null there, or what is ``known`` from elsewhere."""
    texts, lost = marks
    gone = {True: pa.array(lost), False: texts.is_valid()}
    arrays = []
    for field in schema:
        if field.name == DAMAGED_COLUMN:
            arrays.append(texts)
            continue
        column = batch.column(field.name)
        if texts.null_count < len(texts) and field.name in stored | _BODY:
            column = pc.if_else(gone[field.name not in _BODY], pa.scalar(None, field.type), column)
            if field.name in known:
                column = pc.coalesce(column, known[field.name])
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
