"""Parcels: requests of a few messages, which stay rows from the caller to the broker's round.

A request of a few rows costs mostly what a batch costs once: its columns, its frames, its checks. So small requests
travel as they are made, a tuple for each row, and become columns where the log's frame is built. What a row means is
said by the schemas (:data:`escrowmq.schemas.OUTGOING` and its answers): a parcel is another form of the same request.

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
from escrowmq.message.ids import filled
from escrowmq.wire.exchanges import Exchange, ExchangeOptions

PARCEL_ROWS = 256
PARCEL_BYTES = 1 << 20
"""What a parcel may hold at most; a request of more is a batch."""

Row = tuple[Any, ...]
Answer = list[Row] | bytes
"""One tuple (code, position, queue, offset, transaction) or one code for each row."""
Done = Callable[[Answer | EscrowError], None]
"""Takes the answer, or why there is none. Called once, on any thread; it neither blocks nor raises."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One request of a few rows. It never changes, so that what is sent again is the same."""

    kind: Exchange
    rows: Sequence[Row]
    options: ExchangeOptions
    first_id: tuple[int, int] = (0, 0)
    """SEND and PREPARE: the instance and the sequence of the message id of the first row that has none of its own;
    those after it count on."""
    memo: Any = field(default=None, repr=False)
    """What a carrier keeps of it, such as its encoded bytes."""


def batch_of(parcel: Parcel) -> pa.RecordBatch:
    """Convert the request to a batch of schema ``REQUEST[kind]``; the rows must be sound."""
    return merged_batch(parcel.kind, [(parcel.rows, parcel.first_id)])


def merged_batch(kind: Exchange, parts: Sequence[tuple[Sequence[Row], tuple[int, int]]]) -> pa.RecordBatch:
    """Return the rows of several parcels of one kind, each with its ``first_id``, as one batch of schema
    ``REQUEST[kind]``."""
    all_rows = parts[0][0] if len(parts) == 1 else [row for rows, _ in parts for row in rows]
    if kind in (Exchange.SEND, Exchange.PREPARE):
        return outgoing_batch(all_rows, b"".join(filled([row[5] for row in rows], *first) for rows, first in parts))
    schema = schemas.ENDING if kind is Exchange.END else schemas.SETTLING
    columns = zip(*all_rows, strict=True)
    arrays = [pa.array(column, type_) for column, type_ in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def answer_of(kind: Exchange, answer: pa.RecordBatch) -> Answer:
    """Return a batch of schema ``ANSWER[kind]`` as the answer to a parcel."""
    if kind in (Exchange.SEND, Exchange.PREPARE):
        return list(zip(*(column.to_pylist() for column in answer.columns), strict=True))
    return bytes(answer.column(0).to_numpy())


class ParcelsByExchange:
    """Gives a link ``parcel`` by way of its ``exchange``: for carriers of batches alone."""

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
