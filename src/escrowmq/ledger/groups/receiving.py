"""Receiving: which messages the next leases hold. Reads the state, changes nothing.

Rules:

1. Retries that are due come first, lowest offset first; then messages that were never delivered. Both passes go round
   the queues, beginning after the queue that was served last, so that no queue starves another.
2. A first delivery takes the next offsets of its queue as one range. What the tags exclude lies inside the range and is
   done with it; what lies before the first match is a range of its own, which holds nothing and makes no lease.
3. Redeliveries after a reset (``cursors.Again``) are leased apart from first deliveries: a lease has one attempt.
4. In an ordered group a queue has one lease at a time, and while it has retries nothing but they is leased: no message
   overtakes one of its key that failed (``order.py``).
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
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.schemas import Kind

SPAN = 262_144
"""Offsets that one range with messages may span, in search of the group's tags; bounds a lease's mask."""

MAX_PASSED = 4 << 20
"""Offsets without a match that one receive may pass over in one queue; bounds its work."""


@dataclass(slots=True)
class Plan:
    """Leases to be: rows of a LEASED event (``start, count, attempt`` of ``queue_id``), and the messages they hold."""

    budget: int
    """Messages that may still be added."""
    room: int
    """Leases that may still be added."""
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    held: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)
    """Row, queue id, offsets and log positions."""
    keyed: list[tuple[int, int, Int64s, Int64s]] = field(default_factory=list)
    """Group, queue id, offsets that are taken up into the retries of an ordered group, and their keys."""

    @property
    def full(self) -> bool:
        return self.budget <= 0 or self.room <= 0

    def add(self, cursor: Cursor, queue: QueueIndex, start: int, end: int, attempt: int, chosen: Int64s | None) -> None:
        """Lease ``chosen`` offsets (None: all) of the range ``start`` .. ``end``-1."""
        self.rows.append((cursor.queue_id, start, end - start, attempt))
        if chosen is not None and not len(chosen):
            return
        positions = queue.positions(start, end)
        offsets = np.arange(start, end) if chosen is None else chosen
        positions = cursor.edited.instead(offsets, positions if chosen is None else positions[offsets - start])
        self.held.append((len(self.rows) - 1, cursor.queue_id, offsets, positions))
        self.budget -= len(offsets)
        self.room -= 1

    def event(self, group: int, member: int, deadline_us: int, position: int) -> Event | None:
        """Return the LEASED event, its first row standing at ``position``; None without rows."""
        if not self.rows:
            return None
        rows = [
            (id, group, queue_id, start, count, attempt, member, deadline_us)
            for id, (queue_id, start, count, attempt) in enumerate(self.rows, position)
        ]
        return event_of_rows(Kind.LEASED, rows, keep=True)

    def pieces(self, position: int) -> list[Piece]:
        """Return the content of the leases; the event's first row gets ``position``."""
        return [
            Piece(position + row, queue_id, self.rows[row][3], offsets, positions)
            for row, queue_id, offsets, positions in self.held
        ]


class Piece(NamedTuple):
    """The messages of one lease."""

    lease: int
    queue_id: int
    attempt: int
    offsets: Int64s
    positions: Int64s


def leased(pieces: Sequence[Piece]) -> Leased:
    """Return the messages of all pieces, in the order in which they are to be delivered."""
    if not pieces:
        return nothing_leased()
    if len(pieces) == 1:
        lease, queue_id, attempt, of, at = pieces[0]
        size = len(of)
        return Leased(np.full(size, lease), np.full(size, queue_id), of, np.full(size, attempt), at)
    leases, queue_ids, attempts, offsets, positions = zip(*pieces, strict=True)
    sizes = [len(piece.offsets) for piece in pieces]
    by_message = [np.repeat(column, sizes) for column in (leases, queue_ids, attempts)]
    return Leased(by_message[0], by_message[1], np.concatenate(offsets), by_message[2], np.concatenate(positions))


def rotated(queue_ids: Sequence[int], last: int) -> list[int]:
    """Rising ``queue_ids``, beginning after ``last``."""
    turn = bisect_right(queue_ids, last)
    return [*queue_ids[turn:], *queue_ids[:turn]]


def add_retries(plan: Plan, cursor: Cursor, queue: QueueIndex, now_us: int) -> None:
    """Lease what is due again."""
    retries = cursor.retries
    for first, last in retries.due_runs(now_us):
        if plan.full:
            return
        last = min(last, first + plan.budget)
        offsets = retries.offsets[first:last]
        start, end = int(offsets[0]), int(offsets[-1]) + 1
        chosen = None if end - start == last - first else offsets
        plan.add(cursor, queue, start, end, int(retries["attempt"][first]), chosen)


def add_last(plan: Plan, cursor: Cursor, queue: QueueIndex, now_us: int, attempts: int) -> bool:
    """Lease the first message that is due for its last attempt; whether there is one."""
    retries = cursor.retries
    due = np.flatnonzero((retries["due_us"] <= now_us) & (retries["attempt"] >= attempts))
    if not len(due):
        return False
    row = int(due[0])
    offset = int(retries.offsets[row])
    plan.add(cursor, queue, offset, offset + 1, int(retries["attempt"][row]), None)
    return True


def add_in_order(
    plan: Plan,
    group: int,
    cursor: Cursor,
    queue: QueueIndex,
    tags: list[int] | None,
    now_us: int,
    repeated: int,
    keys_of: Callable[[int, Int64s], Int64s],
) -> None:
    """Lease what is free of an ordered group's queue with retries, having taken up what follows if there is room for
    it."""
    if not order.has_work(cursor, queue.end, now_us):
        return
    rows = order.waiting(cursor)
    if order.may_take_up(cursor, queue.end) and order.fresh(rows, now_us) < plan.budget:
        start = cursor.next
        end, chosen = _search(queue, start, queue.end, tags, order.TAKE_UP)
        if not len(chosen):
            plan.add(cursor, queue, start, end, 1, _NONE)
        else:
            keys = keys_of(cursor.queue_id, chosen)
            known = int(np.append(keys == order.UNKNOWN, True).argmax())  # an unreadable one waits until it is alone
            plan.keyed.append((group, cursor.queue_id, chosen[:known], keys[:known]))
            attempts = cursor.again.attempts(chosen[:known], repeated)
            rows = order.with_taken(rows, chosen[:known], attempts, keys[:known], now_us)
    if (attempt := order.next_attempt(rows, now_us)) is None:
        return
    offsets = rows.offsets[order.deliverable(rows, attempt, now_us)][: plan.budget]
    offsets = offsets[offsets < offsets[0] + SPAN]
    start, end = int(offsets[0]), int(offsets[-1]) + 1
    plan.add(cursor, queue, start, end, attempt, None if end - start == len(offsets) else offsets)


def add_fresh(
    plan: Plan, cursor: Cursor, queue: QueueIndex, ordered: bool, tags: list[int] | None, repeated: int
) -> None:
    """Lease the next range of what was never delivered, or not since a reset: that as attempt ``repeated`` if it was
    before."""
    if plan.full or cursor.next >= queue.end or (ordered and (cursor.leases or len(cursor.retries))):
        return
    start, room = cursor.next, plan.room
    last = min(queue.end, start + MAX_PASSED)
    while start < last and not plan.full and not (ordered and plan.room < room):
        again, end = cursor.again.stretch(start, last)
        attempt = repeated if again else 1
        if tags is None:
            until = min(end, start + plan.budget)
            plan.add(cursor, queue, start, until, attempt, None)
        else:
            first = until = _first_match(queue, start, end, tags)
            if first > start:
                plan.add(cursor, queue, start, first, attempt, _NONE)
            if first < end:
                until, chosen = _search(queue, first, end, tags, plan.budget)
                plan.add(cursor, queue, first, until, attempt, chosen)
                if until < end:
                    return
        start = until


_NONE: Int64s = np.empty(0, np.int64)


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
    """Return at most ``most`` offsets from ``start`` to before ``last`` that have one of the tags (None: any), and
    where the search ended."""
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
    """Return the numbers of a filter's tags; None: no filter. A tag that no message has had yet matches nothing yet."""
    if not tags:
        return None
    return [number for tag in tags if (number := topics.tag_number(tag)) is not None]


def match_tags(queue: QueueIndex, start: int, end: int, tags: list[int]) -> Bools:
    """Return which of the offsets ``start`` .. ``end``-1 have one of the tags."""
    found = queue.tags(start, end)
    if len(tags) == 1:
        return np.asarray(found == tags[0], bool)
    return np.isin(found, tags)
