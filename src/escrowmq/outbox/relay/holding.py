"""A worker's cache of the keys that are held back behind a failed row; the outbox table is authoritative.

A key is held by its RETRYING row, or by a WAITING one that was never sent (with ``on_exhausted="hold_key"``). Rows
behind it are HELD when they are met, and PENDING again, all at once and in their old order, when the head has gone:
sent, discarded, or retried by a person.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.verdicts import Key
from escrowmq.outbox.tables import State, state_is, trans_message
from escrowmq.platform.failpoints import reach

_c = trans_message.c
ORPHANS_SECONDS = 60.0
"""How often HELD rows without a head are looked for, which only a change of ``on_exhausted`` or a hand in the table can
leave.
"""


class Holding:
    """The held keys of one worker's lanes. Used by that worker's thread only.

    ``look_seconds``: how often it is looked whether a person has dealt with a head; less often where there are many.
    """

    def __init__(self, dialect: Dialect, waiting_holds: bool, look_seconds: float) -> None:
        self.heads: dict[Key, int] = {}
        self._dialect = dialect
        self._look_seconds = look_seconds
        self._is_head = is_head(waiting_holds)
        self._next = 0.0
        self._next_orphans = 0.0

    def look_soon(self) -> None:
        """Check the lanes again before anything is read, because they changed."""
        self._next = self._next_orphans = 0.0

    def look(self, lanes: Sequence[int]) -> None:
        """If it is time: learn the heads from the table, and free the keys whose head has gone."""
        begun = time.monotonic()
        if begun < self._next:
            return
        orphans_too = begun >= self._next_orphans
        with self._dialect.transaction() as connection:
            found = self._find(connection, lanes)
            gone = self.heads.keys() - found.keys()
            if orphans_too:
                held = sa.select(_c.lane, _c.key).where(state_is(State.HELD), _c.lane.in_(lanes)).distinct()
                gone = gone | {(lane, key) for lane, key in connection.execute(held)} - found.keys()
            free(connection, gone)
        reach("relay.freed")
        self.heads = found
        now = time.monotonic()
        self._next = now + max(self._look_seconds, 20 * (now - begun))
        if orphans_too:
            self._next_orphans = now + max(ORPHANS_SECONDS, 20 * (now - begun))

    def part(self, rows: list[Any]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return the rows that may be sent, and those (number and lane) that are behind a head."""
        if not self.heads:
            return rows, []
        heads = self.heads
        behind = [row.key is not None and heads.get((row.lane, row.key), row.seq) < row.seq for row in rows]
        if not any(behind):
            return rows, []
        allowed = [row for row, held in zip(rows, behind, strict=True) if not held]
        return allowed, [(row.seq, row.lane) for row, held in zip(rows, behind, strict=True) if held]

    def _find(self, connection: sa.Connection, lanes: Sequence[int]) -> dict[Key, int]:
        heads: dict[Key, int] = {}
        found = sa.select(_c.lane, _c.key, _c.seq).where(self._is_head, _c.lane.in_(lanes), _c.key.is_not(None))
        for lane, key, seq in connection.execute(found):
            heads[lane, key] = min(seq, heads.get((lane, key), seq))
        return heads


def is_head(waiting_holds: bool) -> sa.ColumnElement[bool]:
    """Return the rows that hold the later ones of their key."""
    retrying = state_is(State.RETRYING)
    never_sent = sa.and_(state_is(State.WAITING), _c.sent_us.is_(None))
    return sa.or_(retrying, never_sent) if waiting_holds else retrying


def free(connection: sa.Connection, keys: Iterable[Key]) -> None:
    """HELD rows of those keys are PENDING again."""
    rows = [{"the_lane": lane, "the_key": key} for lane, key in keys]
    if rows:
        held = sa.update(trans_message).where(
            state_is(State.HELD), _c.lane == sa.bindparam("the_lane"), _c.key == sa.bindparam("the_key")
        )
        connection.execute(held.values(state=State.PENDING.value), rows)
