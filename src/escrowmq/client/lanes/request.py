"""One request of a lane: its rows, the codec that encodes them as a batch, and the error for each waiter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Unknown, error

Row = tuple[Any, ...]


class Codec(Protocol):
    """How a lane's rows become a batch, and an answer becomes one result per row."""

    def encode(self, rows: Sequence[Row]) -> tuple[pa.RecordBatch, Any]:
        """The batch, and whatever ``decode`` wants to know of it."""
        ...

    def decode(self, rows: Sequence[Row], memo: Any, answer: pa.RecordBatch, resent: bool) -> list[Any]:
        """One value or EscrowError per row."""
        ...


class Unawaited:
    """Stands where a waiter stands, for a row whose caller does not wait: ``told(row, result)`` is called once with the value or
    the EscrowError, on whatever thread has it. It must not block."""

    __slots__ = ("row", "told")

    def __init__(self, row: Row, told: Callable[[Row, Any], None]) -> None:
        self.row, self.told = row, told

    def give(self, result: Any) -> None:
        """Tell it the result."""
        self.told(self.row, result)


class Attended(Protocol):
    """What a lane knows of its broker where that is one of several."""

    @property
    def away(self) -> bool:
        """Whether nothing should wait for it without need."""
        ...

    def suspect(self) -> None:
        """It could not be reached, or owes an answer for long."""
        ...

    def refusal(self) -> EscrowError:
        """The error of what was not sent because it is away."""
        ...


class Request:
    """What travels together: rows, with one entry of ``waiters`` per row, or the whole ``batches`` of some callers, one entry each."""

    __slots__ = (
        "batch",
        "batches",
        "count",
        "deadline",
        "lost",
        "memo",
        "resends",
        "rows",
        "sent",
        "session",
        "settled",
        "size",
        "waiters",
    )

    def __init__(
        self, rows: list[Row] | None, waiters: list[Any], deadline: float, batch: pa.RecordBatch | None = None
    ) -> None:
        self.rows = rows
        self.waiters = waiters
        self.batches: list[pa.RecordBatch] = [] if batch is None else [batch]
        self.count = len(waiters) if batch is None else int(batch.num_rows)
        self.size = 0 if batch is None else int(batch.nbytes)
        """Bytes of ``batches``."""
        self.batch: pa.RecordBatch | None = None  # as it is sent; made when it is first sent
        self.memo: Any = None
        self.deadline = deadline
        self.resends = 0
        self.sent = 0  # times that it may have left this process
        self.session = 0  # under which it was sent last
        self.lost: EscrowError | None = None  # why it must be sent again
        self.settled = False

    def taken_back(self, moves: Callable[[Row | None], bool]) -> Request | None:
        """The part that need not wait for this broker: rows for which ``moves`` says so (of a whole batch: None), which leave this request;
        None if there is nothing. Not while it is being sent."""
        if self.rows is None:
            return None if self.sent or not moves(None) else self
        chosen = [moves(row) for row in self.rows]
        if all(chosen):
            return self
        if not any(chosen):
            return None
        rest = Request([], [], self.deadline)
        part = Request([], [], self.deadline)
        for row, waiter, moved in zip(self.rows, self.waiters, chosen, strict=True):
            (part if moved else rest).rows.append(row)  # type: ignore[union-attr]
            (part if moved else rest).waiters.append(waiter)
        if self.batch is not None:  # what is left keeps its bytes and ids
            part.memo, rest.memo = _ids_of(self.memo, chosen, True), _ids_of(self.memo, chosen, False)
            rest.batch = self.batch.filter(pa.array([not moved for moved in chosen]))
        self.rows, self.waiters, self.batch, self.memo = rest.rows, rest.waiters, rest.batch, rest.memo
        self.count, part.count = len(rest.waiters), len(part.waiters)
        return part

    def __len__(self) -> int:
        return self.count

    def join(self, other: Request) -> None:
        """Take in the batches of a request that was made after this one. Neither may have been sent."""
        self.batches += other.batches
        self.waiters += other.waiters
        self.count += other.count
        self.size += other.size

    def encode(self, codec: Codec) -> pa.RecordBatch:
        """What is sent, the same whenever it is sent again."""
        if self.batch is None:
            if self.rows is not None:
                self.batch, self.memo = codec.encode(self.rows)
            else:
                self.batch = self.batches[0] if len(self.batches) == 1 else pa.concat_batches(self.batches)
        return self.batch

    def decode(self, codec: Codec, answer: pa.RecordBatch) -> list[Any]:
        """One result per waiter: of a row its value or EscrowError, of a batch (its part of the answer, whether it was sent again)."""
        again = self.resends > 0
        if self.batch is None or answer.num_rows != self.batch.num_rows:
            return copies(Unknown(Code.DISCONNECTED, "the answer does not match the request"), self)
        if self.rows is not None:
            return codec.decode(self.rows, self.memo, answer, again)
        ends = accumulate(batch.num_rows for batch in self.batches)
        return [
            (answer.slice(end - batch.num_rows, batch.num_rows), again)
            for end, batch in zip(ends, self.batches, strict=True)
        ]


def _ids_of(ids: Any, chosen: list[bool], which: bool) -> Any:
    """The 16-byte ids of the rows that are ``chosen``, or not."""
    if not isinstance(ids, bytes):
        return ids
    return b"".join(ids[16 * row : 16 * row + 16] for row, moved in enumerate(chosen) if moved is which)


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
