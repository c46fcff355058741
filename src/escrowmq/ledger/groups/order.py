"""Order by key: what an ordered group may receive while messages of some keys wait for their next delivery.

Rules:

1. A queue has one lease at a time. While it has no retries, a lease takes the next offsets, whatever their keys.
2. While it has retries, only retries are leased. The messages that follow are first *taken up* into them with their
   keys (KEYED), in order, so that messages of all other keys continue; those of a failed key wait behind it.
3. Of the retries of one key the lowest offset is delivered first, once it is due; others of the key only together with
   all lower ones, in one lease.
4. A lease has one attempt number: that of the free retry that has been due for the longest time. So keys take turns.
5. The ledger does not store keys. Its holder provides those of failed messages and of those taken up; they are in the
   log then, for replay. Messages without a key are one key of their queue.
6. A retry whose key is UNKNOWN (its record is damaged, or its frames are those of version 0.1.0) might be of any key:
   as long as there is one, all retries of the queue count as one key, and nothing is taken up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from escrowmq.ledger.columns.arrays import Bools, Int32s, Int64s
from escrowmq.ledger.groups.cursors import Cursor
from escrowmq.message.hashes import UInt64s

UNKNOWN = -1  # the key of a message whose key cannot be read

MAX_BEHIND = 16_384
"""Retries of a queue beyond which nothing is taken up: then the whole queue waits for the failed ones."""

TAKE_UP = 256  # messages of a queue taken up by one receive: their keys are read on the writer's thread

KeysOf = Callable[[Int64s], Int64s]
"""Maps log positions to the keys of messages: :func:`numbers` of their hashes, or UNKNOWN."""


def numbers(hashes: UInt64s) -> Int64s:
    """Return key hashes as they are stored: 63 bits, never negative. Keys of equal numbers only delay each other."""
    return (hashes >> np.uint64(1)).astype(np.int64)


class Waiting(NamedTuple):
    """Retries of one queue by rising offset, arrays of one length."""

    offsets: Int64s
    attempts: Int32s
    due_us: Int64s
    keys: Int64s

    @property
    def knows_all(self) -> bool:
        """Return whether every key is known."""
        return not bool((self.keys == UNKNOWN).any())


def read_waiting(cursor: Cursor) -> Waiting:
    """Return the retries of a cursor; views, valid until its next change."""
    retries = cursor.retries
    return Waiting(retries.offsets, retries["attempt"], retries["due_us"], retries["key"])


def with_taken(rows: Waiting, offsets: Int64s, attempts: Int32s, keys: Int64s, now_us: int) -> Waiting:
    """Return ``rows`` with further rows behind them: messages at ``offsets`` that will be taken up, due now, to be
    delivered as ``attempts``."""
    pairs: Any = zip(rows, (offsets, attempts, np.full(len(offsets), now_us), keys), strict=True)
    return Waiting(*map(np.concatenate, pairs))


def select_free(rows: Waiting, ready: Bools) -> Bools:
    """Return which rows are ``ready`` and not behind a row of their key that is not. If a key is unknown, all rows
    count as one key."""
    late = np.flatnonzero(~ready)
    if not len(late):
        return ready
    if not rows.knows_all:
        return np.asarray(np.arange(len(ready)) < late[0], bool)
    keys, firsts = np.unique(rows.keys[late], return_index=True)
    at = np.minimum(keys.searchsorted(rows.keys), len(keys) - 1)
    behind = (keys[at] == rows.keys) & (late[firsts][at] < np.arange(len(ready)))
    return np.asarray(ready & ~behind, bool)


def count_fresh(rows: Waiting, now_us: int) -> int:
    """Return how many rows a lease of attempt 1 could hold now. If these are few, the caller takes up more messages
    whatever else is due, so that a key that fails again at once blocks no other."""
    return int(np.count_nonzero(deliverable(rows, 1, now_us)))


def find_heads(rows: Waiting) -> Int64s:
    """Return the index of the lowest row of each key, rising. If a key is unknown, all rows count as one key."""
    if not len(rows.offsets) or not rows.knows_all:
        return np.arange(min(len(rows.offsets), 1))
    return np.sort(np.unique(rows.keys, return_index=True)[1])


def next_attempt(rows: Waiting, now_us: int) -> int | None:
    """Return the attempt number of the next lease (rule 4); None while no retry is free."""
    due = find_heads(rows)
    due = due[rows.due_us[due] <= now_us]
    return int(rows.attempts[due[rows.due_us[due].argmin()]]) if len(due) else None


def deliverable(rows: Waiting, attempt: int, now_us: int) -> Bools:
    """Return which rows a lease of attempt number ``attempt`` may hold: those that are due and of this attempt, if all
    lower rows of their key are too. While a key is unknown, all rows count as one key."""
    return select_free(rows, (rows.due_us <= now_us) & (rows.attempts == attempt))


def may_take_up(cursor: Cursor, end: int) -> bool:
    """Return whether the next messages of a queue that ends at ``end`` may be taken up: there are some, the retries are
    not too many, and all their keys are known."""
    return cursor.next < end and len(cursor.retries) < MAX_BEHIND and read_waiting(cursor).knows_all


def has_work(cursor: Cursor, end: int, now_us: int) -> bool:
    """Return whether a receive would lease or take up messages now, of a queue that has retries and ends at ``end``."""
    if cursor.leases:
        return False
    if may_take_up(cursor, end):
        return True
    if now_us < cursor.retries.quiet_until_us:
        return False
    rows = read_waiting(cursor)
    cursor.retries.quiet_until_us = int(rows.due_us[find_heads(rows)].min())
    return cursor.retries.quiet_until_us <= now_us
