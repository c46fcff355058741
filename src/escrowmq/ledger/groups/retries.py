"""What waits to be delivered again: offsets with the attempt that comes next and the time before which it may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.sparse import SparseOffsets

MAX_GAP = 256
"""Neighbours further apart than this are leased apart, so that a lease's mask stays in proportion to its messages."""

_CHUNK = 16_384


class Retries(SparseOffsets):
    """The retry set of one group in one queue."""

    __slots__ = ("_least_due",)

    def __init__(self) -> None:
        super().__init__({"attempt": np.int32, "due_us": np.int64})
        self._least_due: int | None = None

    def put(self, offsets: Int64s, **values: npt.NDArray[Any]) -> None:
        self._least_due = None
        super().put(offsets, **values)

    def cut(self, first: int, last: int) -> Int64s:
        self._least_due = None
        return super().cut(first, last)

    @property
    def least_due_us(self) -> int:
        """When the first of them is due, whatever its offset. There must be one."""
        if self._least_due is None:
            self._least_due = int(self["due_us"].min())
        return self._least_due

    @property
    def head_due_us(self) -> int:
        """When the lowest offset is due. There must be one."""
        return int(self["due_us"][0])

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


def backoff_us(attempt: int, first_us: int, most_us: int) -> int:
    """How long to wait after ``attempt`` (from 1) failed: ``first_us``, doubled each time, at most ``most_us``."""
    return min(first_us << min(attempt - 1, 50), most_us)
