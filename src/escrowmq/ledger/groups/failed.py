"""Failed messages of a group in one queue: offsets that wait for their next delivery (dead letters have a room of their
own).

They are a sparse set of offsets, kept sorted in NumPy arrays. Adding and taking are batch operations; taking from the
low end, the common case, copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from escrowmq.ledger.columns.arrays import Bools, Int64s, locate

MAX_GAP = 256
"""Neighbours further apart than this are leased apart, so that a lease's mask stays in proportion to its messages."""

_CHUNK = 16_384


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

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the offsets, then the columns in their order."""
        return [self.offsets, *self._columns.values()]

    def load(self, offsets: Int64s, *columns: npt.NDArray[Any]) -> None:
        """Become what :meth:`arrays` gave (this one being new)."""
        self.put(offsets, **dict(zip(self._columns, columns, strict=True)))

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
        """Return the index range of the offsets with ``start <= offset < end``."""
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


class Retries(SparseOffsets):
    """The retry set of one group in one queue. ``key`` is -1 until it is known (ordered groups, see ``order.py``)."""

    __slots__ = ("_least_due", "quiet_until_us")

    def __init__(self) -> None:
        super().__init__({"attempt": np.int32, "due_us": np.int64, "key": np.int64})
        self._least_due: int | None = None
        self.quiet_until_us = 0
        """In order: nothing is free before this, unless they change. Not state: what was found at the last look."""

    def _on_change(self) -> None:
        self._least_due, self.quiet_until_us = None, 0

    def put(self, offsets: Int64s, **values: npt.NDArray[Any]) -> None:
        self._on_change()
        values.setdefault("key", np.full(len(offsets), -1, np.int64))
        super().put(offsets, **values)

    def take(self, offsets: Int64s) -> Int64s:
        """Take out ``offsets``, each of them here; they are returned."""
        self._on_change()
        self.remove(offsets)
        return offsets

    def set_keys(self, offsets: Int64s, keys: Int64s) -> None:
        """Note the keys of those ``offsets`` that are here."""
        self._on_change()
        at = locate(self.offsets, offsets)
        self._columns["key"][at[at >= 0]] = keys[at >= 0]

    def cut(self, first: int, last: int) -> Int64s:
        self._on_change()
        return super().cut(first, last)

    @property
    def least_due_us(self) -> int:
        """When the first of them is due, whatever its offset. There must be one."""
        if self._least_due is None:
            self._least_due = int(self["due_us"].min())
        return self._least_due

    def due_runs(self, now_us: int) -> Iterator[tuple[int, int]]:
        """Index ranges of neighbours that are due and come to the same attempt, lowest offset first.

        No entry lies between two of a run, so a lease of the range from its first to its last offset holds exactly it.
        A run ends at a chunk's border at the latest.
        """
        if not len(self) or self.least_due_us > now_us:
            return
        for base in range(0, len(self), _CHUNK):
            offsets = self.offsets[base : base + _CHUNK]
            attempts = self["attempt"][base : base + _CHUNK]
            due = self["due_us"][base : base + _CHUNK] <= now_us
            if not due.any():
                continue
            fresh = np.ones(len(offsets), bool)
            fresh[1:] = (attempts[1:] != attempts[:-1]) | (np.diff(offsets) > MAX_GAP) | (due[1:] != due[:-1])
            bounds = np.append(np.flatnonzero(fresh), len(offsets))
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                if due[first]:
                    yield base + first, base + last


class Redelivery(NamedTuple):
    """When a group gets a message again that failed, and how often: after ``delays_us``, if there are any (the last for
    all that follow), else after a back-off."""

    attempts: int
    first_us: int
    most_us: int
    delays_us: tuple[int, ...] = ()

    def wait_us(self, attempt: int) -> int:
        """Return how long to wait after ``attempt`` (from 1) failed."""
        if self.delays_us:
            return self.delays_us[min(attempt, len(self.delays_us)) - 1]
        return backoff_us(attempt, self.first_us, self.most_us)


def backoff_us(attempt: int, first_us: int, most_us: int) -> int:
    """Return how long to wait after ``attempt`` (from 1) failed: ``first_us``, doubled each time, at most
    ``most_us``."""
    return min(first_us << min(attempt - 1, 50), most_us)
