"""Cursors: the state of each message of a queue for one consumer group; and the leases of its members.

Every offset of the queue is in exactly one state (I26), and its place says where that is written:

| offsets | where |
| --- | --- |
| 0 .. base | runs of equal state (what has left the log, or lay before the group's start); all of them final |
| base .. next | ``states``, one byte each |
| next .. end | nowhere: all of them wait |

Rules:

1. ``next`` only rises, and a final state (from ACKED on) never changes, except that the runs of a long history merge to
   GONE, and but for one operator action: :meth:`Cursor.reset` sets ``next`` to a given place.
2. LEASED offsets are pending in exactly one lease of ``leases``; RETRYING ones are in ``retries``, DEAD ones in
   ``dead``.
3. ``counts`` are always those of the states, the merged history's included.
4. A lease is one small object, however many messages it holds: a range of the queue, until a deadline. Its id is the
   log position of the row that made it; ids are never used again, so an id is also the proof of ownership (I27).
5. Pending offsets of a lease from ``doubt`` on are in doubt: the process that they were handed to may be gone, and can
   settle them no more. They wait for the member's next process, or for its fencing (``members.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from escrowmq.ledger.columns.arrays import Columns, Int64s, UInt8s
from escrowmq.ledger.groups.again import EITHER, HANDED_OUT, NOT, Again, handed_out
from escrowmq.ledger.groups.dead.edited import Edited
from escrowmq.ledger.groups.dead.letters import DeadLetters
from escrowmq.ledger.groups.failed import Retries

MAX_HISTORY_RUNS = 4096
"""Runs remembered of what has left the log; beyond, the oldest become GONE and only their counts remain."""


NOT_LEASED = 0
PENDING = 1
ACKED = 2
TAKEN = 3
"""Given back, dead, released or expired: no longer this lease's."""


class State(IntEnum):
    """The state of an offset for one group. From ACKED on it is final. The numbers are stored in snapshots."""

    LEASED = 1
    RETRYING = 2
    DEAD = 3
    ACKED = 4
    FILTERED = 5
    """Passed over: its tag is not the group's."""
    DISCARDED = 6
    """Was a dead letter, and a person let it go."""
    EXPIRED = 7
    """Left the log by retention before the group was done with it."""
    SKIPPED = 8
    """Before the group's start, or passed over by a reset."""
    GONE = 9
    """Final, and left the log so long ago that only the counts tell how."""


_STATES = max(State) + 1

_ENDLESS = 1 << 62

_FINAL = int(State.ACKED)  # NumPy is slow to compare with a member

_HANDED = np.full(_STATES, NOT, np.uint8)
_HANDED[[State.LEASED, State.RETRYING, State.DEAD, State.ACKED, State.DISCARDED]] = HANDED_OUT
_HANDED[State.FILTERED] = EITHER
"""Whether members were given what is in a state (``again.py``)."""


class Cursor:
    """The states of one group's offsets in one queue; see the table above."""

    __slots__ = (
        "_floor",
        "_history",
        "again",
        "counts",
        "dead",
        "edited",
        "leases",
        "next",
        "queue_id",
        "retries",
        "states",
    )

    def __init__(self, queue_id: int, start: int) -> None:
        self.queue_id = queue_id
        self.next = start
        self.states = Columns({"state": np.uint8}, first=start)
        self.counts = [0] * _STATES
        self.retries = Retries()
        self.dead = DeadLetters()
        self.edited = Edited()
        self.leases: dict[int, Lease] = {}
        self.again = Again()
        self._history = Columns({"start": np.int64, "state": np.uint8})
        self._floor = start
        if start:
            self._history.extend(1, start=0, state=State.SKIPPED)
            self.counts[State.SKIPPED] = start

    @property
    def base(self) -> int:
        """The first offset with a byte of its own."""
        return self.states.first

    @property
    def unfinished(self) -> bool:
        """Whether a message is leased, waits for a retry, or is dead."""
        counts = self.counts
        return bool(counts[State.LEASED] or counts[State.RETRYING] or counts[State.DEAD])

    @property
    def floor(self) -> int:
        """Return the offset below which all is done (I22: only a reset lowers it). A dead letter is not done."""
        states = self.states["state"]
        self._floor = max(self._floor, self.base)
        while self._floor < self.next:
            begin = self._floor - self.base
            open_ = states[begin : begin + 65_536] < _FINAL
            if open_.any():
                self._floor += int(open_.argmax())
                break
            self._floor += len(open_)
        return self._floor

    def advance(self, end: int, state: State) -> None:
        """Move ``next`` to ``end``, everything passed being in ``state``."""
        count = end - self.next
        self.states.extend(count, state=state)
        self.counts[state] += count
        self.next = end
        if len(self.again):
            self.again.trim(end)

    def take_up(self, offsets: Int64s, keys: Int64s, due_us: int, repeated: int) -> None:
        """In order: the rising ``offsets`` from ``next`` on wait in the retries now, still to be delivered for the
        first time (or, as attempt ``repeated``, again since a reset); what lies between them is passed over."""
        attempts = self.again.attempts(offsets, repeated)
        self.advance(int(offsets[-1]) + 1, State.FILTERED)
        self.move(offsets, State.FILTERED, State.RETRYING)
        self.retries.put(offsets, attempt=attempts, due_us=np.full(len(offsets), due_us), key=keys)

    @property
    def place(self) -> int:
        """The first offset that a consumer has still to do: dead letters below it wait for a person."""
        states = self.states["state"]
        undone = states <= State.RETRYING
        return self.base + int(undone.argmax()) if undone.any() else self.next

    def counts_from(self, start: int) -> list[int]:
        """Return how many offsets from ``start`` to before ``next`` are in each state, of those that have a byte or
        a run of their own."""
        starts, states = self.runs()
        lengths = np.maximum(np.append(starts[1:], self.next)[: len(starts)] - np.maximum(starts, start), 0)
        return [int(lengths[states == state].sum()) for state in range(_STATES)]

    def reset(self, start: int) -> None:
        """Go on at ``start``, which is stored or the queue's end; leases are the caller's affair, and over. From there
        on all waits, dead letters, too; what lies below is passed over if it was to be delivered still, and else stays
        as it is."""
        again = self._read_handed_out(start)
        if start > self.next:
            self.advance(start, State.SKIPPED)
        kept = max(start - self.base, 0)
        states = self.states["state"]
        for undone in (State.LEASED, State.RETRYING):
            below = np.flatnonzero(states[:kept] == undone)
            self.move(below + self.base, undone, State.SKIPPED)
        for state, count in enumerate(np.bincount(states[kept:], minlength=_STATES).tolist()):
            self.counts[state] -= count
        if start < self.base:
            starts, history = self._history["start"], self._history["state"]
            lengths = np.append(starts[1:], self.base) - np.maximum(starts, start)
            for state, length in zip(history.tolist(), lengths.tolist(), strict=True):
                self.counts[state] -= max(length, 0)
            self._history.cut(self._history.first + int(np.count_nonzero(starts < start)))
            self.states = Columns({"state": np.uint8}, first=start)
        else:
            self.states.cut(start)
        self.next = start
        self._floor = self.base
        self.retries.cut(0, len(self.retries))
        self.dead.remove_range(start, _ENDLESS)
        self.again = again

    def _read_handed_out(self, start: int) -> Again:
        """Return which offsets from ``start`` on members received, as far as it is known."""
        more = Again(self.again.starts, self.again.ends)
        more.trim(start)
        if start >= self.next:
            return more
        starts, states = self.runs()
        first = int(np.searchsorted(starts, start, side="right")) - 1
        starts, states = np.maximum(starts[first:], start), states[first:]
        # A retry at its first attempt, and a dead letter without one, reached nobody: each is a run of its own.
        untouched = [
            x.offsets[x[name] < least] for x, name, least in ((self.retries, "attempt", 2), (self.dead, "attempts", 1))
        ]
        alone = np.concatenate(untouched)
        alone = alone[alone >= start]
        borders = np.unique(np.concatenate([starts, alone, alone + 1]))
        borders = borders[borders < self.next]
        kinds = _HANDED[states[np.searchsorted(starts, borders, side="right") - 1]]
        kinds[np.searchsorted(borders, alone)] = NOT
        return handed_out(borders, kinds, self.next, more)

    def move_run(self, start: int, end: int, old: State, new: State) -> None:
        """Offsets ``start`` .. ``end``-1, all in ``old``, become ``new``."""
        base = self.base
        self.states["state"][start - base : end - base] = int(new)
        self.counts[old] -= end - start
        self.counts[new] += end - start

    def move(self, offsets: Int64s, old: State, new: State) -> None:
        """``offsets``, all in ``old``, become ``new``."""
        self.states["state"][offsets - self.base] = int(new)
        self.counts[old] -= len(offsets)
        self.counts[new] += len(offsets)

    def trim(self, head: int) -> None:
        """Retention moved the queue's head: what was not done below it expires. Leases are the caller's affair."""
        if head <= self.base:
            return
        if self.next < head:
            self.advance(head, State.EXPIRED)
        leaving = self.states["state"][: head - self.base]
        lost = leaving < State.ACKED
        for state in (State.LEASED, State.RETRYING, State.DEAD):
            self.counts[state] -= int(np.count_nonzero(leaving == state))
        self.counts[State.EXPIRED] += int(np.count_nonzero(lost))
        leaving[lost] = State.EXPIRED
        starts, states = _runs(leaving)
        self._remember(starts + self.base, states)
        self.states.trim(head)
        self.retries.trim(head)
        self.dead.trim(head)
        self.edited.trim(head)

    def _remember(self, starts: Int64s, states: UInt8s) -> None:
        history = self._history
        if len(history) and history["state"][-1] == states[0]:
            starts, states = starts[1:], states[1:]
        history.extend(len(starts), start=starts, state=states)
        if len(history) > MAX_HISTORY_RUNS:
            history.trim(history.end - MAX_HISTORY_RUNS)
            history["start"][0] = 0
            history["state"][0] = State.GONE

    def runs(self) -> tuple[Int64s, UInt8s]:
        """Return all offsets below ``next`` as runs: where each begins, and its state. Copies."""
        starts, states = self._history["start"].copy(), self._history["state"].copy()
        if self.next > self.base:
            more_starts, more_states = _runs(self.states["state"])
            if len(states) and states[-1] == more_states[0]:
                more_starts, more_states = more_starts[1:], more_states[1:]
            starts = np.concatenate([starts, more_starts + self.base])
            states = np.concatenate([states, more_states])
        return starts, states

    def restore(self, base: int, end: int, starts: Int64s, states: UInt8s, counts: list[int]) -> None:
        """Become the cursor whose ``base``, ``next``, ``runs()`` and ``counts`` these are (this one being new)."""
        ends = np.append(starts[1:], end)
        old = starts < base
        self._history = Columns({"start": np.int64, "state": np.uint8})
        self._history.extend(int(old.sum()), start=starts[old], state=states[old])
        self.states = Columns({"state": np.uint8}, first=base)
        lengths = np.maximum(ends - np.maximum(starts, base), 0)
        self.states.extend(end - base, state=np.repeat(states, lengths))
        self.next, self.counts, self._floor = end, counts, base

    def offsets_of(self, state: State) -> Int64s:
        """Return all offsets in ``state``, in order."""
        starts, states = self.runs()
        ends = np.append(starts[1:], self.next)
        chosen = states == state
        pieces = [np.arange(a, b) for a, b in zip(starts[chosen].tolist(), ends[chosen].tolist(), strict=True)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Lease:
    """Offsets ``start`` .. ``end``-1 as far as ``mask`` says so (one byte per offset; None: all pending, or all acked
    at the end)."""

    id: int
    group: int
    cursor: Cursor
    start: int
    end: int
    attempt: int
    member: int
    deadline_us: int
    mask: bytearray | None = None
    doubt: int = field(init=False)
    """The first offset in doubt; ``end``: none is."""
    pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.doubt = self.end
        self.pending = self.end - self.start if self.mask is None else self.mask.count(PENDING)

    def copy_mask(self) -> bytearray:
        """Return the mask as bytes of the caller's own."""
        if self.mask is not None:
            return bytearray(self.mask)
        return bytearray((PENDING if self.pending else ACKED,)) * (self.end - self.start)

    def pending_from(self, offset: int) -> int:
        """Return how many offsets from ``offset`` on are pending."""
        if self.mask is None:
            return max(self.end - offset, 0) if self.pending else 0
        return self.mask.count(PENDING, max(offset - self.start, 0))

    def holds(self, offset: int) -> bool:
        """Return whether an offset is pending."""
        return self.start <= offset < self.end and self.copy_mask()[offset - self.start] == PENDING

    def take(self, start: int, end: int, to: int) -> Int64s | None:
        """Pending offsets of ``start`` .. ``end``-1 become ``to``; they are returned, None standing for all of the
        range."""
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


def _runs(states: UInt8s) -> tuple[Int64s, UInt8s]:
    """Return where runs of equal bytes begin, and the byte of each; ``states`` is not empty."""
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(states[1:] != states[:-1]) + 1])
    return starts, states[starts]
