"""Parcels: requests of a few messages, which stay rows from the caller to the broker's round.

The cost of a small request is mostly the fixed cost of a batch: its columns, its frames, its checks. So small requests
are sent as a tuple per row, and become columns when the log's frame is built. The schemas define the rows
(:data:`escrowmq.schemas.OUTGOING` and its answers): a parcel is another form of the same request.

=============  ==========================================================  ======================================
kind           a row of the request                                        the answer, row for row
=============  ==========================================================  ======================================
SEND, PREPARE  the fields of :class:`~escrowmq.message.row.OutgoingRow`    tuples with the columns of ``PRODUCED``
END            transaction (16 bytes), outcome (``model.Outcome``)         bytes, a code for each row
SETTLE         the columns of ``SETTLING``                                 bytes, a code for each row
=============  ==========================================================  ======================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from escrowmq import schemas
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.message.columns import outgoing_batch
from escrowmq.message.ids import fill_ids
from escrowmq.wire.exchanges import Exchange, ExchangeOptions

PARCEL_ROWS = 256
PARCEL_BYTES = 1 << 20
"""Limits of a parcel; larger requests are batches."""

Row = tuple[Any, ...]
Answer = list[Row] | bytes
"""One tuple (code, position, queue, offset, transaction) or one code for each row."""
Done = Callable[[Answer | EscrowError], None]
"""Callback for the answer or the error. Called once, on any thread; it must not block or raise."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One request of a few rows. It is immutable, so that a retry sends the same."""

    kind: Exchange
    rows: Sequence[Row]
    options: ExchangeOptions
    first_id: tuple[int, int] = (0, 0)
    """SEND and PREPARE: instance and sequence of the first message id to assign; later rows without an id count on."""
    memo: Any = field(default=None, repr=False)
    """Cache of the transport, such as the encoded bytes."""


def batch_of(parcel: Parcel) -> pa.RecordBatch:
    """Return the request as a batch of schema ``REQUEST[kind]``; the rows must be valid."""
    return merged_batch(parcel.kind, [(parcel.rows, parcel.first_id)])


def merged_batch(kind: Exchange, parts: Sequence[tuple[Sequence[Row], tuple[int, int]]]) -> pa.RecordBatch:
    """Return the rows of parcels of one kind, each with its ``first_id``, as a batch of schema ``REQUEST[kind]``."""
    all_rows = parts[0][0] if len(parts) == 1 else [row for rows, _ in parts for row in rows]
    if kind in (Exchange.SEND, Exchange.PREPARE):
        return outgoing_batch(all_rows, b"".join(fill_ids([row[5] for row in rows], *first) for rows, first in parts))
    schema = schemas.ENDING if kind is Exchange.END else schemas.SETTLING
    columns = zip(*all_rows, strict=True)
    arrays = [pa.array(column, type_) for column, type_ in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def answer_of(kind: Exchange, answer: pa.RecordBatch) -> Answer:
    """Convert a batch of schema ``ANSWER[kind]`` to the answer of a parcel."""
    if kind in (Exchange.SEND, Exchange.PREPARE):
        return list(zip(*(column.to_pylist() for column in answer.columns), strict=True))
    return bytes(answer.column(0).to_numpy())


class ParcelsByExchange:
    """Implements ``parcel`` of a link by its ``exchange``, for transports that only carry batches."""

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """See :meth:`escrowmq.wire.Link.parcel`."""
        exchange: Callable[..., Future[pa.RecordBatch]] = self.exchange  # type: ignore[attr-defined]  # of the link
        exchange(parcel.kind, batch_of(parcel), parcel.options).add_done_callback(
            lambda answered: done(_result(parcel, answered))
        )


def _result(parcel: Parcel, answered: Future[pa.RecordBatch]) -> Answer | EscrowError:
    if answered.cancelled():
        return Unknown(Code.CLOSED)
    problem = answered.exception()
    if problem is None:
        return answer_of(parcel.kind, answered.result())
    return problem if isinstance(problem, EscrowError) else Unknown(Code.CLOSED, f"the link failed: {problem!r}")
