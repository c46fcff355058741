"""A worker's cache of the keys that are held behind a failed row; the outbox table is authoritative.

A key is held by its RETRYING row, or by a WAITING one that was never sent (with ``on_exhausted="hold_key"``). Rows
behind it become HELD when they are read, and PENDING again, all at once and in their old order, when the head has gone:
sent, discarded, or retried by an operator.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.verdicts import Key
from escrowmq.outbox.tables import State, state_is, trans_message
from escrowmq.platform.failpoints import reach

_c = trans_message.c
ORPHANS_SECONDS = 60.0
"""Interval of the search for HELD rows without a head, which only a changed ``on_exhausted`` or an edit of the table
can leave."""


class Holding:
    """The held keys of one worker's lanes. Used by that worker's thread only.

    ``interval``: seconds between two checks whether an operator has handled a head; more where there are many.
    """

    def __init__(self, dialect: Dialect, waiting_holds: bool, interval: float) -> None:
        self.heads: dict[Key, int] = {}
        self._dialect = dialect
        self._interval = interval
        self._is_head = is_head(waiting_holds)
        self.invalidate()

    def invalidate(self) -> None:
        """Read the heads again before the next read of rows, because the lanes changed."""
        self._next = self._next_orphans = 0.0

    def refresh(self, lanes: Sequence[int]) -> None:
        """Read from the table which rows hold keys in ``lanes``, unless that was done lately; make the HELD rows of
        keys without such a row PENDING."""
        begun = time.monotonic()
        if begun < self._next:
            return
        orphans_too = begun >= self._next_orphans
        with self._dialect.transaction() as connection:
            heads = sa.select(_c.lane, _c.key, _c.seq).where(self._is_head, _c.lane.in_(lanes), _c.key.is_not(None))
            ordered = sorted(connection.execute(heads), key=itemgetter(2), reverse=True)
            found = {(lane, key): seq for lane, key, seq in ordered}  # the lowest of each key
            gone = self.heads.keys() - found.keys()
            if orphans_too:
                held = sa.select(_c.lane, _c.key).where(state_is(State.HELD), _c.lane.in_(lanes)).distinct()
                gone = gone | {(lane, key) for lane, key in connection.execute(held)} - found.keys()
            free(connection, gone)
        reach("relay.freed")
        self.heads = found
        now = time.monotonic()
        self._next = now + max(self._interval, 20 * (now - begun))
        if orphans_too:
            self._next_orphans = now + max(ORPHANS_SECONDS, 20 * (now - begun))

    def split(self, rows: list[Any]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return the rows that may be sent, and number and lane of those behind another row that holds their key."""
        if not self.heads:
            return rows, []
        allowed, behind = [], []
        for row in rows:
            if row.key is not None and self.heads.get((row.lane, row.key), row.seq) < row.seq:
                behind.append((row.seq, row.lane))
            else:
                allowed.append(row)
        return allowed, behind


def is_head(waiting_holds: bool) -> sa.ColumnElement[bool]:
    """Return the condition of rows that hold the later ones of their key: RETRYING; if ``waiting_holds``, also WAITING
    ones that were never sent."""
    retrying = state_is(State.RETRYING)
    never_sent = sa.and_(state_is(State.WAITING), _c.sent_us.is_(None))
    return sa.or_(retrying, never_sent) if waiting_holds else retrying


def free(connection: sa.Connection, keys: Iterable[Key]) -> None:
    """Make the HELD rows of these keys PENDING again."""
    rows = [{"the_lane": lane, "the_key": key} for lane, key in keys]
    if rows:
        mine = (_c.lane == sa.bindparam("the_lane"), _c.key == sa.bindparam("the_key"))
        change = sa.update(trans_message).where(state_is(State.HELD), *mine)
        connection.execute(change.values(state=State.PENDING.value), rows)
