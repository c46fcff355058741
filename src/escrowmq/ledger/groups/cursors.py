"""Cursors: the state of each message of a queue for one consumer group; and the leases of its members.

Every offset of the queue is in exactly one state (I26):

| offsets | where the state is stored |
| --- | --- |
| 0 .. base | runs of equal state (what left the log, or lay before the group's start); all of them final |
| base .. next | ``states``, one byte each |
| next .. end | nowhere: all of them wait |

Rules:

1. ``next`` only rises, and a final state (from ACKED on) never changes, except that the runs of a long history merge to
   GONE, and that an operator's :meth:`Cursor.reset` moves ``next``.
2. LEASED offsets are pending in exactly one lease of ``leases``; RETRYING ones are in ``retries``, DEAD ones in
   ``dead``.
3. ``counts`` are always those of the states, the merged history included.
4. A lease is one small object, however many messages it holds: a range of the queue, until a deadline. Its id is the
   log position of the row that made it, never reused, so an id also proves ownership (I27).
5. Pending offsets of a lease from ``doubt`` on are in doubt: the process that received them may be gone and cannot
   settle them. They wait for the member's next process, or for its fencing (``members.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from escrowmq.ledger.columns.arrays import Columns, Int32s, Int64s, UInt8s
from escrowmq.ledger.groups.dead.letters import DeadLetters, Edited
from escrowmq.ledger.groups.failed import Retries

MAX_RUNS = 1024  # runs of one queue
HANDED_OUT, NOT, EITHER = 1, 0, 2
"""Whether members received an offset; EITHER if the tags exclude it: it joins its neighbours."""

_NONE: Int64s = np.empty(0, np.int64)


class Again:
    """Offset ranges to redeliver after a reset: rising, disjoint runs ``starts[n]`` .. ``ends[n]``-1 of undelivered
    offsets that members received before.

    A reset makes settled messages wait again; these runs mark them as repeats (I23). Their memory grows with runs, not
    with messages: at most :data:`MAX_RUNS` of a queue; beyond, the closest are merged, and the offsets between them
    count as repeats, too. Changed only by :meth:`trim`.
    """

    __slots__ = ("ends", "starts")

    def __init__(self, starts: Int64s = _NONE, ends: Int64s = _NONE) -> None:
        apart = starts[1:] - ends[:-1]
        kept = apart > 0
        if len(starts) > MAX_RUNS:
            kept = np.zeros(len(apart), bool)
            kept[np.argsort(-apart, kind="stable")[: MAX_RUNS - 1]] = True
        self.starts = starts[np.append(True, kept)] if len(starts) else _NONE
        self.ends = ends[np.append(kept, True)] if len(starts) else _NONE

    def __len__(self) -> int:
        return len(self.starts)

    def trim(self, first: int) -> None:
        """Remove offsets below ``first`` from the runs."""
        gone = int(np.searchsorted(self.ends, first, side="right"))
        self.starts, self.ends = np.maximum(self.starts[gone:], first), self.ends[gone:]

    def attempts(self, offsets: Int64s, repeated: int) -> Int32s:
        """Return the attempt of the next delivery of each of ``offsets``: ``repeated`` if it is in a run, else 1."""
        if not len(self):
            return np.ones(len(offsets), np.int32)
        at = np.searchsorted(self.starts, offsets, side="right") - 1
        return np.where((at >= 0) & (offsets < self.ends[at]), repeated, 1).astype(np.int32)

    def stretch(self, start: int, end: int) -> tuple[bool, int]:
        """Return whether ``start`` is in a run, and the next offset, at most ``end``, for which the answer differs."""
        at = int(np.searchsorted(self.ends, start, side="right"))
        if at == len(self):
            return False, end
        begins = int(self.starts[at])
        return (False, min(begins, end)) if start < begins else (True, min(int(self.ends[at]), end))


def find_handed_out(starts: Int64s, kinds: UInt8s, end: int, more: Again) -> Again:
    """Return the offsets that members received, as runs: those of kind HANDED_OUT, then the runs of ``more``. Run n of
    the input has the kind ``kinds[n]`` and reaches from ``starts[n]`` to the next start, the last one to ``end``; one
    of kind EITHER belongs to the run before it."""
    starts, kinds = starts[kinds != EITHER], kinds[kinds != EITHER]
    ends, chosen = np.append(starts[1:], end)[: len(starts)], kinds == HANDED_OUT
    return Again(np.concatenate([starts[chosen], more.starts]), np.concatenate([ends[chosen], more.ends]))


MAX_HISTORY_RUNS = 4096
"""Runs remembered of what has left the log; beyond, the oldest become GONE and only their counts remain."""


NOT_LEASED = 0
PENDING = 1
ACKED = 2
TAKEN = 3  # given back, dead or expired: no longer this lease's


class State(IntEnum):
    """The state of an offset for one group. From ACKED on it is final. The numbers are stored in snapshots."""

    LEASED = 1
    RETRYING = 2
    DEAD = 3
    ACKED = 4
    FILTERED = 5  # passed over: its tag is not the group's
    DISCARDED = 6  # a dead letter that an operator discarded
    EXPIRED = 7  # left the log by retention before the group was done with it
    SKIPPED = 8  # before the group's start, or passed over by a reset
    GONE = 9  # final, and left the log so long ago that only its count is stored


_STATES = max(State) + 1

_ENDLESS = 1 << 62

_FINAL = int(State.ACKED)  # NumPy is slow to compare with a member

_UNDONE = (State.LEASED, State.RETRYING, State.DEAD)

_HANDED = np.full(_STATES, NOT, np.uint8)  # whether members received the messages in a state (:class:`Again`)
_HANDED[[State.LEASED, State.RETRYING, State.DEAD, State.ACKED, State.DISCARDED]] = HANDED_OUT
_HANDED[State.FILTERED] = EITHER


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
        """The first offset whose state is stored on its own; lower ones are final and stored as runs."""
        return self.states.first

    @property
    def unfinished(self) -> bool:
        """Return whether a message is leased, waits for a retry, or is dead."""
        return any(self.counts[state] for state in _UNDONE)

    @property
    def floor(self) -> int:
        """The offset below which all states are final (I22: only a reset lowers it). A dead letter is not final."""
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
        """Move ``next``, the first offset never delivered, to ``end``; all offsets passed over get ``state``."""
        count = end - self.next
        self.states.extend(count, state=state)
        self.counts[state] += count
        self.next = end
        if len(self.again):
            self.again.trim(end)

    def take_up(self, offsets: Int64s, keys: Int64s, due_us: int, repeated: int) -> None:
        """Move messages that were never delivered, at rising ``offsets`` from ``next`` on, into the retries with their
        ``keys``, due at ``due_us``. Their attempt is 1, or ``repeated`` if they were delivered before a reset. Offsets
        between them become FILTERED, and ``next`` moves behind them."""
        attempts = self.again.attempts(offsets, repeated)
        self.advance(int(offsets[-1]) + 1, State.FILTERED)
        self.move(offsets, State.FILTERED, State.RETRYING)
        self.retries.put(offsets, attempt=attempts, due_us=np.full(len(offsets), due_us), key=keys)

    @property
    def place(self) -> int:
        """The first offset that is leased, waits for a retry, or was never delivered. Dead letters do not count."""
        states = self.states["state"]
        undone = states <= State.RETRYING
        return self.base + int(undone.argmax()) if undone.any() else self.next

    def counts_from(self, start: int) -> list[int]:
        """Return the number of offsets from ``start`` to before ``next`` by state, indexed by :class:`State`."""
        starts, states = self.runs()
        lengths = np.maximum(np.append(starts[1:], self.next)[: len(starts)] - np.maximum(starts, start), 0)
        return [int(lengths[states == state].sum()) for state in range(_STATES)]

    def reset(self, start: int) -> None:
        """Continue delivery at ``start``, which is stored or the queue's end. Offsets from there on wait again, dead
        letters too; below, leased and retrying ones are SKIPPED, dead letters stay. The caller ends the leases."""
        again = self._read_handed_out(start)
        if start > self.next:
            self.advance(start, State.SKIPPED)
        below = self.states["state"][: max(start - self.base, 0)]
        for undone in (State.LEASED, State.RETRYING):
            self.move(np.flatnonzero(below == undone) + self.base, undone, State.SKIPPED)
        self.counts = [count - gone for count, gone in zip(self.counts, self.counts_from(start), strict=True)]
        if start < self.base:
            self._history.cut(self._history.first + int(np.count_nonzero(self._history["start"] < start)))
            self.states = Columns({"state": np.uint8}, first=start)
        else:
            self.states.cut(start)
        self.next, self._floor, self.again = start, self.base, again
        self.retries.cut(0, len(self.retries))
        self.dead.remove_range(start, _ENDLESS)

    def _read_handed_out(self, start: int) -> Again:
        """Return the offsets from ``start`` on that members received before, as runs, as far as known."""
        more = Again(self.again.starts, self.again.ends)
        more.trim(start)
        if start >= self.next:
            return more
        starts, states = self.runs()
        first = int(np.searchsorted(starts, start, side="right")) - 1
        starts, states = np.maximum(starts[first:], start), states[first:]
        # A retry at its first attempt, and a dead letter without one, reached no consumer: each is a run of its own.
        retries, dead = self.retries, self.dead
        alone = np.append(retries.offsets[retries["attempt"] < 2], dead.offsets[dead["attempts"] < 1])
        alone = alone[alone >= start]
        borders = np.unique(np.concatenate([starts, alone, alone + 1]))
        borders = borders[borders < self.next]
        kinds = _HANDED[states[np.searchsorted(starts, borders, side="right") - 1]]
        kinds[np.searchsorted(borders, alone)] = NOT
        return find_handed_out(borders, kinds, self.next, more)

    def move_run(self, start: int, end: int, old: State, new: State) -> None:
        """Change the state of offsets ``start`` .. ``end``-1, all of them in ``old``, to ``new``."""
        base = self.base
        self.states["state"][start - base : end - base] = int(new)
        self.counts[old] -= end - start
        self.counts[new] += end - start

    def move(self, offsets: Int64s, old: State, new: State) -> None:
        """Change the state of ``offsets``, all of them in ``old``, to ``new``."""
        self.states["state"][offsets - self.base] = int(new)
        self.counts[old] -= len(offsets)
        self.counts[new] += len(offsets)

    def trim(self, head: int) -> None:
        """Apply retention, by which the queue now begins at ``head``: unfinished offsets below it become EXPIRED. The
        caller ends the leases."""
        if head <= self.base:
            return
        if self.next < head:
            self.advance(head, State.EXPIRED)
        leaving = self.states["state"][: head - self.base]
        for state in _UNDONE:
            self.move(np.flatnonzero(leaving == state) + self.base, state, State.EXPIRED)
        starts, states = _runs(leaving)
        self._remember(starts + self.base, states)
        self.dead.remove_range(0, head)
        for part in (self.states, self.retries, self.edited):
            part.trim(head)

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
        """Return all offsets below ``next`` as runs of equal state: the first offset of each, and its state."""
        starts, states = self._history["start"].copy(), self._history["state"].copy()
        if self.next > self.base:
            more_starts, more_states = _runs(self.states["state"])
            if len(states) and states[-1] == more_states[0]:
                more_starts, more_states = more_starts[1:], more_states[1:]
            starts = np.concatenate([starts, more_starts + self.base])
            states = np.concatenate([states, more_states])
        return starts, states

    def restore(self, base: int, end: int, starts: Int64s, states: UInt8s, counts: list[int]) -> None:
        """Restore ``base``, ``next``, ``runs()`` and ``counts`` into this new cursor."""
        ends = np.append(starts[1:], end)
        old = starts < base
        self._history = Columns({"start": np.int64, "state": np.uint8})
        self._history.extend(int(old.sum()), start=starts[old], state=states[old])
        self.states = Columns({"state": np.uint8}, first=base)
        lengths = np.maximum(ends - np.maximum(starts, base), 0)
        self.states.extend(end - base, state=np.repeat(states, lengths))
        self.next, self.counts, self._floor = end, counts, base

    def offsets_of(self, state: State) -> Int64s:
        """Return all offsets in ``state``, in order. For audits: its cost grows with all offsets."""
        starts, states = self.runs()
        return np.flatnonzero(np.repeat(states, np.diff(np.append(starts, self.next))) == state)


@dataclass(slots=True, eq=False)
class Lease:
    """Offsets ``start`` .. ``end``-1 that ``mask`` selects (a byte each; None: all pending, or all acked at the
    end)."""

    id: int
    group: int
    cursor: Cursor
    start: int
    end: int
    attempt: int
    member: int
    deadline_us: int
    mask: bytearray | None = None
    keys: Int64s | None = field(init=False, default=None)
    """In a group with a limit per key: of all its offsets, once they were read. Derived, not state."""
    doubt: int = field(init=False)  # the first offset in doubt; ``end``: none is
    pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.doubt = self.end
        self.pending = self.end - self.start if self.mask is None else self.mask.count(PENDING)

    def copy_mask(self) -> bytearray:
        """Return a copy of the mask, one byte per offset: NOT_LEASED, PENDING, ACKED or TAKEN."""
        if self.mask is not None:
            return bytearray(self.mask)
        return bytearray((PENDING if self.pending else ACKED,)) * (self.end - self.start)

    def pending_from(self, offset: int) -> int:
        """Return how many offsets of the lease from ``offset`` on are pending."""
        if self.mask is None:
            return max(self.end - offset, 0) if self.pending else 0
        return self.mask.count(PENDING, max(offset - self.start, 0))

    def pending_offsets(self, start: int) -> Int64s:
        """Return the pending offsets of the lease from ``start`` on."""
        first = max(start - self.start, 0)
        return np.flatnonzero(np.frombuffer(self.copy_mask(), np.uint8)[first:] == PENDING) + first + self.start

    def holds(self, offset: int) -> bool:
        """Return whether an offset is in the lease and pending."""
        return self.start <= offset < self.end and self.copy_mask()[offset - self.start] == PENDING

    def take(self, start: int, end: int, to: int) -> Int64s | None:
        """Change the pending offsets among ``start`` .. ``end``-1 to ``to`` (ACKED or TAKEN). Returns them; None: all
        of the range was pending."""
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


def pending_runs(mask: bytearray, start: int, end: int) -> list[tuple[int, int]]:
    """Return ranges (start, end) within the indexes ``start`` .. ``end``-1 of a lease's mask: together they hold every
    pending byte, and no settled one.

    A range may include bytes that were never leased, so that a filtered lease stays one run.
    """
    if mask.count(PENDING, start, end) == end - start:
        return [(start, end)]
    part = np.frombuffer(mask, np.uint8)[start:end]
    pending = np.flatnonzero(part == PENDING)
    if not len(pending):
        return []
    # Two neighbours belong to one run if nothing settled lies between them.
    barriers = np.cumsum(part > PENDING)[pending]
    firsts = np.flatnonzero(np.concatenate([[True], barriers[1:] != barriers[:-1]]))
    lasts = np.append(firsts[1:], len(pending)) - 1
    pairs = zip(pending[firsts].tolist(), pending[lasts].tolist(), strict=True)
    return [(start + first, start + last + 1) for first, last in pairs]


def _runs(states: UInt8s) -> tuple[Int64s, UInt8s]:
    """Return where runs of equal bytes begin, and their bytes; ``states`` is not empty."""
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(states[1:] != states[:-1]) + 1])
    return starts, states[starts]
