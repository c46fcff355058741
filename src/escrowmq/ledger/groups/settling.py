"""Decides acknowledgements row by row. Reads the state, changes nothing.

Rules:

1. A row applies to those messages of its range that are pending in the lease; others in the lease's range are skipped.
   It is OK if it settled something, or (ACK) if this lease acked something of it before; else LEASE_LOST.
2. Rows see the effect of earlier rows: each lease in a batch is drafted on a copy of its mask.
3. A NACK counts the attempt and gives the message back after the given delay, else the back-off; the last attempt makes
   it a dead letter with its cause. The causes of earlier attempts are events of their own (FAILED), which change no
   state: they are for the message's history.
4. In an ordered lease the later pending messages of its key are released with a message that is given back or dead;
   those of other keys stay. Their attempt is not counted, only raised to 2, so that a repeat differs from a first
   delivery (I23). When such a lease expires, its first pending message failed, and all others are released. What an
   ordered group gets back is logged with its key (KEYED, see ``order.py``).
5. A RELEASE gives back messages that were not handed to a consumer: they are redelivered at once under the same attempt
   number.
6. A REJECT makes a dead letter of the message at once, whatever its attempt.
7. Messages in doubt (see ``cursors.py``) cannot be settled: LEASE_LOST. A lease that does not end by time needs no
   extension: it is OK, and no event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from escrowmq.errors import Code
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.events import Event, event_of, event_of_rows
from escrowmq.ledger.groups.cursors import ACKED, NOT_LEASED, PENDING, TAKEN, Lease, pending_runs
from escrowmq.ledger.groups.failed import Redelivery
from escrowmq.ledger.groups.order import UNKNOWN
from escrowmq.message.limits import MAX_CAUSE
from escrowmq.model import Act
from escrowmq.schemas import Kind

RELEASED = -1  # the ``due_us`` of a RETRIED row whose messages did not fail: released at once, not counted
UNSEEN = -2
"""The ``due_us`` of a RETRIED row whose messages no consumer received: released at once under the same attempt."""


@dataclass(slots=True)
class Draft:
    """A lease with the changes of this batch so far."""

    lease: Lease
    limit: int  # indexes from here on cannot be settled
    mask: bytearray = field(init=False)
    pending: int = field(init=False)
    keys: Int64s | None = None
    """In an ordered group: the keys of the messages pending when the first one was given back, by index."""

    def __post_init__(self) -> None:
        self.mask, self.pending = self.lease.copy_mask(), self.lease.pending

    def pending_at(self, first: int, end: int) -> Int64s:
        """Return the indexes in the lease's mask, among ``first`` .. ``end``-1, that are pending."""
        return np.flatnonzero(np.frombuffer(bytes(self.mask[first:end]), np.uint8) == PENDING) + first

    def mark(self, first: int, end: int, count: int, to: int) -> list[tuple[int, int]]:
        """Change the pending messages among the indexes ``first`` .. ``end``-1 to ``to`` (ACKED or TAKEN) in this
        draft; ``count`` is their number. Returns their index ranges, as :func:`pending_runs`."""
        runs = pending_runs(self.mask, first, end)
        self.pending -= count
        self.mask[first:end] = self.mask[first:end].replace(bytes((PENDING,)), bytes((to,)))
        return runs


@dataclass(slots=True)
class Settling:
    """Collects the events of a batch of acknowledgements, or of expired leases."""

    redelivery: Redelivery
    ordered: bool
    now_us: int
    max_delay_us: int
    keys_of: Callable[[int, Int64s], Int64s]  # returns the keys of offsets of a queue id; used in ordered groups only
    acked: list[list[int]] = field(default_factory=list)
    retried: list[list[int]] = field(default_factory=list)
    dead: list[tuple[int, int, int, str]] = field(default_factory=list)
    failed: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Failures that are retried, with the consumer's cause."""
    extended: list[list[int]] = field(default_factory=list)
    keyed: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)
    """Group, queue id, offsets given back, and their keys."""
    drafts: dict[int, Draft] = field(default_factory=dict)

    def settle(self, lease: Lease | None, start: int, count: int, act: int, delay_us: int, cause: str | None) -> Code:
        """Settle one row of a SETTLING batch: ``act`` on ``count`` messages of ``lease`` (None: unknown) from offset
        ``start``. Collects the events, and returns the row's code: OK, LEASE_LOST, BAD_DELAY or BAD_REQUEST.
        ``delay_us``: of a NACK (-1: the back-off) or an EXTEND."""
        if lease is None:
            return Code.LEASE_LOST
        if (draft := self.drafts.get(lease.id)) is None:
            draft = self.drafts[lease.id] = Draft(lease, lease.doubt - lease.start)
        if not draft.pending and ACKED not in draft.mask:
            return Code.LEASE_LOST  # it ended in this batch, and will not be remembered
        first, end = start - lease.start, start - lease.start + count
        if count < 1 or first < 0 or end > lease.end - lease.start:
            return Code.BAD_REQUEST
        if first >= draft.limit:
            done = act == Act.ACK and not draft.mask.count(PENDING, first, end) and draft.mask.count(ACKED, first, end)
            return Code.OK if done else Code.LEASE_LOST
        end = min(end, draft.limit)
        pending = draft.mask.count(PENDING, first, end)
        if act == Act.ACK:
            if not pending:
                return _nothing_pending(draft.mask, first, end, Code.OK)
            _collect(self.acked, lease, draft.mark(first, end, pending, ACKED))
            return Code.OK
        if act == Act.EXTEND:
            return self._extend(draft, delay_us)
        if act == Act.NACK and not -1 <= delay_us <= self.max_delay_us:
            return Code.BAD_DELAY
        if act not in (Act.NACK, Act.RELEASE, Act.REJECT):
            return Code.BAD_REQUEST
        if not pending:
            return _nothing_pending(draft.mask, first, end, Code.LEASE_LOST)
        if act == Act.RELEASE:
            keys = self._keys(draft, first, end)
            self._give_back(draft, first, end, pending, UNSEEN)
            self._release_later(draft, end, keys)
            return Code.OK
        if act == Act.REJECT:
            self._bury(draft, first, end, pending, (cause or "rejected by the consumer")[:MAX_CAUSE])
            return Code.OK
        if cause and lease.attempt < self.redelivery.attempts:
            _report(self.failed, lease, pending_runs(draft.mask, first, end), cause[:MAX_CAUSE])
        delay = None if delay_us < 0 else delay_us
        self.fail(draft, first, end, pending, delay, cause or "not accepted by the consumer")
        return Code.OK

    def _extend(self, draft: Draft, delay_us: int) -> Code:
        if not draft.pending:
            return Code.LEASE_LOST
        if delay_us < 1 or delay_us > self.max_delay_us:
            return Code.BAD_DELAY
        if draft.lease.deadline_us != NEVER_US:
            self.extended.append([draft.lease.id, self.now_us + delay_us])
        return Code.OK

    def fail(self, draft: Draft, first: int, end: int, pending: int, delay_us: int | None, cause: str) -> None:
        """Fail the pending messages among the indexes ``first`` .. ``end``-1 of a lease; ``pending`` is their number.
        They are retried after ``delay_us`` (None: the back-off); after the last attempt they are dead letters."""
        attempt, attempts = draft.lease.attempt, self.redelivery.attempts
        if attempt >= attempts:
            self._bury(draft, first, end, pending, f"{cause[:MAX_CAUSE]}, attempt {attempt} of {attempts}")
            return
        keys = self._keys(draft, first, end)
        delay_us = self.redelivery.wait_us(attempt) if delay_us is None else delay_us
        self._give_back(draft, first, end, pending, self.now_us + delay_us)
        self._release_later(draft, end, keys)

    def _bury(self, draft: Draft, first: int, end: int, pending: int, reason: str) -> None:
        """Make dead letters, with ``reason`` as their cause, of the pending messages among the indexes ``first`` ..
        ``end``-1 of a lease; ``pending`` is their number."""
        keys = self._keys(draft, first, end)
        _report(self.dead, draft.lease, draft.mark(first, end, pending, TAKEN), reason)
        self._release_later(draft, end, keys)

    def _keys(self, draft: Draft, first: int, end: int) -> Int64s:
        """Return the keys of the pending messages among the indexes ``first`` .. ``end``-1 of a lease; empty if the
        group is not ordered. They are read once for the whole lease."""
        if not self.ordered:
            return _NO_KEYS
        if draft.keys is None:
            pending = draft.pending_at(0, len(draft.mask))
            draft.keys = np.full(len(draft.mask), UNKNOWN, np.int64)
            draft.keys[pending] = self.keys_of(draft.lease.cursor.queue_id, pending + draft.lease.start)
        return draft.keys[draft.pending_at(first, end)]

    def _release_later(self, draft: Draft, end: int, keys: Int64s) -> None:
        """In an ordered group, release the pending messages of the lease from index ``end`` on that have one of
        ``keys``: they must not overtake those that were given back before."""
        later = draft.pending_at(end, len(draft.mask)) if self.ordered else _NO_KEYS
        if not len(later):
            return
        theirs = self._keys(draft, end, len(draft.mask))
        chosen = np.isin(theirs, keys)
        if UNKNOWN in keys:
            chosen[:] = True
        elif UNKNOWN in theirs:  # it may be of these keys, and what follows it of its own
            chosen[(theirs == UNKNOWN).argmax() :] = True
        edges = np.flatnonzero(np.diff(chosen)) + 1
        for run in np.split(later, edges)[0 if chosen[0] else 1 :: 2]:
            self._give_back(draft, int(run[0]), int(run[-1]) + 1, len(run), RELEASED)

    def _give_back(self, draft: Draft, first: int, end: int, pending: int, due_us: int) -> None:
        if self.ordered:
            keys, offsets = self._keys(draft, first, end), draft.pending_at(first, end) + draft.lease.start
            self.keyed.append((draft.lease.group, draft.lease.cursor.queue_id, offsets, keys))
        _collect(self.retried, draft.lease, draft.mark(first, end, pending, TAKEN), [due_us])

    def expire(self, lease: Lease, cause: str = "lease expired", delay_us: int | None = None) -> None:
        """Fail the pending messages of a lease that expired or was fenced; in an ordered group only the first of them,
        and release the others. ``delay_us`` None: the back-off."""
        draft = Draft(lease, lease.end - lease.start)
        first = draft.mask.index(PENDING)
        if not self.ordered:
            self.fail(draft, first, draft.limit, draft.pending, delay_us, cause)
            return
        self.fail(draft, first, first + 1, 1, delay_us, cause)
        if draft.pending:
            self._give_back(draft, first + 1, draft.limit, draft.pending, RELEASED)

    def give_up(self, lease: Lease, due_us: int = UNSEEN) -> None:
        """Release the pending messages of a lease at once, without counting its attempt. ``due_us`` is not a time but
        the reason: UNSEEN (no consumer started them), or RELEASED (their group is paused)."""
        draft = Draft(lease, lease.end - lease.start)
        self._give_back(draft, draft.mask.index(PENDING), draft.limit, draft.pending, due_us)

    def events(self) -> tuple[Event, ...]:
        """Return the events collected so far. Rows of one batch are disjoint, so only two orders matter: an extension
        comes before the rest, and a cause before the failure that it explains."""
        collected: dict[Kind, Sequence[Sequence[Any]]] = {
            Kind.EXTENDED: self.extended,
            Kind.ACKED: self.acked,
            Kind.FAILED: self.failed,
            Kind.RETRIED: self.retried,
            Kind.DEAD: self.dead,
        }
        events = [event_of_rows(kind, rows, keep=True) for kind, rows in collected.items() if rows]
        return (*events, *keyed_events(self.keyed))


_NO_KEYS: Int64s = np.empty(0, np.int64)


def keyed_events(parts: Sequence[tuple[int, int, Int64s, Int64s]]) -> list[Event]:
    """Return the known keys of messages given back (group, queue id, offsets, keys of each part) as one KEYED event in
    a list; empty if no key is known."""
    if not parts:
        return []
    sizes = [len(offsets) for _, _, offsets, _ in parts]
    groups, queue_ids, offsets, keys = zip(*parts, strict=True)
    columns = (np.repeat(groups, sizes), np.repeat(queue_ids, sizes), np.concatenate(offsets), np.concatenate(keys))
    known = columns[3] != UNKNOWN
    return [event_of(Kind.KEYED, *(column[known] for column in columns))] if known.any() else []


def _collect(rows: list[list[int]], lease: Lease, runs: list[tuple[int, int]], due_us: Sequence[int] = ()) -> None:
    """Add a row (lease id, first offset, count, then ``due_us``) for each index range of a lease; a range that
    continues the last row extends it."""
    for first, last in runs:
        start, tail = lease.start + first, rows[-1] if rows else [-1, 0, 0]
        if tail[0] == lease.id and tail[1] + tail[2] == start and tail[3:] == [*due_us]:
            tail[2] += last - first
        else:
            rows.append([lease.id, start, last - first, *due_us])


def _report(rows: list[tuple[int, int, int, str]], lease: Lease, runs: Sequence[tuple[int, int]], cause: str) -> None:
    rows.extend((lease.id, lease.start + first, last - first, cause) for first, last in runs)


def _nothing_pending(mask: bytearray, first: int, end: int, if_acked: Code) -> Code:
    """Return the code of a row whose indexes ``first`` .. ``end``-1 of a lease's mask have no pending message:
    ``if_acked`` if some were acked, BAD_REQUEST if none was ever in the lease, else LEASE_LOST."""
    if mask.count(ACKED, first, end):
        return if_acked
    return Code.BAD_REQUEST if mask.count(NOT_LEASED, first, end) == end - first else Code.LEASE_LOST
