"""An index of due times: entries of equal time share a bucket, so what is due is found without a full scan.

Rules:

1. Adding a batch of equal times costs one bucket, whatever its size.
2. Entries are not removed when they are decided: an entry counts only while its owner confirms that it waits for that
   very time (*alive*). Dead ones are dropped when they are met, and by ``put`` when they are far more than can be
   alive. So the index is derived: it can be rebuilt at any moment, and reading it changes no state. An entry that
   returns to an earlier time of its own is there twice; the repeat is dropped when that time has come.
3. ``wake_us`` is a lower bound: nothing is due before it. The entry of that time may be dead, but a call of
   :meth:`DueIndex.due` that finds nothing moves the bound, so a caller that sleeps until it always makes progress.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

import numpy as np

from escrowmq.ledger.columns.arrays import Bools, Int64s, all_equal, unique_in_order

Alive = Callable[[Int64s, Int64s | int], Bools]
"""``alive(entries, due_us)`` → which entries still wait for that time (one for all, or one each)."""

NEVER_US: Final = 1 << 62  # the time of what has no time: later than any other

_CHUNK = 8192
_SKIPPED = 64  # buckets of dead entries that one call may drop ahead of their time; bounds its work


class DueIndex:
    """Entries (ordinals of some table) by due time in microseconds."""

    __slots__ = ("_alive", "_buckets", "_heap", "_overdue", "_size")

    def __init__(self, alive: Alive) -> None:
        self._alive = alive
        self._heap: list[int] = []
        self._buckets: dict[int, list[Int64s]] = {}
        self._overdue: list[tuple[int, Int64s]] = []
        self._size = 0

    @property
    def wake_us(self) -> int:
        """A lower bound of the earliest due time (µs) of an entry that is alive; ``NEVER_US`` if the index is empty."""
        if self._overdue:
            return self._overdue[0][0]
        return self._heap[0] if self._heap else NEVER_US

    def put(self, entries: Int64s, due_us: Int64s | int, alive: int = NEVER_US) -> None:
        """Add entries with their due times (one for all, or one each). ``alive``: the most entries that can be alive,
        these included; if the index holds far more, it first drops the dead ones."""
        if self._size > 2 * alive + _CHUNK:
            self._drop_dead()
        if not len(entries):
            return
        if isinstance(due_us, int) or all_equal(due_us):
            self._put(entries, due_us if isinstance(due_us, int) else int(due_us[0]))
            return
        order = np.argsort(due_us, kind="stable")
        sorted_due = due_us[order]
        starts = np.flatnonzero(np.concatenate(([True], sorted_due[1:] != sorted_due[:-1])))
        for due, part in zip(sorted_due[starts], np.split(entries[order], starts[1:]), strict=True):
            self._put(part, int(due))

    def _put(self, entries: Int64s, due_us: int) -> None:
        if due_us not in self._buckets:
            heapq.heappush(self._heap, due_us)
        self._buckets.setdefault(due_us, []).extend(_split(entries))
        self._size += len(entries)

    def due(self, now_us: int, limit: int) -> Int64s:
        """Return up to ``limit`` entries that are alive and due at ``now_us``, the longest overdue first. They stay in
        the index until they are dead."""
        while self._heap and self._heap[0] <= now_us:
            self._open_bucket(heapq.heappop(self._heap))
        found: list[Int64s] = []
        count = dead = 0
        for number, (due_us, chunk) in enumerate(self._overdue):
            if count >= limit:
                break
            live = self._living(chunk, due_us)
            self._overdue[number] = (due_us, live)
            dead += not len(live)
            found.append(live[: limit - count])
            count += len(found[-1])
        if dead:
            self._overdue = [item for item in self._overdue if len(item[1])]
        if not self._overdue:
            self._skip_dead()
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _open_bucket(self, due_us: int) -> None:
        """Move the entries of one due time from their bucket to the overdue ones, without repeats."""
        chunks = self._buckets.pop(due_us)
        while self._overdue and self._overdue[-1][0] == due_us:
            chunks.insert(0, self._overdue.pop()[1])
        if len(chunks) > 1:
            entries = np.concatenate(chunks)
            distinct = unique_in_order(entries)
            self._size -= len(entries) - len(distinct)
            chunks = _split(distinct)
        self._overdue.extend((due_us, chunk) for chunk in chunks)

    def done(self) -> None:
        """Drop the first overdue entries that are dead, so that ``wake_us`` moves on. Called after the owner changed
        entries that :meth:`due` returned."""
        while self._overdue:
            due_us, chunk = self._overdue[0]
            if len(live := self._living(chunk, due_us)):
                self._overdue[0] = (due_us, live)
                return
            del self._overdue[0]

    def _living(self, chunk: Int64s, due_us: int) -> Int64s:
        live = chunk[self._alive(chunk, due_us)]
        self._size -= len(chunk) - len(live)
        return live

    def _skip_dead(self) -> None:
        for _ in range(_SKIPPED):
            if not self._heap:
                return
            bucket = self._buckets[self._heap[0]]
            while bucket:
                if len(live := self._living(bucket[0], self._heap[0])):
                    bucket[0] = live
                    return
                del bucket[0]
            del self._buckets[heapq.heappop(self._heap)]

    def _drop_dead(self) -> None:
        waiting = ((due_us, chunk) for due_us in sorted(self._heap) for chunk in self._buckets[due_us])
        times, chunks = zip(*self._overdue, *waiting, strict=True)
        entries, due = np.concatenate(chunks), np.repeat(times, [len(chunk) for chunk in chunks])
        living = np.flatnonzero(self._alive(entries, due))
        living = living[np.sort(np.unique(entries[living], return_index=True)[1])]
        self._heap, self._buckets, self._overdue, self._size = [], {}, [], 0
        self.put(entries[living], due[living])


def _split(entries: Int64s) -> list[Int64s]:
    return [entries[at : at + _CHUNK] for at in range(0, len(entries), _CHUNK)]
