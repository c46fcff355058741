"""Commit and rollback decisions, encoded from rows or columns, and the answers to them."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq import schemas
from escrowmq.client.lanes.request import NO_ID, FirstId, LaneRows
from escrowmq.errors import DONE, FIRST_ANSWER, Code, EscrowError, Misuse, error
from escrowmq.message.ids import column_of
from escrowmq.model import Outcome

Codes = list[Code | EscrowError]
_CODES = {int(code): code for code in Code}
_DONE = bytes(DONE)
_FIRST_ANSWERS = bytes(
    FIRST_ANSWER.get(_CODES[number], number) if number in _CODES else number for number in range(256)
)


class EndingCodec:
    """Rows (16-byte transaction id, outcome) to ENDING batches; ENDED answers to codes or errors.

    ALREADY_… in the answer to a resend is the echo of its own first arrival, and becomes the first answer.
    """

    def parcel(self, rows: LaneRows) -> tuple[LaneRows, FirstId, None]:
        return rows, NO_ID, None

    def receive(self, rows: LaneRows, first_id: FirstId, memo: None, answer: Any, resent: bool) -> Codes:
        return _read_results(answer, resent)

    def encode(self, rows: LaneRows) -> tuple[pa.RecordBatch, None]:
        ids, outcomes = zip(*rows, strict=True)
        arrays = [column_of(b"".join(ids)), pa.array(np.frombuffer(bytes(outcomes), np.uint8))]
        return pa.RecordBatch.from_arrays(arrays, schema=schemas.ENDING), None

    def decode(self, rows: LaneRows, memo: Any, answer: pa.RecordBatch, resent: bool) -> Codes:
        return _read_results(answer.column(0).to_numpy().tobytes(), resent)


def _read_results(numbers: bytes, resent: bool) -> Codes:
    if resent:
        numbers = numbers.translate(_FIRST_ANSWERS)
    codes: list[Any] = [_CODES[number] for number in numbers]
    if numbers.translate(None, _DONE):  # the rest is no success
        return [code if code in DONE else error(code) for code in codes]
    return codes


def require(outcome: Outcome, code: Code) -> Code:
    """Return ``code``, the broker's answer to an end, if the transaction has this outcome, or the code is SENT. Raises
    CONFLICT otherwise."""
    if code not in STANDS_AS[outcome] and code is not Code.SENT:
        raise error(Code.CONFLICT, f"the transaction stands as {code.name}")
    return code


STANDS_AS = ((Code.NOTED,), (Code.COMMITTED, Code.ALREADY_COMMITTED), (Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK))
"""By :class:`~escrowmq.model.Outcome`: the codes of a transaction that has it."""


def first_time(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert the codes in the answer to a resend to those of a first answer: ALREADY_COMMITTED to COMMITTED,
    ALREADY_ROLLED_BACK to ROLLED_BACK."""
    return np.frombuffer(_FIRST_ANSWERS, np.uint8)[codes]


def _number(one: Any) -> int:
    """Return the number of an outcome. Raises TypeError for True, and for members of other enumerations, which are
    numbers only by accident."""
    if isinstance(one, bool) or (isinstance(one, Enum) and not isinstance(one, Outcome)):
        raise TypeError
    return operator.index(one)


def outcome_column(outcomes: Any, count: int) -> npt.NDArray[np.uint8]:
    """Convert outcomes (one for all, an array, or an iterable) to a uint8 array of length ``count``. Raises
    Misuse(BAD_ARGUMENT)."""
    if isinstance(outcomes, pa.Array | pa.ChunkedArray):
        outcomes = outcomes.to_numpy(zero_copy_only=False) if isinstance(outcomes, pa.Array) else outcomes.to_numpy()
    try:
        if isinstance(outcomes, int) and Outcome.UNKNOWN <= _number(outcomes) <= Outcome.ROLLBACK:
            return np.full(count, outcomes, np.uint8)
        column = np.asarray(outcomes if isinstance(outcomes, np.ndarray) else [_number(one) for one in outcomes])
    except (TypeError, ValueError, OverflowError):
        raise Misuse(Code.BAD_ARGUMENT, "outcomes are COMMIT, ROLLBACK or UNKNOWN") from None
    if len(column) != count:
        raise Misuse(Code.BAD_ARGUMENT, f"{count} transactions but {len(column)} outcomes")
    if count and (column.dtype.kind not in "iu" or column.min() < Outcome.UNKNOWN or column.max() > Outcome.ROLLBACK):
        raise Misuse(Code.BAD_ARGUMENT, "outcomes are COMMIT, ROLLBACK or UNKNOWN")
    return column.astype(np.uint8)
