"""Sparse columns: a few offsets of a queue, each with its values, kept sorted by offset in NumPy arrays.

Both what waits for a retry and what is a dead letter are such sets. Adding and taking are batch operations; taking from
the low end, the common case, copies nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from escrowmq.ledger.columns.arrays import Bools, Int64s, locate


class SparseOffsets:
    """Distinct offsets in rising order with one array per column; ``table["name"]`` is a view until the next change."""

    __slots__ = ("_columns", "offsets")

    def __init__(self, dtypes: dict[str, Any]) -> None:
        self.offsets: Int64s = np.empty(0, np.int64)
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def put(self, offsets: Int64s, **values: npt.NDArray[Any]) -> None:
        """Add ``offsets`` (none of them here yet, any order) with one array of the same length per column."""
        if len(offsets) > 1 and not bool(np.all(offsets[1:] > offsets[:-1])):
            order = np.argsort(offsets)
            offsets = offsets[order]
            values = {name: value[order] for name, value in values.items()}
        if not len(offsets):
            return
        if not len(self) or offsets[0] > self.offsets[-1]:
            self.offsets = np.concatenate([self.offsets, offsets])
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, values[name].astype(column.dtype, copy=False)])
            return
        places = np.searchsorted(self.offsets, offsets)
        self.offsets = np.insert(self.offsets, places, offsets)
        for name, column in self._columns.items():
            self._columns[name] = np.insert(column, places, values[name])

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The index range of the offsets with ``start <= offset < end``."""
        first, last = np.searchsorted(self.offsets, (start, end))
        return int(first), int(last)

    def cut(self, first: int, last: int) -> Int64s:
        """Take out the rows with index ``first`` .. ``last``-1; their offsets."""
        taken = self.offsets[first:last]
        self.offsets = _without(self.offsets, first, last)
        for name, column in self._columns.items():
            self._columns[name] = _without(column, first, last)
        return taken

    def holds(self, offsets: Int64s) -> Bools:
        """For each of ``offsets`` whether it is here."""
        return locate(self.offsets, offsets) >= 0

    def remove(self, offsets: Int64s) -> None:
        """Take out ``offsets``, each of them here, each once."""
        keep = np.ones(len(self), bool)
        keep[np.searchsorted(self.offsets, offsets)] = False
        self.offsets = self.offsets[keep]
        for name, column in self._columns.items():
            self._columns[name] = column[keep]

    def trim(self, head: int) -> None:
        """Let offsets below ``head`` go."""
        self.cut(0, int(np.searchsorted(self.offsets, head)))


def _without(array: npt.NDArray[Any], first: int, last: int) -> npt.NDArray[Any]:
    if first == 0:
        return array[last:]
    if last == len(array):
        return array[:first]
    return np.concatenate([array[:first], array[last:]])
