"""One request of a lane: its rows, the codec that makes a parcel or a batch of them, and the error for each waiter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Unknown, error
from escrowmq.message.ids import fill_ids
from escrowmq.wire import Exchange, ExchangeOptions
from escrowmq.wire.parcels import PARCEL_BYTES, PARCEL_ROWS, Answer, Parcel, Row

NO_ID = (0, 0)
"""The first message id of a request whose rows have none: it is of no series."""
ID_FIELD = 5
"""Where an outgoing row has its message id."""


class Codec(Protocol):
    """How a lane's rows become a parcel or a batch, and an answer becomes one result per row."""

    def parcel(self, rows: Sequence[Row]) -> tuple[Sequence[Row], tuple[int, int], Any]:
        """Return the rows of a parcel, the message id of the first of them that has none of its own (``NO_ID``:
        they are no messages), and whatever ``receive`` wants to know of it."""
        ...

    def receive(
        self, rows: Sequence[Row], first_id: tuple[int, int], memo: Any, answer: Answer, resent: bool
    ) -> list[Any]:
        """Return one value or EscrowError per row, from the answer to their parcel, which has as many rows."""
        ...

    def encode(self, rows: Sequence[Row]) -> tuple[pa.RecordBatch, Any]:
        """Return the batch, and whatever ``decode`` wants to know of it."""
        ...

    def decode(self, rows: Sequence[Row], memo: Any, answer: pa.RecordBatch, resent: bool) -> list[Any]:
        """One value or EscrowError per row."""
        ...


class Unawaited:
    """Replaces a waiter for a row whose caller does not wait. ``on_result(row, result)`` is called once with the
    value or the EscrowError, on whatever thread has it. It must not block."""

    __slots__ = ("on_result", "row")

    def __init__(self, row: Row, on_result: Callable[[Row, Any], None]) -> None:
        self.row, self.on_result = row, on_result

    def give(self, result: Any) -> None:
        """Tell it the result."""
        self.on_result(self.row, result)


class Attended(Protocol):
    """A lane's view of its broker, where that is one of several."""

    @property
    def away(self) -> bool:
        """Whether nothing should wait for it without need."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether it has not answered for a while, so that what can go elsewhere should; so it is before it is away."""
        ...

    def suspect(self) -> None:
        """Ask whether the broker is reachable, after a failure or a late answer."""
        ...

    def refusal(self) -> EscrowError:
        """Return the error of what was not sent because it is away."""
        ...


class Request:
    """A request: rows, with one entry of ``waiters`` per row, or the whole ``batches`` of some callers, one
    entry each.

    Few rows travel as a parcel, others and batches as one batch. Which of the two is settled when a request is first
    sent, and what is sent again is the same.
    """

    __slots__ = (
        "batch",
        "batches",
        "count",
        "deadline",
        "lost",
        "memo",
        "parcel",
        "resends",
        "rows",
        "sent",
        "session",
        "settled",
        "size",
        "waiters",
    )

    def __init__(
        self,
        rows: list[Row] | None,
        waiters: list[Any],
        deadline: float,
        batch: pa.RecordBatch | None = None,
        size: int = 0,
    ) -> None:
        self.rows = rows
        self.waiters = waiters
        self.batches: list[pa.RecordBatch] = [] if batch is None else [batch]
        self.count = len(waiters) if batch is None else int(batch.num_rows)
        self.size = size if batch is None else int(pa.ipc.get_record_batch_size(batch))
        """Bytes of the rows, about, or of ``batches`` as they travel (cheaper than ``nbytes``)."""
        self.parcel: Parcel | None = None  # as it is sent; one of the two is made when it is first sent
        self.batch: pa.RecordBatch | None = None
        self.memo: Any = None
        self.deadline = deadline
        self.resends = 0
        self.sent = 0  # times that it may have left this process
        self.session = 0  # under which it was sent last
        self.lost: EscrowError | None = None  # why it must be sent again
        self.settled = False

    def taken_back(self, moves: Callable[[Row | None], bool]) -> Request | None:
        """Return the part that need not wait for this broker: rows for which ``moves`` says so (of a whole batch:
        None), which leave this request; None if there is nothing. Not while it is being sent."""
        if self.rows is None:
            return None if self.sent or not moves(None) else self
        chosen = [moves(row) for row in self.rows]
        if all(chosen):
            return self
        if not any(chosen):
            return None
        rest = Request([], [], self.deadline)
        part = Request([], [], self.deadline)
        for row, waiter, moved in zip(self._name_rows(), self.waiters, chosen, strict=True):
            (part if moved else rest).rows.append(row)  # type: ignore[union-attr]
            (part if moved else rest).waiters.append(waiter)
        if self.batch is not None:  # what is left keeps its bytes and ids
            part.memo, rest.memo = _ids_of(self.memo, chosen, True), _ids_of(self.memo, chosen, False)
            rest.batch = self.batch.filter(pa.array([not moved for moved in chosen]))
        if self.parcel is not None:  # its rows have their ids now, so a parcel that is made anew has the same
            part.parcel = Parcel(self.parcel.kind, part.rows or (), self.parcel.options, self.parcel.first_id)
        self.rows, self.waiters, self.batch, self.memo = rest.rows, rest.waiters, rest.batch, rest.memo
        self.parcel = None
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

    @property
    def is_parcel(self) -> bool:
        """Whether it travels as rows."""
        if self.parcel is not None:
            return True
        few = self.rows is not None and self.count <= PARCEL_ROWS and self.size <= PARCEL_BYTES
        return few and self.batch is None

    def pack(self, codec: Codec, kind: Exchange, options: ExchangeOptions) -> Parcel:
        """Pack the request. Each resend has the same rows under the same ids, and the same object under the same
        options."""
        assert self.rows is not None
        if self.parcel is None:
            rows, first_id, self.memo = codec.parcel(self.rows)
            self.parcel = Parcel(kind, rows, options, first_id)
        elif self.parcel.options != options:
            self.parcel = Parcel(kind, self.parcel.rows, options, self.parcel.first_id)
        return self.parcel

    def receive(self, codec: Codec, answer: Answer) -> list[Any]:
        """One result per waiter: its value or EscrowError."""
        parcel = self.parcel
        if parcel is None or self.rows is None or len(answer) != len(parcel.rows):
            return copies(Unknown(Code.DISCONNECTED, "the answer does not match the request"), self)
        return codec.receive(self.rows, parcel.first_id, self.memo, answer, self.resends > 0)

    def encode(self, codec: Codec) -> pa.RecordBatch:
        """Encode the request, the same at each resend."""
        if self.batch is None:
            if self.rows is not None:
                self.batch, self.memo = codec.encode(self.rows)
            else:
                self.batch = self.batches[0] if len(self.batches) == 1 else pa.concat_batches(self.batches)
        return self.batch

    def decode(self, codec: Codec, answer: pa.RecordBatch) -> list[Any]:
        """One result per waiter: of a row its value or EscrowError, of a batch (its part of the answer, whether it was
        sent again)."""
        again = self.resends > 0
        if self.batch is None or answer.num_rows != self.batch.num_rows:
            return copies(Unknown(Code.DISCONNECTED, "the answer does not match the request"), self)
        if self.rows is not None:
            return codec.decode(self.rows, self.memo, answer, again)
        if len(self.batches) == 1:
            return [(answer, again)]
        ends = accumulate(batch.num_rows for batch in self.batches)
        return [
            (answer.slice(end - batch.num_rows, batch.num_rows), again)
            for end, batch in zip(ends, self.batches, strict=True)
        ]

    @property
    def ids(self) -> bytes | None:
        """The message ids of its rows, one after the other, where they have some already."""
        if self.rows is None or isinstance(self.memo, bytes):
            return self.memo if self.rows is not None else None
        if self.parcel is None or self.parcel.first_id == NO_ID:
            return None
        return fill_ids([row[ID_FIELD] for row in self.rows], *self.parcel.first_id)

    def _name_rows(self) -> Sequence[Row]:
        """Return the rows, each with its message id where it was given one as part of a parcel."""
        assert self.rows is not None
        ids = self.ids if self.parcel is not None else None
        if ids is None:
            return self.rows
        return [
            (*row[:ID_FIELD], ids[at : at + 16], *row[ID_FIELD + 1 :])
            for row, at in zip(self.rows, range(0, len(ids), 16), strict=True)
        ]


def _ids_of(ids: Any, chosen: list[bool], which: bool) -> Any:
    """Return the 16-byte ids of the rows that are ``chosen``, or not."""
    if not isinstance(ids, bytes):
        return ids
    return b"".join(ids[16 * row : 16 * row + 16] for row, moved in enumerate(chosen) if moved is which)


def copies(problem: EscrowError, request: Request) -> list[Any]:
    """One error per waiter (an exception object must not be raised by two callers), with the message id if one was
    given."""
    retry_after = getattr(problem, "retry_after", 1.0)
    copies: list[Any] = [error(problem.code, problem.message, problem.hint, retry_after) for _ in request.waiters]
    ids = request.ids
    for row, copy in enumerate(copies):
        copy.__cause__ = problem.__cause__
        if isinstance(copy, Unknown) and ids is not None:
            copy.message_id = ids[16 * row : 16 * row + 16]
    return copies
