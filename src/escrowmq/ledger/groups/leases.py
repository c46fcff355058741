"""Leases: a range of a queue that one member holds until a deadline. One small object a lease, however many messages.

Rules:

1. A lease's id is the log position of the row that made it; ids are never used again, so an id is also the proof of
   ownership (I27).
2. Pending offsets from ``doubt`` on are in doubt: whoever they were handed to may be gone, and can settle them no more.
   They wait for the member's next process, or for its fencing (``members.py``).
3. A lease lives while a message of it is pending. Ended ones with acks are remembered for a while (``MAX_ENDED``), so
   that an acknowledgement that is sent again after a lost answer still gets its OK.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from escrowmq.ledger.columns.sparse import Int64s
from escrowmq.ledger.groups.cursors import Cursor

NOT_LEASED = 0
PENDING = 1
ACKED = 2
TAKEN = 3
"""Given back, dead, released or expired: no longer this lease's."""

NEVER_US = 1 << 62
"""The deadline of leases that do not end by time."""

MAX_ENDED = 4096
"""Ended leases remembered for repeated acknowledgements."""


class Lease:
    """Offsets ``start`` .. ``end``-1 as far as ``mask`` says so (a byte an offset; None: all pending, or all acked at the end)."""

    __slots__ = (
        "attempt",
        "cursor",
        "deadline_us",
        "doubt",
        "end",
        "group",
        "id",
        "mask",
        "member",
        "pending",
        "start",
    )

    def __init__(
        self,
        id: int,
        group: int,
        cursor: Cursor,
        start: int,
        end: int,
        attempt: int,
        member: int,
        deadline_us: int,
        mask: bytearray | None = None,
    ) -> None:
        self.id = id
        self.group = group
        self.cursor = cursor
        self.start = start
        self.end = end
        self.attempt = attempt
        self.member = member
        self.deadline_us = deadline_us
        self.doubt = end
        """The first offset in doubt; ``end``: none is."""
        self.mask = mask
        self.pending = end - start if mask is None else mask.count(PENDING)

    def copy_mask(self) -> bytearray:
        """The mask as bytes of the caller's own."""
        if self.mask is not None:
            return bytearray(self.mask)
        return bytearray((PENDING if self.pending else ACKED,)) * (self.end - self.start)

    def pending_from(self, offset: int) -> int:
        """How many offsets from ``offset`` on are pending."""
        if self.mask is None:
            return max(self.end - offset, 0) if self.pending else 0
        return self.mask.count(PENDING, max(offset - self.start, 0))

    def take(self, start: int, end: int, to: int) -> Int64s | None:
        """Pending offsets of ``start`` .. ``end``-1 become ``to``; they are returned, None standing for all of the range."""
        if self.mask is None:
            if to == ACKED and start == self.start and end == self.end:
                self.pending = 0
                return None
            self.mask = self.copy_mask()
        a, b = start - self.start, end - self.start
        count = self.mask.count(PENDING, a, b)
        self.pending -= count
        if count == b - a:
            self.mask[a:b] = bytes((to,)) * count
            return None
        part = np.frombuffer(self.mask, np.uint8)[a:b]
        offsets = np.flatnonzero(part == PENDING)
        part[offsets] = to
        return offsets + start


def pending_runs(mask: bytearray, a: int, b: int) -> list[tuple[int, int]]:
    """Index ranges within ``a`` .. ``b`` that hold every pending byte and none that was settled before.

    What was never leased may lie inside a range: it is passed over, and a filtered lease stays one run.
    """
    if mask.count(PENDING, a, b) == b - a:
        return [(a, b)]
    part = np.frombuffer(mask, np.uint8)[a:b]
    settled = part > PENDING
    pending = np.flatnonzero(part == PENDING)
    if not len(pending):
        return []
    # Two neighbours belong to one run if nothing settled lies between them.
    barriers = np.cumsum(settled)[pending]
    firsts = np.flatnonzero(np.concatenate([[True], barriers[1:] != barriers[:-1]]))
    lasts = np.append(firsts[1:], len(pending)) - 1
    pairs = zip(pending[firsts].tolist(), pending[lasts].tolist(), strict=True)
    return [(a + first, a + last + 1) for first, last in pairs]


class Leases:
    """All leases of a shard by id, and by deadline."""

    __slots__ = ("_deadlines", "_first", "ended", "live")

    def __init__(self) -> None:
        self.live: dict[int, Lease] = {}
        self.ended: dict[int, Lease] = {}
        self._deadlines: list[
            tuple[int, int]
        ] = []  # sorted, from _first on; an entry is stale if it is not the lease's own
        self._first = 0

    def add(self, lease: Lease) -> None:
        """Let ``lease`` live."""
        self.live[lease.id] = lease
        lease.cursor.leases[lease.id] = lease
        self._note(lease)

    def extend(self, lease: Lease, deadline_us: int) -> None:
        """Give ``lease`` a new deadline."""
        if lease.deadline_us != deadline_us:
            lease.deadline_us = deadline_us
            self._note(lease)
            self._drop_stale()

    def end(self, lease: Lease) -> None:
        """Nothing of ``lease`` is pending any more."""
        del self.live[lease.id]
        del lease.cursor.leases[lease.id]
        if lease.mask is None or ACKED in lease.mask:
            self.remember(lease)
        self._drop_stale()

    def remember(self, lease: Lease) -> None:
        """Keep an ended lease for repeated acknowledgements."""
        self.ended[lease.id] = lease
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def find(self, id: int) -> Lease | None:
        """The lease, live or remembered."""
        return self.live.get(id) or self.ended.get(id)

    def first_deadline_us(self) -> int | None:
        """The earliest deadline of a live lease."""
        return self._deadlines[self._first][0] if self._first < len(self._deadlines) else None

    def expired(self, now_us: int, limit: int) -> list[Lease]:
        """At most ``limit`` live leases whose deadline is not after ``now_us``, earliest first."""
        found: list[Lease] = []
        for index in range(self._first, len(self._deadlines)):
            if len(found) == limit or self._deadlines[index][0] > now_us:
                break
            if self._is_current(index):
                found.append(self.live[self._deadlines[index][1]])
        return found

    def _note(self, lease: Lease) -> None:
        if lease.deadline_us == NEVER_US:
            return
        entry = (lease.deadline_us, lease.id)
        place = bisect_left(self._deadlines, entry, lo=self._first)
        if place == len(self._deadlines) or self._deadlines[place] != entry:  # extended back to an earlier deadline
            self._deadlines.insert(place, entry)

    def _is_current(self, index: int) -> bool:
        deadline, id = self._deadlines[index]
        lease = self.live.get(id)
        return lease is not None and lease.deadline_us == deadline

    def _drop_stale(self) -> None:
        """Keep the first entry a live one, and the list at most twice as long as it must be."""
        while self._first < len(self._deadlines) and not self._is_current(self._first):
            self._first += 1
        if len(self._deadlines) > 64 + 2 * len(self.live):
            self._deadlines = sorted(
                (lease.deadline_us, lease.id) for lease in self.live.values() if lease.deadline_us != NEVER_US
            )
            self._first = 0
