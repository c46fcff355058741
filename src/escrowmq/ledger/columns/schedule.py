"""Due times without a scan: entries wait in buckets of equal time and are looked at once, when the time has come.

Putting a batch of equal times in costs one bucket, whatever its size. Nothing is ever taken out when it is decided:
an entry counts only while its owner says that it still stands for that very time (*alive*), and the dead are swept when
they are met. So the index is derived: it can be rebuilt from its owner's columns at any moment, and meeting it changes
no state.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Alive = Callable[[Int64s, int], npt.NDArray[np.bool_]]
"""``alive(entries, due_us)`` → which entries still wait for that time."""

_CHUNK = 8192


class DueIndex:
    """Entries (ordinals of some table) by due time in microseconds."""

    __slots__ = ("_alive", "_buckets", "_heap", "_overdue", "_overdue_size")

    def __init__(self, alive: Alive) -> None:
        self._alive = alive
        self._heap: list[int] = []
        self._buckets: dict[int, list[Int64s]] = {}
        self._overdue: list[tuple[int, Int64s]] = []
        self._overdue_size = 0

    def put(self, entries: Int64s, due_us: Int64s | int) -> None:
        """Add entries with their times (one for all, or one each)."""
        if isinstance(due_us, int):
            self._put(entries, due_us)
            return
        if not len(entries):
            return
        if due_us[0] == due_us[-1] and (due_us == due_us[0]).all():
            self._put(entries, int(due_us[0]))
            return
        order = np.argsort(due_us, kind="stable")
        sorted_due = due_us[order]
        starts = np.flatnonzero(np.concatenate(([True], sorted_due[1:] != sorted_due[:-1])))
        for due, part in zip(sorted_due[starts], np.split(entries[order], starts[1:]), strict=True):
            self._put(part, int(due))

    def _put(self, entries: Int64s, due_us: int) -> None:
        bucket = self._buckets.get(due_us)
        if bucket is None:
            bucket = self._buckets[due_us] = []
            heapq.heappush(self._heap, due_us)
        bucket.extend(entries[at : at + _CHUNK] for at in range(0, len(entries), _CHUNK))

    def due(self, now_us: int, limit: int) -> Int64s:
        """Up to ``limit`` entries alive and due at ``now_us``, the longest overdue first. Takes nothing out."""
        self.sweep(now_us)
        found: list[Int64s] = []
        count = 0
        for number, (due_us, chunk) in enumerate(self._overdue):
            if count >= limit:
                break
            live = chunk[self._alive(chunk, due_us)]
            self._overdue_size += len(live) - len(chunk)
            self._overdue[number] = (due_us, live)
            found.append(live[: limit - count])
            count += len(found[-1])
        self._overdue = [item for item in self._overdue if len(item[1])]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def earliest_us(self) -> int | None:
        """No living entry is due before this (the entry of that time may be dead): :meth:`next_due_us` for next to nothing."""
        if self._overdue:
            return self._overdue[0][0]
        return self._heap[0] if self._heap else None

    def next_due_us(self, now_us: int) -> int | None:
        """When the next living entry is due (in the past if it is overdue); None when there is none."""
        if len(self.due(now_us, 1)):
            return self._overdue[0][0]
        for due_us in self._live_buckets():
            return due_us
        return None

    def sweep(self, now_us: int, expected: int | None = None) -> None:
        """Move what is due out of its buckets, the dead dropped; ``expected``: how many can be alive at all, so that
        a list of mostly dead ones is swept too."""
        while self._heap and self._heap[0] <= now_us:
            due_us = heapq.heappop(self._heap)
            for chunk in self._buckets.pop(due_us):
                live = chunk[self._alive(chunk, due_us)]
                if len(live):
                    self._overdue.append((due_us, live))
                    self._overdue_size += len(live)
        if expected is not None and self._overdue_size > 2 * expected + _CHUNK:
            self._overdue = [
                (due_us, live) for due_us, chunk in self._overdue if len(live := chunk[self._alive(chunk, due_us)])
            ]
            self._overdue_size = sum(len(chunk) for _, chunk in self._overdue)

    def _live_buckets(self) -> Iterator[int]:
        while self._heap:
            due_us = self._heap[0]
            bucket = self._buckets[due_us]
            while bucket:
                if self._alive(bucket[0], due_us).any():
                    yield due_us
                    return
                bucket.pop(0)
            heapq.heappop(self._heap)
            del self._buckets[due_us]
