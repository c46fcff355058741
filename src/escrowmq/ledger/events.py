"""Events that ``decide`` returns for the log: built from columns or rows, and decoded again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.message.columns import optional
from escrowmq.message.ids import column_of
from escrowmq.schemas import ID, STORED, Kind


class Few:
    """A few rows of schema ``STORED[kind]`` as sequences, in its order; message ids as concatenated bytes."""

    __slots__ = ("columns", "kind", "num_rows")

    def __init__(self, kind: Kind, columns: Sequence[Any]) -> None:
        self.kind = kind
        self.columns = columns
        self.num_rows = len(columns[0])

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows as a batch. Raises ValueError, OverflowError or ArrowException if a value does not fit."""
        arrays = [_array(column, *types) for column, types in zip(self.columns, _COLUMNS[self.kind], strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=STORED[self.kind])


@dataclass(frozen=True, slots=True)
class Event:
    """One future frame: rows of schema ``STORED[kind]``. The log gives it position and time on append."""

    kind: Kind
    content: pa.RecordBatch | Few
    rows: Any = None  # of an event decided as rows: what applying it needs (see ``Ledger.decide_rows``)

    @property
    def batch(self) -> pa.RecordBatch:
        """The content as a batch."""
        return self.content.batch if isinstance(self.content, Few) else self.content

    @property
    def count(self) -> int:
        """The number of its rows."""
        return int(self.content.num_rows)


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows answered with the receipt of an earlier message of their topic and id, and its position (arrays of one
    length). ``messages/contents.py`` compares the contents."""

    rows: Int64s
    positions: Int64s


@dataclass(frozen=True, slots=True)
class Decision:
    """Events to append and apply *in this order*, and the answer to give once they are durable.

    Rows with positions of their own frame (a new transaction's id, a lease's id) assume that the events are appended
    next, the first at the ledger's ``next_position``.
    """

    events: tuple[Event, ...] = ()
    answer: Any = None
    repeats: Repeats | None = None
    """Of SEND and PREPARE: to be compared with the log after the events are appended, before the answer is given."""


# The types of each kind's columns, and their NumPy types if they are numbers; cached, because Arrow is slow.
_COLUMNS = {
    kind: [(type_, type_.to_pandas_dtype() if pa.types.is_integer(type_) else None) for type_ in schema.types]
    for kind, schema in STORED.items()
}
_TYPECODES = {np.int32: "i", np.int64: "q", np.uint32: "I", np.uint8: "B"}


def event_of(kind: Kind, *columns: Sequence[Any] | np.ndarray[Any, Any]) -> Event:
    """Return an event with these columns (sequences or arrays of one length, in the order of the schema)."""
    arrays = [_array(column, *types) for column, types in zip(columns, _COLUMNS[kind], strict=True)]
    return Event(kind, pa.RecordBatch.from_arrays(arrays, schema=STORED[kind]))


def event_of_rows(kind: Kind, rows: Sequence[Sequence[Any]], *, keep: bool = False) -> Event:
    """Return an event with these rows (at least one). ``keep``: the event also has the rows themselves, so that
    applying it need not decode them."""
    columns = tuple(zip(*rows, strict=True))
    return Event(kind, Few(kind, columns), rows) if keep else event_of(kind, *columns)


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of an event's batch as tuples of Python values."""
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _array(column: Sequence[Any] | Int64s, type_: pa.DataType, dtype: Any) -> pa.Array:
    if type_ == ID and isinstance(column, bytes):
        return column_of(column)
    if dtype is None:
        return pa.array(column, type_) if isinstance(column, np.ndarray) else optional(column, type_)
    # From its buffer: pa.array() of a short list takes twice as long, and so does np.array() of one.
    values = np.array(column, dtype) if isinstance(column, np.ndarray) else array(_TYPECODES[dtype], column)
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])
