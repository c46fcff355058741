"""Decisions on their way out: single ones as rows of a lane, or whole columns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.producing.outgoing import row_error
from escrowmq.errors import DONE, FIRST_ANSWER, Code, EscrowError, Misuse
from escrowmq.model import Outcome, TransactionId

_CODES = {int(code): code for code in Code}


class EndingCodec:
    """Rows (16-byte transaction id, outcome) to ENDING batches; ENDED answers to codes.

    An ALREADY_… in answer to a parcel that was sent again is the echo of its own first arrival, and is told as the first
    answer would have been.
    """

    def encode(self, rows: Sequence[tuple[Any, ...]]) -> tuple[pa.RecordBatch, None]:
        """The batch."""
        ids, outcomes = zip(*rows, strict=True)
        arrays = [pa.array(ids, schemas.ID), pa.array(outcomes, pa.uint8())]
        return pa.RecordBatch.from_arrays(arrays, schema=schemas.ENDING), None

    def decode(
        self, rows: Sequence[tuple[Any, ...]], memo: Any, answer: pa.RecordBatch, resent: bool
    ) -> list[Code | EscrowError]:
        """A code or an error a row."""
        codes = [_CODES[code] for code in answer.column(0).to_numpy().tolist()]
        if resent:
            codes = [FIRST_ANSWER.get(code, code) for code in codes]
        if DONE.issuperset(codes):
            return list(codes)
        return [code if code in DONE else row_error(code) for code in codes]


def first_time(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes of a batch that was sent again, told as the first answer would have been."""
    told = codes.copy()
    for echo, code in FIRST_ANSWER.items():
        told[codes == echo] = code
    return told


def id_column(ids: Any) -> pa.Array:
    """Transaction ids as one Arrow column of 16 bytes, nulls kept.

    From an Arrow array, a NumPy array (dtype TRANSACTION_ID_DTYPE or ``S16``-like records), or an iterable of
    TransactionId, their printed form, 16 bytes or None. Raises Misuse(BAD_ARGUMENT) for anything else.
    """
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    if isinstance(ids, pa.Array) and ids.type == schemas.ID:
        return ids
    if isinstance(ids, pa.Array):
        ids = ids.to_pylist()
    if isinstance(ids, np.ndarray) and ids.dtype.itemsize == 16 and ids.dtype.fields is not None:
        raw = np.ascontiguousarray(ids.astype(schemas.TRANSACTION_ID_DTYPE))
        return pa.FixedSizeBinaryArray.from_buffers(schemas.ID, len(raw), [None, pa.py_buffer(raw.tobytes())])
    if isinstance(ids, str | bytes | TransactionId) or not isinstance(ids, Iterable):
        raise Misuse(Code.BAD_ARGUMENT, f"{type(ids).__name__} is not a column of transaction ids")
    return pa.array([None if one is None else id_bytes(one) for one in ids], schemas.ID)


def id_bytes(identity: TransactionId | str | bytes) -> bytes:
    """The 16 bytes of a transaction id in any of its forms; Misuse(BAD_ARGUMENT) otherwise."""
    if isinstance(identity, TransactionId):
        return bytes(identity)
    if isinstance(identity, str):
        return bytes(TransactionId.parse(identity))
    if isinstance(identity, bytes):
        return bytes(TransactionId.from_bytes(identity))
    raise Misuse(Code.BAD_ARGUMENT, f"{type(identity).__name__} is not a transaction id")


def shards(ids: pa.Array) -> npt.NDArray[np.uint32]:
    """The shard of each id of a column without nulls."""
    raw = np.frombuffer(ids.buffers()[1], schemas.TRANSACTION_ID_DTYPE)[ids.offset : ids.offset + len(ids)]
    return raw["shard"].astype(np.uint32)


def outcome_column(outcomes: Any, count: int) -> npt.NDArray[np.uint8]:
    """Outcomes as a uint8 array of ``count``: from one for all, an array, or an iterable. Misuse(BAD_ARGUMENT) otherwise."""
    if isinstance(outcomes, int):
        outcomes = np.full(count, outcomes, np.uint8)
    elif isinstance(outcomes, pa.Array | pa.ChunkedArray):
        outcomes = outcomes.to_numpy(zero_copy_only=False) if isinstance(outcomes, pa.Array) else outcomes.to_numpy()
    try:
        column = np.asarray(outcomes if isinstance(outcomes, np.ndarray) else [operator.index(one) for one in outcomes])
    except (TypeError, ValueError):
        raise Misuse(Code.BAD_ARGUMENT, "outcomes are COMMIT, ROLLBACK or UNKNOWN") from None
    if len(column) != count:
        raise Misuse(Code.BAD_ARGUMENT, f"{count} transactions but {len(column)} outcomes")
    if count and (column.dtype.kind not in "iu" or column.min() < Outcome.UNKNOWN or column.max() > Outcome.ROLLBACK):
        raise Misuse(Code.BAD_ARGUMENT, "outcomes are COMMIT, ROLLBACK or UNKNOWN")
    return column.astype(np.uint8)
