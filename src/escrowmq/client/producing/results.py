"""Results of whole batches: columns, with one typed result per row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq import schemas
from escrowmq.errors import DONE, Code, error, flags
from escrowmq.model import Receipt, TransactionId

T = TypeVar("T")
_DONE = np.frombuffer(flags(DONE), np.bool_)


class Results(ABC, Generic[T]):
    """The results of a batch, in the order given. Indexing gives the result of a row, or raises its error."""

    __slots__ = ()
    codes: npt.NDArray[np.uint8]

    @property
    @abstractmethod
    def _refused(self) -> npt.NDArray[np.bool_]: ...

    @abstractmethod
    def __getitem__(self, row: int) -> T: ...

    @property
    def ok(self) -> bool:
        """Return whether no row was refused."""
        return not self._refused.any()

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[T]:
        return (self[row] for row in range(len(self)))

    def check(self) -> Self:
        """Return these results if :attr:`ok`; raise the error of the first row that was refused."""
        if not self.ok:
            self[int(np.flatnonzero(self._refused)[0])]
        return self


@dataclass(slots=True, eq=False, repr=False)
class Receipts(Results[Receipt]):
    """The results of a batch of messages, in the order given.

    ``codes`` is a uint8 array (:class:`~escrowmq.errors.Code`); ``positions``, ``queues`` and ``offsets`` are integer
    arrays (-1: none); ``message_ids`` and ``transactions`` are Arrow arrays of 16-byte ids (``transactions`` null where
    there is none). Indexing gives the :class:`~escrowmq.model.Receipt` of a row, or raises its error.
    """

    _topics: pa.Array
    message_ids: pa.Array
    codes: npt.NDArray[np.uint8]
    positions: npt.NDArray[np.int64]
    queues: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    transactions: pa.Array

    @property
    def _refused(self) -> npt.NDArray[np.bool_]:
        return self.codes.astype(np.bool_)

    def __getitem__(self, row: int) -> Receipt:
        if code := int(self.codes[row]):
            raise error(Code(code))
        offset, raw = int(self.offsets[row]), self.transactions[row].as_py()
        return Receipt(
            self.message_ids[row].as_py(),
            self._topics[row].as_py(),
            int(self.queues[row]),
            int(self.positions[row]),
            offset if offset >= 0 else None,
            None if raw is None else TransactionId.from_bytes(raw),
        )

    def to_arrow(self) -> pa.RecordBatch:
        """Return the receipts as a record batch: topic, message_id, code, position, queue, offset, transaction."""
        names = ["topic", "message_id", "code", "position", "queue", "offset", "transaction"]
        numbers = map(pa.array, (self.codes, self.positions, self.queues, self.offsets))
        return pa.RecordBatch.from_arrays([self._topics, self.message_ids, *numbers, self.transactions], names)

    def __repr__(self) -> str:
        return f"<Receipts: {len(self)} messages, {np.count_nonzero(self._refused)} refused>"


@dataclass(slots=True, eq=False, repr=False)
class EndResults(Results[Code]):
    """The results of a batch of decisions: ``codes`` (uint8 array); indexing gives a Code, or raises its error.

    A row is refused if its transaction was ended otherwise; the same outcome as before is no refusal.
    """

    codes: npt.NDArray[np.uint8]

    @property
    def _refused(self) -> npt.NDArray[np.bool_]:
        return ~_DONE[self.codes]

    def __getitem__(self, row: int) -> Code:
        code = Code(int(self.codes[row]))
        if not _DONE[code]:
            raise error(code)
        return code

    def __repr__(self) -> str:
        return f"<EndResults: {len(self)} decisions, {np.count_nonzero(self._refused)} refused>"


def receipts(
    sent: pa.RecordBatch, rows: Sequence[npt.NDArray[np.int64]], answers: Sequence[pa.RecordBatch]
) -> Receipts:
    """Return the receipts of the batch ``sent``: ``answers`` are the PRODUCED answers to its parts, ``rows`` the row
    numbers of each part. Rows in no part are BODY_TOO_LARGE."""
    ids, topics = sent.column("message_id"), sent.column("topic")
    if len(rows) == 1 and len(rows[0]) == sent.num_rows:  # one part, which is all of it
        codes, positions, queues, offsets, transactions = answers[0].columns
        numbers = (codes.to_numpy(), positions.to_numpy(), queues.to_numpy(), offsets.to_numpy())
        return Receipts(topics, ids, *numbers, transactions)
    answer = pa.concat_batches(answers or [schemas.empty(schemas.PRODUCED)])
    at = np.full(sent.num_rows, -1, np.int64)
    at[np.concatenate([np.empty(0, np.int64), *rows])] = np.arange(answer.num_rows)
    answer = answer.take(pa.array(at, mask=at < 0))  # nulls where there is no answer
    codes, positions, queues, offsets = (
        pc.fill_null(answer.column(name), pa.scalar(missing, schemas.PRODUCED.field(name).type)).to_numpy()
        for name, missing in (("code", Code.BODY_TOO_LARGE), ("position", -1), ("queue", -1), ("offset", -1))
    )
    return Receipts(topics, ids, codes, positions, queues, offsets, answer.column("transaction"))
