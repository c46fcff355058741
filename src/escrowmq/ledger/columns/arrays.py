"""Arrays and tables of the ledger: names for NumPy arrays, growing columns whose head can be dropped, Arrow tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

Ints = Sequence[int]


def locate(rising: Int64s, wanted: Int64s) -> Int64s:
    """Return the index of each wanted value in an array of rising values; -1 where it is not there."""
    size = len(wanted)
    if not len(rising):
        return np.full(size, -1, np.int64)
    if size > 1 and int(wanted[-1]) - int(wanted[0]) == size - 1:  # mostly what was stored together: one search for all
        start = int(rising.searchsorted(wanted[0]))
        if start + size <= len(rising) and all_true(rising[start : start + size] == wanted):
            return np.arange(start, start + size)
    index = np.minimum(rising.searchsorted(wanted), len(rising) - 1)
    return np.where(rising[index] == wanted, index, -1)


def places_of_few(rising: Int64s, wanted: list[int]) -> list[int]:
    """Return, for each wanted value, the index of the first of the ``rising`` values that is not below it: its own, if
    it is there. Fast for one value."""
    if len(wanted) == 1:
        return [int(rising.searchsorted(wanted[0]))]
    places: list[int] = rising.searchsorted(wanted).tolist()
    return places


def all_true(flags: Bools) -> bool:
    """Return whether every element is true (true of none); faster than ``all()``."""
    return bool(np.count_nonzero(flags) == len(flags))


def all_equal(values: npt.NDArray[Any]) -> bool:
    """Return whether every element is the first one (true of none)."""
    return not len(values) or (bool(values[0] == values[-1]) and all_true(values == values[0]))


def unique_in_order(ordinals: Int64s) -> Int64s:
    """Return the distinct values, in order of first appearance."""
    if (ordinals[1:] > ordinals[:-1]).all():
        return ordinals
    _, index = np.unique(ordinals, return_index=True)
    return ordinals[np.sort(index)]


class Columns:
    """Rows numbered by ordinal ``first`` .. ``end``-1, one array per column; growth at the end is amortised, trim drops
    the head.

    Ordinals never change. ``columns["name"]`` is the live part as an array (index 0 is ordinal ``first``), a view until
    the next append or trim.
    """

    __slots__ = ("_arrays", "_size", "_start", "first")

    def __init__(self, dtypes: dict[str, Any], first: int = 0) -> None:
        self.first = first
        self._start = 0
        self._size = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return self._size

    @property
    def end(self) -> int:
        """The ordinal that the next row gets."""
        return self.first + self._size

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name][self._start : self._start + self._size]

    def extend(self, count: int, /, **values: Any) -> int:
        """Add ``count`` rows; each value is an array of that length or a scalar. Returns the first new ordinal."""
        if self._start + self._size + count > len(next(iter(self._arrays.values()))):
            self._move(max(2 * self._size, self._size + count, 64))
        begin = self._start + self._size
        for name, array in self._arrays.items():
            value = values[name]
            if count == 1:  # a number into a place: a tenth of the cost of a slice
                array[begin] = value if isinstance(value, int | np.generic) else value[0]
            else:
                array[begin : begin + count] = value
        self._size += count
        return self.first + self._size - count

    def item(self, name: str, row: int) -> int:
        """Return ``columns[name][row]`` of a column of numbers, without creating a view. ``row`` counts from the first
        live row; it is not an ordinal."""
        value: int = self._arrays[name].item(self._start + row)
        return value

    def put(self, name: str, row: int, value: int) -> None:
        """Set one value, as ``columns[name][row] = value``; ``row`` as of :meth:`item`."""
        self._arrays[name][self._start + row] = value

    def trim(self, first: int) -> None:
        """Drop rows below ordinal ``first``."""
        gone = min(max(first - self.first, 0), self._size)
        self.first += gone
        self._start += gone
        self._size -= gone
        capacity = len(next(iter(self._arrays.values())))
        if self._start > 4096 and self._start > capacity // 2:
            self._move(max(2 * self._size, 64))

    def cut(self, end: int) -> None:
        """Drop rows from ordinal ``end`` on."""
        self._size = min(max(end - self.first, 0), self._size)

    def to_table(self) -> pa.Table:
        """Return a copy of the live rows as an Arrow table; the first ordinal is in the schema's metadata."""
        if self._size:
            table = pa.table({name: pa.array(self[name].copy()) for name in self._arrays})
        else:
            table = _without_rows(tuple((name, array.dtype) for name, array in self._arrays.items()))
        return table.replace_schema_metadata({"first": str(self.first)})

    def load(self, table: pa.Table) -> None:
        """Replace all rows, and the first ordinal, by those of a table that :meth:`to_table` returned."""
        self.first = int((table.schema.metadata or {}).get(b"first", b"0"))
        self._start = 0
        self._size = table.num_rows
        for name, array in self._arrays.items():
            self._arrays[name] = np.array(table.column(name).to_numpy(), dtype=array.dtype)

    def _move(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            fresh = np.empty(capacity, array.dtype)
            fresh[: self._size] = array[self._start : self._start + self._size]
            self._arrays[name] = fresh
        self._start = 0


@functools.cache
def _without_rows(columns: tuple[tuple[str, np.dtype[Any]], ...]) -> pa.Table:
    return pa.table({name: pa.array(np.empty(0, dtype)) for name, dtype in columns})


def with_zeros(table: pa.Table, name: str, dtype: type[np.generic]) -> pa.Table:
    """Return a table that has the column ``name``: filled with zeros if the table, of an older snapshot, lacks it."""
    if name in table.column_names:
        return table
    return table.append_column(name, pa.array(np.zeros(table.num_rows, dtype)))


def int64s(*names: str) -> list[tuple[str, pa.DataType]]:
    """Return the pair (name, int64) for each name, to be used as fields of an Arrow schema."""
    return [(name, pa.int64()) for name in names]


def table_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Return an Arrow table of these rows (maybe none), each a sequence of values in the order of the schema."""
    if not rows:
        return empty_table(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows, strict=True), schema, strict=True)], schema=schema)


@functools.cache
def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows; cached, because most tables of a snapshot are empty."""
    return schema.empty_table()
