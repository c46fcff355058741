"""Decides acknowledgements row by row. Reads the state, changes nothing.

Rules:

1. A row acts on those messages of its range that are pending in the lease; others inside the lease's range are passed
   over. It is OK if it settled something, or (ACK) if this lease acked something of it before; else LEASE_LOST.
2. Rows see what the rows before them did: each lease that a batch names is drafted on a copy of its mask.
3. A NACK charges the attempt and gives the message back after the asked delay, else the back-off; the last attempt
   makes it a dead letter with its cause. The causes of the attempts before it are events of their own (FAILED), which
   change nothing: a person reads them in the message's history.
4. In an ordered lease the later pending messages of its key are released together with a message that is given back or
   dead; those of other keys stay. They are not charged: their attempt is only raised to 2, so that a repeat is always
   distinguished from a first delivery (I23). When such a lease expires, its first pending message is the one that
   failed, and all others are released. What an ordered group gets back is logged with its key (KEYED, see
   ``order.py``).
5. A RELEASE gives back messages that no consumer was handed: they are redelivered at once under the same attempt
   number.
6. What is in doubt in a lease (see ``cursors.py``) is out of reach of its rows: LEASE_LOST. A lease that does not end
   by time needs no extension: it is OK, and no event.
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

RELEASED = -1
"""The ``due_us`` of a RETRIED row whose messages did not fail: let go at once, not charged."""
UNSEEN = -2
"""The ``due_us`` of a RETRIED row whose messages no consumer was handed: let go at once, their attempt is still to
come.
"""


@dataclass(slots=True)
class Draft:
    """A lease with what this batch did to it so far."""

    lease: Lease
    mask: bytearray
    pending: int
    limit: int
    """Indexes from here on are out of reach."""
    keys: Int64s | None = None
    """In an ordered group: the keys of what was pending when the first of it was given back, by index."""

    def pending_from(self, a: int, b: int) -> Int64s:
        """Indexes ``a`` .. ``b``-1 that are pending."""
        return np.flatnonzero(np.frombuffer(bytes(self.mask[a:b]), np.uint8) == PENDING) + a


@dataclass(slots=True)
class Settling:
    """Collects the events of a batch of acknowledgements, or of expired leases."""

    redelivery: Redelivery
    ordered: bool
    now_us: int
    max_delay_us: int
    keys_of: Callable[[int, Int64s], Int64s]
    """The keys of offsets of a queue id; asked in ordered groups only."""
    acked: list[list[int]] = field(default_factory=list)
    retried: list[list[int]] = field(default_factory=list)
    dead: list[tuple[int, int, int, str]] = field(default_factory=list)
    failed: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Failures that are retried, with the cause that the consumer named."""
    extended: list[list[int]] = field(default_factory=list)
    keyed: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)
    """Group, queue id, offsets that are given back, and their keys."""
    drafts: dict[int, Draft] = field(default_factory=dict)

    def settle(self, lease: Lease | None, start: int, count: int, act: int, delay_us: int, cause: str | None) -> Code:
        """One row of a SETTLING batch; its code."""
        if lease is None:
            return Code.LEASE_LOST
        draft = self.drafts.get(lease.id)
        if draft is None:
            mask = lease.copy_mask()
            draft = self.drafts[lease.id] = Draft(lease, mask, lease.pending, lease.doubt - lease.start)
        if not draft.pending and ACKED not in draft.mask:
            return Code.LEASE_LOST  # ended above, and nothing will be remembered of it
        a, b = start - lease.start, start - lease.start + count
        if count < 1 or a < 0 or b > lease.end - lease.start:
            return Code.BAD_REQUEST
        if a >= draft.limit:
            done = act == Act.ACK and not draft.mask.count(PENDING, a, b) and draft.mask.count(ACKED, a, b)
            return Code.OK if done else Code.LEASE_LOST
        b = min(b, draft.limit)
        pending = draft.mask.count(PENDING, a, b)
        if act == Act.ACK:
            if not pending:
                return _nothing_pending(draft.mask, a, b, Code.OK)
            _collect(self.acked, lease, pending_runs(draft.mask, a, b))
            _mark(draft, a, b, pending, ACKED)
            return Code.OK
        if act == Act.EXTEND:
            return self._extend(draft, delay_us)
        nack = act == Act.NACK
        if nack and not -1 <= delay_us <= self.max_delay_us:
            return Code.BAD_DELAY
        if not nack and act != Act.RELEASE:
            return Code.BAD_REQUEST
        if not pending:
            return _nothing_pending(draft.mask, a, b, Code.LEASE_LOST)
        if nack:
            if cause and lease.attempt < self.redelivery.attempts:
                runs = pending_runs(draft.mask, a, b)
                self.failed.extend(
                    (lease.id, lease.start + first, last - first, cause[:MAX_CAUSE]) for first, last in runs
                )
            self.fail(draft, a, b, pending, None if delay_us < 0 else delay_us, cause or "not accepted by the consumer")
        else:
            keys = self._keys(draft, a, b)
            self._give_back(draft, a, b, pending, UNSEEN)
            self._let_go(draft, b, keys)
        return Code.OK

    def _extend(self, draft: Draft, delay_us: int) -> Code:
        if not draft.pending:
            return Code.LEASE_LOST
        if delay_us < 1 or delay_us > self.max_delay_us:
            return Code.BAD_DELAY
        if draft.lease.deadline_us == NEVER_US:
            return Code.OK
        self.extended.append([draft.lease.id, self.now_us + delay_us])
        return Code.OK

    def fail(self, draft: Draft, a: int, b: int, pending: int, delay_us: int | None, cause: str) -> None:
        """Fail the ``pending`` messages of ``a`` to ``b`` (indexes in the lease); ``delay_us`` None: the back-off."""
        lease, keys = draft.lease, self._keys(draft, a, b)
        if lease.attempt >= self.redelivery.attempts:
            reason = f"{cause[:MAX_CAUSE]}, attempt {lease.attempt} of {self.redelivery.attempts}"
            runs = pending_runs(draft.mask, a, b)
            self.dead.extend((lease.id, lease.start + first, last - first, reason) for first, last in runs)
            _mark(draft, a, b, pending, TAKEN)
        else:
            if delay_us is None:
                delay_us = self.redelivery.wait_us(lease.attempt)
            self._give_back(draft, a, b, pending, self.now_us + delay_us)
        self._let_go(draft, b, keys)

    def _keys(self, draft: Draft, a: int, b: int) -> Int64s:
        """In order: the keys of what is pending of ``a`` .. ``b``. They are looked up once for the whole lease."""
        if not self.ordered:
            return _NO_KEYS
        if draft.keys is None:
            pending = draft.pending_from(0, len(draft.mask))
            draft.keys = np.full(len(draft.mask), UNKNOWN, np.int64)
            draft.keys[pending] = self.keys_of(draft.lease.cursor.queue_id, pending + draft.lease.start)
        return draft.keys[draft.pending_from(a, b)]

    def _let_go(self, draft: Draft, b: int, keys: Int64s) -> None:
        """In order, nothing of ``keys`` that comes later in the lease continues without what was given back. What of it
        is in doubt then is what never reached the member."""
        later = draft.pending_from(b, len(draft.mask)) if self.ordered else _NO_KEYS
        if not len(later):
            return
        theirs = self._keys(draft, b, len(draft.mask))
        chosen = np.isin(theirs, keys)
        if UNKNOWN in keys:
            chosen[:] = True
        elif UNKNOWN in theirs:  # it may be of these keys, and what follows it of its own
            chosen[(theirs == UNKNOWN).argmax() :] = True
        edges = np.flatnonzero(np.diff(chosen)) + 1
        for run in np.split(later, edges)[0 if chosen[0] else 1 :: 2]:
            self._give_back(draft, int(run[0]), int(run[-1]) + 1, len(run), RELEASED)

    def _give_back(self, draft: Draft, a: int, b: int, pending: int, due_us: int) -> None:
        if self.ordered:
            keys = self._keys(draft, a, b)
            offsets = draft.pending_from(a, b) + draft.lease.start
            self.keyed.append((draft.lease.group, draft.lease.cursor.queue_id, offsets, keys))
        _collect(self.retried, draft.lease, pending_runs(draft.mask, a, b), [due_us])
        _mark(draft, a, b, pending, TAKEN)

    def expire(self, lease: Lease, cause: str = "lease expired", delay_us: int | None = None) -> None:
        """Expire a lease: its pending messages failed (in order: the first of them did)."""
        draft = Draft(lease, lease.copy_mask(), lease.pending, lease.end - lease.start)
        a = draft.mask.index(PENDING)
        if not self.ordered:
            self.fail(draft, a, draft.limit, draft.pending, delay_us, cause)
            return
        self.fail(draft, a, a + 1, 1, delay_us, cause)
        if draft.pending:
            self._give_back(draft, a + 1, draft.limit, draft.pending, RELEASED)

    def give_up(self, lease: Lease, due_us: int = UNSEEN) -> None:
        """Give back a lease that nobody started (or, RELEASED, its group is paused): all that is pending in it is given
        back, and the attempt does not count.
        """
        draft = Draft(lease, lease.copy_mask(), lease.pending, lease.end - lease.start)
        self._give_back(draft, draft.mask.index(PENDING), draft.limit, draft.pending, due_us)

    def events(self) -> tuple[Event, ...]:
        """Return what was collected.

        The rows of one batch are disjoint, so only two things have an order: an extension comes before the rest, and a
        cause before the failure that it explains.
        """
        kinds = (Kind.EXTENDED, Kind.ACKED, Kind.FAILED, Kind.RETRIED, Kind.DEAD)
        collected: tuple[Sequence[Sequence[Any]], ...] = (
            self.extended,
            self.acked,
            self.failed,
            self.retried,
            self.dead,
        )
        events = [event_of_rows(kind, rows, keep=True) for kind, rows in zip(kinds, collected, strict=True) if rows]
        return (*events, *keyed_events(self.keyed))


_NO_KEYS: Int64s = np.empty(0, np.int64)


def keyed_events(parts: Sequence[tuple[int, int, Int64s, Int64s]]) -> list[Event]:
    """Return the keys of retries as a KEYED event (group, queue id, offsets, keys in each part); none without known
    keys."""
    if not parts:
        return []
    sizes = [len(offsets) for _, _, offsets, _ in parts]
    groups, queue_ids = (np.repeat([part[column] for part in parts], sizes) for column in (0, 1))
    offsets, keys = (np.concatenate([part[column] for part in parts]) for column in (2, 3))
    known = keys != UNKNOWN
    if not known.any():
        return []
    return [event_of(Kind.KEYED, groups[known], queue_ids[known], offsets[known], keys[known])]


def _collect(rows: list[list[int]], lease: Lease, runs: list[tuple[int, int]], due_us: Sequence[int] = ()) -> None:
    """Add a row for each index range of a lease; a range that continues the last row makes that one longer."""
    for first, last in runs:
        start, tail = lease.start + first, rows[-1] if rows else None
        if (
            tail is not None
            and tail[0] == lease.id
            and tail[1] + tail[2] == start
            and (not due_us or tail[3:] == due_us)
        ):
            tail[2] += last - first
        else:
            rows.append([lease.id, start, last - first, *due_us])


def _mark(draft: Draft, a: int, b: int, pending: int, to: int) -> None:
    draft.pending -= pending
    if pending == b - a:
        draft.mask[a:b] = bytes((to,)) * pending
    else:
        draft.mask[a:b] = draft.mask[a:b].replace(bytes((PENDING,)), bytes((to,)))


def _nothing_pending(mask: bytearray, a: int, b: int, if_acked: Code) -> Code:
    """Return the code of a row that has nothing to do: already done by this lease, never in it, or lost."""
    if mask.count(ACKED, a, b):
        return if_acked
    return Code.BAD_REQUEST if mask.count(NOT_LEASED, a, b) == b - a else Code.LEASE_LOST
