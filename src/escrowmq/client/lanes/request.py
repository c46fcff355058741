"""One request of a lane: its rows, the codec that makes a parcel or a batch of them, and the error for each waiter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
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
LaneRows = Sequence[Row]
FirstId = tuple[int, int]
Options = Callable[[], ExchangeOptions]
"""Returns the options with which a request is sent now."""


class Codec(Protocol):
    """Converts the rows of a lane to a parcel or a batch, and the answer to one value or EscrowError per row.

    ``parcel`` returns the rows of the parcel, the message id of the first of them that has none of its own (``NO_ID``:
    they are no messages), and a memo for ``receive``. ``encode`` returns the batch, and a memo for ``decode``.
    """

    def parcel(self, rows: LaneRows) -> tuple[LaneRows, FirstId, Any]: ...
    def receive(self, rows: LaneRows, first_id: FirstId, memo: Any, answer: Answer, resent: bool) -> list[Any]: ...
    def encode(self, rows: LaneRows) -> tuple[pa.RecordBatch, Any]: ...
    def decode(self, rows: LaneRows, memo: Any, answer: pa.RecordBatch, resent: bool) -> list[Any]: ...


class Attended(Protocol):
    """A lane's view of its broker, where that is one of several.

    ``away``: nothing should wait for it without need. ``quiet``: it has not answered for a while, so that rows that can
    go elsewhere should; it is quiet before it is away. ``suspect`` probes it after a failure or a late answer;
    ``refusal`` returns the error of rows that were not sent because it is away.
    """

    @property
    def away(self) -> bool: ...
    @property
    def quiet(self) -> bool: ...
    def suspect(self) -> None: ...
    def refusal(self) -> EscrowError: ...


@dataclass(slots=True, eq=False)
class Request:
    """A request: rows, with one entry of ``waiters`` per row, or the whole ``batches`` of some callers, one entry each.

    Few rows travel as a parcel, others and batches as one batch. That is decided when the request is first sent, and a
    retry sends the same.
    """

    rows: list[Row] | None
    waiters: list[Any]
    deadline: float
    size: int = 0
    """Bytes of the rows, about, or of ``batches`` as they travel."""
    batches: list[pa.RecordBatch] = field(default_factory=list)
    parcel: Parcel | None = None  # as it is sent; one of the two is made when it is first sent
    batch: pa.RecordBatch | None = None
    memo: Any = None
    resends: int = 0
    sent: int = 0  # times that it may have left this process
    session: int = 0  # under which it was sent last
    lost: EscrowError | None = None  # why it must be sent again
    settled: bool = False

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self.batches) if self.rows is None else len(self.rows)

    def take_back(self, moves: Callable[[Row | None], bool]) -> Request | None:
        """Remove and return, as a request, the rows that need not wait for this broker: those for which ``moves``
        returns true (whole batches: ``moves(None)``). None if there are none. Must not be called while the request is
        being sent."""
        if self.rows is None:
            return None if self.sent or not moves(None) else self
        moved = [moves(row) for row in self.rows]
        if all(moved):
            return self
        if not any(moved):
            return None
        rows = self._name_rows()
        parts: list[Request] = []
        for mask in (moved, [not one for one in moved]):
            part = Request(list(compress(rows, mask)), list(compress(self.waiters, mask)), self.deadline)
            if self.batch is not None:  # the rows keep their bytes and ids
                ids = self.memo
                if isinstance(ids, bytes):
                    ids = b"".join(compress((ids[at : at + 16] for at in range(0, len(ids), 16)), mask))
                part.memo, part.batch = ids, self.batch.filter(pa.array(mask))
            parts.append(part)
        taken, rest = parts
        if self.parcel is not None:  # its rows have their ids now, so that a parcel made anew has the same
            taken.parcel = replace(self.parcel, rows=taken.rows or (), memo=None)
        self.rows, self.waiters, self.parcel = rest.rows, rest.waiters, None
        self.batch, self.memo = rest.batch, rest.memo
        return taken

    def join(self, other: Request) -> None:
        """Append the batches of ``other``, a request that was made after this one. Neither may have been sent."""
        self.batches += other.batches
        self.waiters += other.waiters
        self.size += other.size

    @property
    def is_parcel(self) -> bool:
        few = self.rows is not None and len(self.rows) <= PARCEL_ROWS and self.size <= PARCEL_BYTES
        return self.parcel is not None or (few and self.batch is None)

    def pack(self, codec: Codec, kind: Exchange, options: ExchangeOptions) -> Parcel:
        """Return the request as a parcel. Each resend has the same rows under the same ids, and the same object under
        the same options."""
        assert self.rows is not None
        if self.parcel is None:
            rows, first_id, self.memo = codec.parcel(self.rows)
            self.parcel = Parcel(kind, rows, options, first_id)
        elif self.parcel.options != options:
            self.parcel = replace(self.parcel, options=options, memo=None)
        return self.parcel

    def receive(self, codec: Codec, answer: Answer) -> list[Any]:
        """Return the result of each waiter, a value or EscrowError, from the answer to the parcel."""
        if self.parcel is None or self.rows is None or len(answer) != len(self.parcel.rows):
            return copies(Unknown(Code.DISCONNECTED, "the answer does not match the request"), self)
        return codec.receive(self.rows, self.parcel.first_id, self.memo, answer, self.resends > 0)

    def encode(self, codec: Codec) -> pa.RecordBatch:
        """Return the rows or batches of the request as one batch, the same at each resend."""
        if self.batch is None:
            if self.rows is not None:
                self.batch, self.memo = codec.encode(self.rows)
            else:
                self.batch = self.batches[0] if len(self.batches) == 1 else pa.concat_batches(self.batches)
        return self.batch

    def decode(self, codec: Codec, answer: pa.RecordBatch) -> list[Any]:
        """Return one result per waiter: for a row its value or EscrowError, for a batch (its part of the answer,
        whether it was sent again)."""
        again = self.resends > 0
        if self.batch is None or answer.num_rows != self.batch.num_rows:
            return copies(Unknown(Code.DISCONNECTED, "the answer does not match the request"), self)
        if self.rows is not None:
            return codec.decode(self.rows, self.memo, answer, again)
        if len(self.batches) == 1:
            return [(answer, again)]
        sizes = [batch.num_rows for batch in self.batches]
        return [(answer.slice(end - size, size), again) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    @property
    def ids(self) -> bytes | None:
        """The message ids of the request's rows, 16 bytes each, one after the other; None if they have none yet."""
        if self.rows is None or isinstance(self.memo, bytes):
            return self.memo if self.rows is not None else None
        if self.parcel is None or self.parcel.first_id == NO_ID:
            return None
        return fill_ids([row[ID_FIELD] for row in self.rows], *self.parcel.first_id)

    def _name_rows(self) -> LaneRows:
        """Return the rows, each with the message id that it got when they were sent as a parcel."""
        assert self.rows is not None
        ids = self.ids if self.parcel is not None else None
        if ids is None:
            return self.rows
        return [
            (*row[:ID_FIELD], ids[at : at + 16], *row[ID_FIELD + 1 :])
            for row, at in zip(self.rows, range(0, len(ids), 16), strict=True)
        ]


def copies(problem: EscrowError, request: Request) -> list[Any]:
    """Return a copy of an error for each waiter of a request (an exception object must not be raised by two callers),
    an Unknown with the message id if the row has one, and with whether the request may have left."""
    retry_after = getattr(problem, "retry_after", 1.0)
    copies: list[Any] = [error(problem.code, problem.message, problem.hint, retry_after) for _ in request.waiters]
    ids = request.ids
    for row, copy in enumerate(copies):
        copy.__cause__ = problem.__cause__
        if isinstance(copy, Unknown):
            copy.left = request.sent > 0
            copy.message_id = None if ids is None else ids[16 * row : 16 * row + 16]
    return copies
