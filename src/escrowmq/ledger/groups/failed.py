"""Failed messages of a group in one queue: offsets that wait for their next delivery.

They are a sparse set of offsets in sorted NumPy arrays. Adding and taking are batch operations; taking from the low
end, the common case, copies nothing. Dead letters are in ``dead/``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s, locate

MAX_GAP = 256
"""Neighbours further apart than this are leased apart, so that a lease's mask stays in proportion to its messages."""

_CHUNK = 16_384
_COLUMNS = {"attempt": np.int32, "due_us": np.int64, "key": np.int64}


class Retries:
    """The retries of one group in one queue: distinct rising ``offsets`` with an array per column.

    ``retries["attempt"]``, ``["due_us"]`` and ``["key"]`` (-1: unknown, see ``order.py``) are views until the next
    change.
    """

    __slots__ = ("_columns", "_least_due", "offsets", "quiet_until_us")

    def __init__(self) -> None:
        self.offsets: Int64s = np.empty(0, np.int64)
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in _COLUMNS.items()}
        self._on_change()

    def _on_change(self) -> None:
        self._least_due: int | None = None
        self.quiet_until_us = 0
        """In order: a lower bound of the next delivery until the next change. Derived, not state."""

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the offsets, then the columns in their order."""
        return [self.offsets, *self._columns.values()]

    def load(self, offsets: Int64s, *columns: npt.NDArray[Any]) -> None:
        """Restore the result of :meth:`arrays` into this new object."""
        self.put(offsets, **dict(zip(self._columns, columns, strict=True)))

    def put(self, offsets: Int64s, **values: npt.NDArray[Any]) -> None:
        """Add new ``offsets`` in any order, with an array of the same length per column (``key`` may be missing)."""
        self._on_change()
        if not len(offsets):
            return
        values.setdefault("key", np.full(len(offsets), -1, np.int64))
        if not bool(np.all(offsets[1:] > offsets[:-1])):
            order = np.argsort(offsets)
            offsets = offsets[order]
            values = {name: value[order] for name, value in values.items()}
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
        """Remove the rows with index ``first`` .. ``last``-1. Returns their offsets."""
        self._on_change()
        taken = self.offsets[first:last]
        self.offsets = _without(self.offsets, first, last)
        for name, column in self._columns.items():
            self._columns[name] = _without(column, first, last)
        return taken

    def take(self, offsets: Int64s) -> Int64s:
        """Remove and return ``offsets``, each of them present, each once."""
        self._on_change()
        at = np.searchsorted(self.offsets, offsets)
        self.offsets = np.delete(self.offsets, at)
        for name, column in self._columns.items():
            self._columns[name] = np.delete(column, at)
        return offsets

    def trim(self, head: int) -> None:
        """Remove offsets below ``head``."""
        self.cut(*self.span(0, head))

    def set_keys(self, offsets: Int64s, keys: Int64s) -> None:
        """Set the keys of those ``offsets`` that are present."""
        self._on_change()
        at = locate(self.offsets, offsets)
        self._columns["key"][at[at >= 0]] = keys[at >= 0]

    @property
    def least_due_us(self) -> int:
        """The earliest due time (µs) of a retry. There must be at least one."""
        if self._least_due is None:
            self._least_due = int(self["due_us"].min())
        return self._least_due

    def due_runs(self, now_us: int) -> Iterator[tuple[int, int]]:
        """Yield index ranges (first, end) of neighbouring retries that are due and have equal attempts, lowest offset
        first.

        No other retry lies within a range, so a lease from its first to its last offset holds exactly these. A range
        ends at a chunk's border at the latest.
        """
        if not len(self) or self.least_due_us > now_us:
            return
        for base in range(0, len(self), _CHUNK):
            offsets = self.offsets[base : base + _CHUNK]
            attempts = self["attempt"][base : base + _CHUNK]
            due = self["due_us"][base : base + _CHUNK] <= now_us
            if not due.any():
                continue
            for first, last in chosen_runs(offsets, attempts, due):
                yield base + first, base + last


def chosen_runs(offsets: Int64s, attempts: Int32s, chosen: Bools) -> Iterator[tuple[int, int]]:
    """Yield index ranges (first, end) of neighbouring ``chosen`` rows with equal attempts, lowest offset first. Offsets
    that are more than MAX_GAP apart are never in one range."""
    fresh = np.ones(len(offsets), bool)
    fresh[1:] = (attempts[1:] != attempts[:-1]) | (np.diff(offsets) > MAX_GAP) | (chosen[1:] != chosen[:-1])
    bounds = np.append(np.flatnonzero(fresh), len(offsets))
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if chosen[first]:
            yield first, last


def _without(array: npt.NDArray[Any], first: int, last: int) -> npt.NDArray[Any]:
    return array[last:] if first == 0 else np.delete(array, slice(first, last))


class Redelivery(NamedTuple):
    """When and how often a group retries: after ``delays_us`` (the last one repeated), if any, else after a
    back-off."""

    attempts: int
    first_us: int
    most_us: int
    delays_us: tuple[int, ...] = ()

    def wait_us(self, attempt: int) -> int:
        """Return the delay (µs) before the next delivery, after ``attempt`` (counted from 1) failed: the configured
        one, else a back-off that doubles each time, up to ``most_us``."""
        if self.delays_us:
            return self.delays_us[min(attempt, len(self.delays_us)) - 1]
        return min(self.first_us << min(attempt - 1, 50), self.most_us)
