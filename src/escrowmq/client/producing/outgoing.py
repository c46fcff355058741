"""Messages as OUTGOING batches: from rows or from a user's columns, cut to the limits of one request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq import schemas
from escrowmq.client.lanes.request import FirstId, LaneRows
from escrowmq.errors import Code, EscrowError, Misuse, Rejected, error
from escrowmq.message.columns import outgoing_batch
from escrowmq.message.ids import column_of, message_id_of, split_transaction_id, transactions
from escrowmq.message.limits import Limits, byte_lengths, has_null_texts
from escrowmq.message.row import ROW_OVERHEAD, Checker, MessageIds
from escrowmq.message.values import make_receipt, make_transaction_id
from escrowmq.model import Receipt, message_id

Part = tuple[npt.NDArray[np.int64], pa.RecordBatch]
"""Row numbers in the original batch, and those rows."""
OwnReceipts = list[Receipt | EscrowError]
_FIELDS = {field.name: field for field in schemas.OUTGOING}
_DEFAULTS = {"queue": -1, "delay_us": 0, "immunity_us": 0}


class OutgoingCodec:
    """Rows (:class:`~escrowmq.message.row.OutgoingRow`) to OUTGOING batches; PRODUCED answers to receipts."""

    def __init__(self) -> None:
        self.ids = MessageIds()

    def parcel(self, rows: LaneRows) -> tuple[LaneRows, FirstId, None]:
        return rows, self.ids.reserve(len(rows)), None

    def receive(self, rows: LaneRows, first_id: FirstId, memo: None, answer: Any, resent: bool) -> OwnReceipts:
        instance, made = first_id
        receipts: list[Any] = []
        for row, (code, position, queue, offset, raw) in zip(rows, answer, strict=True):
            if (identity := row[5]) is None:
                identity = message_id_of(instance, made)
                made += 1
            if code:
                receipts.append(_make_error(code, identity))
                continue
            transaction = None if raw is None else make_transaction_id(*split_transaction_id(raw))
            receipts.append(
                make_receipt(identity, row[0], queue, position, offset if offset >= 0 else None, transaction)
            )
        return receipts

    def encode(self, rows: Sequence[Any]) -> tuple[pa.RecordBatch, bytes]:
        ids = self.ids.complete([row[5] for row in rows])
        return outgoing_batch(rows, ids), ids

    def decode(self, rows: LaneRows, memo: Any, answer: pa.RecordBatch, resent: bool) -> OwnReceipts:
        ids: bytes = memo
        positions, queues, offsets = (answer.column(at).to_numpy().tolist() for at in (1, 2, 3))
        codes = answer.column(0).to_numpy()
        receipts: list[Any] = [
            make_receipt(ids[at : at + 16], row[0], queue, position, offset if offset >= 0 else None, transaction)
            for row, at, queue, position, offset, transaction in zip(
                rows, itertools.count(0, 16), queues, positions, offsets, transactions(answer.column(4)), strict=False
            )
        ]
        for at in np.flatnonzero(codes).tolist():
            receipts[at] = _make_error(int(codes[at]), ids[16 * at : 16 * at + 16])
        return receipts

    def columns(self, data: pa.RecordBatch) -> pa.RecordBatch:
        """Return a user's batch as OUTGOING: missing columns get their defaults, and null ids are made.

        ``message_id`` may be 16-byte binary, other binary or text (digested as :func:`escrowmq.model.message_id` does).
        Raises Rejected(BAD_BATCH) naming the column.
        """
        n, given = data.num_rows, set(data.schema.names)
        if (missing := {"topic", "body"} - given) or (unknown := given - _FIELDS.keys()):
            problem = f"column {sorted(missing)[0]!r} is missing" if missing else f"no column {sorted(unknown)[0]!r}"
            raise Rejected(Code.BAD_BATCH, problem, f"columns: {', '.join(schemas.OUTGOING.names)}")
        now, defaults = time.time_ns() // 1000, _default_columns(n)
        arrays = []
        for name, field in _FIELDS.items():
            if name in given:
                column, default = data.column(name), now if name == "born_us" else _DEFAULTS.get(name)
                arrays.append(self._id_column(column) if name == "message_id" else _cast(column, field, default))
            elif name == "message_id":
                arrays.append(column_of(self.ids.take(n)))
            elif name == "born_us":
                arrays.append(pa.array(np.full(n, now)))
            else:
                arrays.append(defaults[name])
        return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING)

    def _id_column(self, column: pa.Array) -> pa.Array:
        if column.type == schemas.ID and not column.null_count:
            return column
        given = [None if value is None else message_id(value) for value in column.to_pylist()]
        return column_of(self.ids.complete(given))


def _make_error(code: int, identity: bytes) -> EscrowError:
    problem = error(Code(code))
    problem.add_note(f"message id {identity.hex()}")
    return problem


@lru_cache(4)
def _default_columns(count: int) -> dict[str, pa.Array]:
    """Return the columns of ``count`` rows that have defaults; a caller's batches are mostly of one size."""
    return {
        name: pa.repeat(pa.scalar(_DEFAULTS.get(name), field.type), count)
        for name, field in _FIELDS.items()
        if name in _DEFAULTS or field.nullable
    }


def _cast(column: pa.Array, field: pa.Field, default: int | None) -> pa.Array:
    try:
        column = column if column.type == field.type else column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as problem:
        raise Rejected(Code.BAD_BATCH, f"column {field.name!r}: {column.type} is not {field.type}: {problem}") from None
    if column.null_count and default is not None:
        column = pc.fill_null(column, pa.scalar(default, field.type))
    if column.null_count and not field.nullable:
        raise Rejected(Code.BAD_BATCH, f"column {field.name!r} has nulls")
    if field.type == schemas.PROPERTIES and has_null_texts(column):
        raise Rejected(Code.BAD_BATCH, f"column {field.name!r} has null names or values")
    return column


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Convert a table to one batch. Raises Rejected(BATCH_TOO_LARGE) for a column of 2 GiB, which Arrow would split."""
    if any(column.nbytes >= 1 << 31 for column in table.columns):
        raise Rejected(Code.BATCH_TOO_LARGE, "a column of the table has 2 GiB or more")
    chunks = table.combine_chunks().to_batches()
    return chunks[0] if chunks else schemas.empty(table.schema)


def as_batch(data: Any, checker: Checker, codec: OutgoingCodec) -> pa.RecordBatch:
    """Convert messages, a record batch or a table to one OUTGOING batch. Raises Misuse or Rejected for invalid ones."""
    if isinstance(data, pa.Table):
        data = one_batch(data)
    if isinstance(data, pa.RecordBatch):
        return codec.columns(data)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise Misuse(Code.BAD_ARGUMENT, f"{type(data).__name__} is not messages, a record batch or a table")
    rows = checker.rows(data)
    return codec.encode(rows)[0] if rows else schemas.empty(schemas.OUTGOING)


def split(batch: pa.RecordBatch, limits: Limits) -> list[pa.RecordBatch]:
    """Cut a batch of messages into slices, in order, that are each within the limits of one request (rows and
    bytes)."""
    most = limits.max_batch_bytes * 3 // 4
    # Counting only what a slice holds takes Arrow 20 times as long as counting whole buffers.
    if batch.num_rows <= limits.max_batch_rows and (batch.get_total_buffer_size() <= most or batch.nbytes <= most):
        return [batch] if batch.num_rows else []
    sizes = byte_lengths(batch.column("body")) + ROW_OVERHEAD
    other = max(batch.nbytes - int(sizes.sum()), 0) // batch.num_rows
    ends = np.cumsum(sizes + other)
    slices, start = [], 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + most, side="right"))
        stop = min(max(stop, start + 1), start + limits.max_batch_rows, batch.num_rows)
        slices.append(batch.slice(start, stop - start))
        start = stop
    return slices


def cut(batch: pa.RecordBatch, rows: npt.NDArray[np.int64], limits: Limits) -> list[Part]:
    """Return some rows of a batch (``rows``: their numbers) in parts that are each within the limits of one request.
    Each part has its row numbers."""
    pieces = split(batch if len(rows) == batch.num_rows else batch.take(pa.array(rows)), limits)
    ends = np.cumsum([piece.num_rows for piece in pieces], dtype=np.int64)
    return list(zip(np.split(rows, ends[:-1]), pieces, strict=False))
