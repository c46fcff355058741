"""Events of a few rows of numbers, made and read as fast as Arrow allows: most of them have a single row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.sparse import Int64s
from escrowmq.ledger.commands import Event
from escrowmq.schemas import STORED, Kind


def _plan(schema: pa.Schema) -> list[tuple[pa.DataType, Any]]:
    return [(type_, type_.to_pandas_dtype() if pa.types.is_integer(type_) else None) for type_ in schema.types]


_COLUMNS = {kind: _plan(schema) for kind, schema in STORED.items()}
"""The types of each kind's columns, and their NumPy types if they are numbers; asking Arrow each time is slow."""


def event_of(kind: Kind, *columns: Sequence[Any] | Int64s) -> Event:
    """An event with these columns, whole numbers or texts."""
    arrays = [_array(column, *types) for column, types in zip(columns, _COLUMNS[kind], strict=True)]
    return Event(kind, pa.RecordBatch.from_arrays(arrays, schema=STORED[kind]))


def event_of_rows(kind: Kind, rows: Sequence[Sequence[Any]]) -> Event:
    """An event with these rows (at least one)."""
    return event_of(kind, *zip(*rows, strict=True))


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows of an event."""
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _array(column: Sequence[Any] | Int64s, type_: pa.DataType, dtype: Any) -> pa.Array:
    if dtype is None:
        return pa.array(column, type_)
    # From its buffer: pa.array() of a short list takes twice as long.
    values = np.array(column, dtype)
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)], null_count=0)
