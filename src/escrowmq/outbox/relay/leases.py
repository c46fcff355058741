"""Leases of lanes (groups of keys) by relay workers: shared fairly, taken over from dead workers."""

from __future__ import annotations

import secrets
import time

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.tables import trans_lane, trans_message, trans_relay
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

RENEW = 3
"""A lease is renewed after its length divided by this,"""
SHARE_SECONDS = 2.0
"""but at least this often (s), so that a new worker soon gets its share."""
HUNGRY_SECONDS = 0.25
"""Retry interval (s) of a worker with less than its share of lanes."""


class Leases:
    """The lanes of one worker. Used by that worker's thread only.

    ``owner`` is a name that no worker had before, so a lane is still this worker's if it has this name.
    """

    def __init__(self, dialect: Dialect, name: str, seconds: float) -> None:
        self.owner = f"{name}-{secrets.token_hex(6)}"
        self.lanes: tuple[int, ...] = ()
        self._dialect = dialect
        self._seconds = seconds
        self._next = self._valid_until = 0.0
        self._hungry = True

    @property
    def valid(self) -> bool:
        """Return whether the leases of this worker's lanes still run, by this process's clock, started before the
        database's."""
        return time.monotonic() < self._valid_until

    def announce(self) -> None:
        """Register this worker in the database before it takes its first lane, so that workers that start together
        share the lanes at once."""
        with self._dialect.transaction() as connection:
            self._register(connection)

    def due_in(self) -> float:
        """Return seconds until :meth:`keep` has something to do."""
        return max(0.0, self._next - time.monotonic())

    def keep(self) -> bool:
        """Renew the leases, release lanes above this worker's share and take free ones, if :meth:`due_in` is 0. Returns
        whether the lanes changed."""
        if self.due_in():
            return False
        begun, before = time.monotonic(), self.lanes
        with self._dialect.transaction() as connection:
            self.lanes = self._balance(connection)
        reach("relay.leased")
        self._valid_until = begun + self._seconds
        pause = min(self._seconds / RENEW, SHARE_SECONDS)
        self._next = begun + (min(HUNGRY_SECONDS, pause) if self._hungry else pause)
        return self.lanes != before

    def still_mine(self, connection: sa.Connection, lanes: set[int]) -> set[int]:
        """Return those of ``lanes`` that this worker has leased, and lock their rows until the transaction ends."""
        lane = trans_lane.c.lane
        mine = sa.select(lane).where(lane.in_(sorted(lanes)), trans_lane.c.owner == self.owner).order_by(lane)
        return set(connection.scalars(mine.with_for_update()))

    def mine(self) -> sa.ColumnElement[bool]:
        """Return, for a single statement on ``trans_message``, the condition that this worker has the row's lane. Binds
        ``owner``."""
        lane, owner = trans_lane.c.lane, trans_lane.c.owner
        leased = sa.select(lane).where(lane.in_(self.lanes), owner == sa.bindparam("owner"))
        if self._dialect.name == "postgresql":
            # read once; a join may scan the rows once per lane
            lanes = sa.func.array(leased.scalar_subquery(), type_=postgresql.ARRAY(sa.SmallInteger))
            return trans_message.c.lane == sa.any_(lanes)
        return trans_message.c.lane.in_(leased)

    def give_back(self) -> None:
        """Release all lanes and the registration in the database now, instead of when the leases end."""
        with self._dialect.transaction() as connection:
            connection.execute(_FREE.where(trans_lane.c.owner == self.owner))
            connection.execute(sa.delete(trans_relay).where(trans_relay.c.owner == self.owner))
        reach("relay.given_back")
        self.forget()

    def forget(self) -> None:
        """Regard all lanes as lost, without a query; the next :meth:`keep` leases lanes at once."""
        self.lanes, self._next, self._valid_until = (), 0.0, 0.0

    def _balance(self, connection: sa.Connection) -> tuple[int, ...]:
        now, until = self._register(connection)
        alive = list(connection.scalars(sa.select(trans_relay.c.owner).where(trans_relay.c.alive_until_us > now)))
        rows = connection.execute(sa.select(trans_lane.c.lane, trans_lane.c.owner).order_by(trans_lane.c.lane)).all()
        share = _share(sorted(alive), self.owner, len(rows))
        mine = [lane for lane, owner in rows if owner == self.owner]
        kept, given = mine[:share], mine[share:]
        if given:
            connection.execute(_FREE.where(trans_lane.c.lane.in_(given), trans_lane.c.owner == self.owner))
        if kept:
            renewal = sa.update(trans_lane).values(leased_until_us=until)
            connection.execute(renewal.where(trans_lane.c.lane.in_(kept), trans_lane.c.owner == self.owner))
        taken = self._take(connection, now, until, share - len(kept))
        self._hungry = len(kept) + len(taken) < share
        return (*kept, *taken)

    def _register(self, connection: sa.Connection) -> tuple[int, int]:
        """Extend the registration of this worker, which entitles it to a share. Returns the database's time and the end
        of the registration, in microseconds."""
        now = int(connection.scalar(sa.select(self._dialect.now_us)) or 0)
        until = now + to_us(self._seconds)
        here = sa.update(trans_relay).where(trans_relay.c.owner == self.owner).values(alive_until_us=until)
        if not connection.execute(here).rowcount:
            connection.execute(sa.insert(trans_relay).values(owner=self.owner, alive_until_us=until))
            long_gone = now - round(10e6 * self._seconds)
            connection.execute(sa.delete(trans_relay).where(trans_relay.c.alive_until_us < long_gone))
        return now, until

    def _take(self, connection: sa.Connection, now: int, until: int, most: int) -> list[int]:
        if most <= 0:
            return []
        free = sa.select(trans_lane.c.lane).where(trans_lane.c.leased_until_us <= now).order_by(trans_lane.c.lane)
        lanes = list(connection.scalars(free.limit(most).with_for_update(skip_locked=True)))
        if lanes:
            taking = sa.update(trans_lane).where(trans_lane.c.lane.in_(lanes), trans_lane.c.leased_until_us <= now)
            connection.execute(taking.values(owner=self.owner, epoch=trans_lane.c.epoch + 1, leased_until_us=until))
        return lanes


_FREE = sa.update(trans_lane).values(owner=None, leased_until_us=0)


def _share(alive: list[str], owner: str, lanes: int) -> int:
    """Return ``owner``'s number of lanes, when those ``alive`` (sorted) share them evenly."""
    each, left = divmod(lanes, len(alive))
    return each + (alive.index(owner) < left)
