"""Receiving: which messages the next leases hold. Reads the state, changes nothing.

Rules:

1. Due retries come first, lowest offset first; then messages never delivered. Both passes start at the queue after the
   one served last, so that no queue starves another.
2. A first delivery takes the next offsets of its queue as one range. Offsets that the tags exclude lie inside the range
   and are done with it; those before the first match are a range of their own without a lease.
3. Redeliveries after a reset (``cursors.Again``) are leased apart from first deliveries: a lease has one attempt.
4. In an ordered group a queue has one lease at a time, and while it has retries only they are leased: no message
   overtakes a failed one of its key (``order.py``).
5. A limit per key (``limits.py``) excludes messages of keys that have no room. All of what such a group receives
   passes through its retries, or, in order, a lease ends before the first of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from escrowmq.ledger.columns.arrays import Bools, Int64s
from escrowmq.ledger.commands import Leased, nothing_leased
from escrowmq.ledger.events import Event, event_of_rows
from escrowmq.ledger.groups import order
from escrowmq.ledger.groups.cursors import Cursor
from escrowmq.ledger.groups.failed import chosen_runs
from escrowmq.ledger.groups.limits import KeyRoom
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.schemas import Kind

SPAN = 262_144  # offsets that one range with messages may span while it is searched for tags; bounds a lease's mask

MAX_PASSED = 4 << 20  # offsets without a match that one receive may pass over in one queue; bounds its work
_NONE: Int64s = np.empty(0, np.int64)


@dataclass(slots=True)
class Plan:
    """Leases to grant to a member of one group, and the messages they hold."""

    group: int
    ordered: bool
    tags: list[int] | None
    now_us: int
    repeated: int  # the attempt of a redelivery that is not charged
    keys_of: Callable[[int, Int64s], Int64s]
    budget: int  # messages that may still be added
    room: int  # leases that may still be added
    by_key: KeyRoom | None = None  # of a group with a limit per key
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Of the LEASED event: queue id, start, count, attempt."""
    held: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)
    """Row, queue id, offsets and log positions."""
    keyed: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)
    """Group, queue id, offsets to take up into the retries of an ordered group, and their keys."""

    @property
    def full(self) -> bool:
        return self.budget <= 0 or self.room <= 0

    def event(self, member: int, deadline_us: int, position: int) -> list[Event]:
        """Return the LEASED event in a list (empty without rows). Its first row gets log ``position``."""
        rows = [
            (id, self.group, queue_id, start, count, attempt, member, deadline_us)
            for id, (queue_id, start, count, attempt) in enumerate(self.rows, position)
        ]
        return [event_of_rows(Kind.LEASED, rows, keep=True)] if rows else []

    def pieces(self, position: int) -> list[Piece]:
        """Return the messages of each lease. ``position``: that of the first row of the LEASED event."""
        return [Piece(position + row, id, self.rows[row][3], *messages) for row, id, *messages in self.held]

    def _add(self, cursor: Cursor, queue: QueueIndex, start: int, end: int, attempt: int, chosen: Int64s) -> None:
        """Add a lease of the offsets ``chosen`` of the range ``start`` .. ``end``-1; none chosen: only pass over it."""
        self.rows.append((cursor.queue_id, start, end - start, attempt))
        if not len(chosen):
            return
        positions = queue.positions(start, end)
        positions = positions if len(chosen) == end - start else positions[chosen - start]
        self.held.append((len(self.rows) - 1, cursor.queue_id, chosen, cursor.edited.instead(chosen, positions)))
        self.budget -= len(chosen)
        self.room -= 1

    def _add_chosen(self, cursor: Cursor, queue: QueueIndex, attempt: int, chosen: Int64s) -> None:
        self._add(cursor, queue, int(chosen[0]), int(chosen[-1]) + 1, attempt, chosen)

    def fill(self, met: Sequence[tuple[Cursor, QueueIndex]]) -> None:
        """Add leases of what the queues ``met`` (each with the group's cursor) have to deliver, until the plan is full:
        first due retries of all queues, then other messages."""
        for cursor, queue in met:
            if len(cursor.retries) and not self.full:
                if self.ordered:
                    self.add_in_order(cursor, queue)
                elif self.by_key is None:
                    self._add_retries(cursor, queue)
        for cursor, queue in met:
            if self.by_key is not None and not self.ordered:
                self._add_by_key(cursor, queue, self.by_key)
            elif not (self.ordered and (cursor.leases or len(cursor.retries))):
                self._add_fresh(cursor, queue)

    def _add_retries(self, cursor: Cursor, queue: QueueIndex) -> None:
        retries = cursor.retries
        for first, last in retries.due_runs(self.now_us):
            if self.full:
                return
            chosen = retries.offsets[first : min(last, first + self.budget)]
            self._add_chosen(cursor, queue, int(retries["attempt"][first]), chosen)

    def add_last(self, cursor: Cursor, queue: QueueIndex, attempts: int) -> bool:
        """Add a lease of the first retry of a queue that is due for its last attempt (number ``attempts``), alone.
        Returns whether there is one."""
        retries = cursor.retries
        due = np.flatnonzero((retries["due_us"] <= self.now_us) & (retries["attempt"] >= attempts))
        if self.by_key is not None:
            due = due[: order.TAKE_UP]
            due = due[self.by_key.select(self.keys_of(cursor.queue_id, retries.offsets[due]))]
        for row in due[:1].tolist():
            self._add_chosen(cursor, queue, int(retries["attempt"][row]), retries.offsets[row : row + 1])
        return len(due) > 0

    def _add_by_key(self, cursor: Cursor, queue: QueueIndex, by_key: KeyRoom) -> None:
        """Lease messages whose keys have room under the limit per key: due retries, then the next messages of the
        queue, which are taken up into the retries."""
        if self.full:
            return
        rows = order.read_waiting(cursor)
        due = np.flatnonzero(rows.due_us <= self.now_us)[: order.MAX_BEHIND]
        unread = due[rows.keys[due] == order.UNKNOWN][: order.TAKE_UP]
        if len(unread):
            keys = self.keys_of(cursor.queue_id, rows.offsets[unread])
            self.keyed.append((self.group, cursor.queue_id, rows.offsets[unread], keys))
            rows = rows._replace(keys=rows.keys.copy())
            rows.keys[unread] = keys
            due = due[(rows.keys[due] != order.UNKNOWN) | (due <= unread[-1])]
        chosen = due[by_key.select(rows.keys[due])]
        if len(chosen) < self.budget and cursor.next < queue.end and len(due) < order.MAX_BEHIND:
            known = len(rows.offsets)
            rows = self._take_up(cursor, queue, rows)
            due = np.append(due, np.arange(known, len(rows.offsets)))
            chosen = due[by_key.select(rows.keys[due])]
        marked = np.zeros(len(rows.offsets), bool)
        marked[chosen[: self.budget]] = True
        for first, last in chosen_runs(rows.offsets, rows.attempts, marked):
            if self.room > 0:
                self._add_chosen(cursor, queue, int(rows.attempts[first]), rows.offsets[first:last])
                by_key.take(rows.keys[first:last])

    def add_in_order(self, cursor: Cursor, queue: QueueIndex) -> None:
        """Lease retries of a queue of an ordered group: those that no earlier message of their key blocks, of one
        attempt number. If few of them are first deliveries, first take up the next messages of the queue."""
        now_us = self.now_us
        if not order.has_work(cursor, queue.end, now_us):
            return
        rows = order.read_waiting(cursor)
        if order.may_take_up(cursor, queue.end) and order.count_fresh(rows, now_us) < self.budget:
            rows = self._take_up(cursor, queue, rows)
        if (attempt := order.next_attempt(rows, now_us)) is not None:
            free = np.flatnonzero(order.deliverable(rows, attempt, now_us))[: self.budget]
            free = free[: self._count_with_room(rows.keys[free])]
            offsets = rows.offsets[free]
            if len(offsets):
                self._add_chosen(cursor, queue, attempt, offsets[offsets < offsets[0] + SPAN])

    def _take_up(self, cursor: Cursor, queue: QueueIndex, rows: order.Waiting) -> order.Waiting:
        """Plan to move the next messages of a queue into its retries, or pass over those that the tags exclude. Returns
        ``rows`` with them. It stops before a message with an unreadable key; if that is the next of the queue, it is
        leased directly (not in order)."""
        start = cursor.next
        end, chosen = _search(queue, start, queue.end, self.tags, order.TAKE_UP)
        if not len(chosen):
            self._add(cursor, queue, start, end, 1, _NONE)
            return rows
        keys = self.keys_of(cursor.queue_id, chosen)
        known = int(np.append(keys == order.UNKNOWN, True).argmax())
        if not known and not self.ordered and self._count_with_room(keys[:1]):
            attempt = int(cursor.again.attempts(chosen[:1], self.repeated)[0])
            self._add(cursor, queue, start, int(chosen[0]) + 1, attempt, chosen[:1])
        chosen, keys = chosen[:known], keys[:known]
        self.keyed.append((self.group, cursor.queue_id, chosen, keys))
        return order.with_taken(rows, chosen, cursor.again.attempts(chosen, self.repeated), keys, self.now_us)

    def _count_with_room(self, keys: Int64s) -> int:
        """Return how many of the messages with these keys, from the first on, a lease may hold under the limit per key,
        and count them as in flight."""
        count = len(keys) if self.by_key is None else self.by_key.count_first(keys)
        if self.by_key is not None:
            self.by_key.take(keys[:count])
        return count

    def _add_fresh(self, cursor: Cursor, queue: QueueIndex) -> None:
        """Lease messages of a queue from the cursor's ``next`` on, passing over those that the tags exclude; one lease
        at most in an ordered group. Their attempt is 1, or ``repeated`` if they were delivered before a reset."""
        start, room = cursor.next, self.room
        last = min(queue.end, start + MAX_PASSED)
        while start < last and not self.full and not (self.ordered and self.room < room):
            again, end = cursor.again.stretch(start, last)
            attempt, tags = self.repeated if again else 1, self.tags
            first = start if tags is None else _first_match(queue, start, end, tags)
            if first > start:
                self._add(cursor, queue, start, first, attempt, _NONE)
            if first < end:
                until, chosen = _search(queue, first, end, tags, self.budget)
                if self.by_key is not None:
                    chosen = chosen[: order.TAKE_UP]
                    chosen = chosen[: self._count_with_room(self.keys_of(cursor.queue_id, chosen))]
                    if not len(chosen):
                        return
                    until = int(chosen[-1]) + 1
                self._add(cursor, queue, first, until, attempt, chosen)
                if until < end and tags is not None:
                    return
                first = until
            start = first


class Piece(NamedTuple):
    """The messages of one lease."""

    lease: int
    queue_id: int
    attempt: int
    offsets: Int64s
    positions: Int64s


def collect_leased(pieces: Sequence[Piece]) -> Leased:
    """Return the messages of all pieces, in the order of delivery."""
    if not pieces:
        return nothing_leased()
    leases, queue_ids, attempts, offsets, positions = zip(*pieces, strict=True)
    sizes = [len(piece.offsets) for piece in pieces]
    lease, queue_id, attempt = (np.repeat(column, sizes) for column in (leases, queue_ids, attempts))
    return Leased(lease, queue_id, np.concatenate(offsets), attempt, np.concatenate(positions))


def rotate(queue_ids: Sequence[int], last: int) -> list[int]:
    """Return rising ``queue_ids`` in rotation: first those above ``last``, then the others."""
    turn = bisect_right(queue_ids, last)
    return [*queue_ids[turn:], *queue_ids[:turn]]


def _first_match(queue: QueueIndex, start: int, last: int, tags: list[int]) -> int:
    """Return the first offset from ``start`` to before ``last`` that has one of the tags; ``last``: none has."""
    step = 256
    while start < last:
        end = min(last, start + step)
        found = match_tags(queue, start, end, tags)
        if found.any():
            return start + int(found.argmax())
        start, step = end, min(2 * step, SPAN)
    return last


def _search(queue: QueueIndex, start: int, last: int, tags: list[int] | None, most: int) -> tuple[int, Int64s]:
    """Search the offsets ``start`` .. ``last``-1, at most SPAN of them, for ones that have one of the tags (None: any).
    Returns where the search ended, and at most ``most`` offsets found."""
    if tags is None:
        end = min(last, start + most)
        return end, np.arange(start, end)
    found: list[Int64s] = []
    last, end, step = min(last, start + SPAN), start, 2 * most
    while end < last and most > 0:
        begin, end = end, min(last, end + step)
        chosen = np.flatnonzero(match_tags(queue, begin, end, tags)) + begin
        if len(chosen) >= most:
            chosen = chosen[:most]
            end = int(chosen[-1]) + 1
        found.append(chosen)
        most, step = most - len(chosen), 2 * step
    return end, np.concatenate(found)


def tag_numbers(tags: Sequence[str], topics: Topics) -> list[int] | None:
    """Return the numbers of a filter's tags; None: no filter. A tag without messages yet is left out."""
    if not tags:
        return None
    return [number for tag in tags if (number := topics.tag_number(tag)) is not None]


def match_tags(queue: QueueIndex, start: int, end: int, tags: list[int]) -> Bools:
    """Return which of the offsets ``start`` .. ``end``-1 have one of the tags."""
    found = queue.tags(start, end)
    return np.asarray(found == tags[0], bool) if len(tags) == 1 else np.isin(found, tags)
