"""One request of a lane: its rows, the codec that encodes them as a batch, and the error for each waiter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.errors import EscrowError, Unknown, error

Row = tuple[Any, ...]


class Codec(Protocol):
    """How a lane's rows become a batch, and an answer becomes one result per row."""

    def encode(self, rows: Sequence[Row]) -> tuple[pa.RecordBatch, Any]:
        """The batch, and whatever ``decode`` wants to know of it."""
        ...

    def decode(self, rows: Sequence[Row], memo: Any, answer: pa.RecordBatch, resent: bool) -> list[Any]:
        """One value or EscrowError per row."""
        ...


class Request:
    """Rows that travel together. ``waiters`` has one entry per row, or a single one when ``rows`` is None (a whole batch)."""

    __slots__ = ("batch", "deadline", "lost", "memo", "resends", "rows", "session", "settled", "waiters")

    def __init__(
        self, rows: list[Row] | None, waiters: list[Any], deadline: float, batch: pa.RecordBatch | None = None
    ) -> None:
        self.rows = rows
        self.waiters = waiters
        self.batch = batch
        self.memo: Any = None
        self.deadline = deadline
        self.resends = 0
        self.session = 0  # under which it was sent last
        self.lost: EscrowError | None = None  # why it must be sent again
        self.settled = False

    def __len__(self) -> int:
        return len(self.waiters) if self.rows is not None or self.batch is None else int(self.batch.num_rows)


def copies(problem: EscrowError, request: Request) -> list[Any]:
    """One error per waiter (an exception object must not be raised by two callers), with the message id if one was given."""
    retry_after = getattr(problem, "retry_after", 1.0)
    copies: list[Any] = [error(problem.code, problem.message, problem.hint, retry_after) for _ in request.waiters]
    ids = request.memo
    for row, copy in enumerate(copies):
        copy.__cause__ = problem.__cause__
        if isinstance(copy, Unknown) and isinstance(ids, bytes) and request.rows is not None:
            copy.message_id = ids[16 * row : 16 * row + 16]
    return copies
