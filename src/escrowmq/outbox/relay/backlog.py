"""The backlog of the table: how many rows are not sent, how old the oldest of them is, and whether there is work now.

The table knows it, and no relay's lanes do: a row may be in a lane that another relay has leased, living or dead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.holding import is_head
from escrowmq.outbox.tables import State, state_is, trans_lane, trans_message

_c = trans_message.c


@dataclass(frozen=True, slots=True)
class Backlog:
    """The rows of ``trans_message`` that are not sent, and nothing of those that are."""

    pending: int = 0
    """Committed, to be sent now."""
    retrying: int = 0
    """Refused, or put aside because their broker is away: tried again when their time has come."""
    held: int = 0
    """Behind a retrying or waiting row of their key."""
    waiting: int = 0
    """Their tries ran out: they (and what they hold) wait for a person, not for a relay."""
    lag: float = 0.0
    """Seconds since the oldest pending or retrying row was written, by the database's clock; 0: there is none."""

    @property
    def unsent(self) -> int:
        """Rows that a relay sends by itself, now or later; what they hold follows them."""
        return self.pending + self.retrying

    def as_dict(self) -> dict[str, Any]:
        """Return names and numbers, for JSON."""
        return asdict(self)


def read_backlog(dialect: Dialect, connection: sa.Connection) -> Backlog:
    """Count them. The cost follows from the number of rows that are not sent."""
    counts = {}
    for state in (State.PENDING, State.RETRYING, State.HELD, State.WAITING):
        counted = sa.select(sa.func.count()).select_from(trans_message).where(state_is(state))
        if state is State.WAITING:
            counted = counted.where(_c.sent_us.is_(None))  # of the others only the callback is missing
        counts[state.name.lower()] = int(connection.scalar(counted) or 0)
    return Backlog(**counts, lag=lag_seconds(dialect, connection))


def lag_seconds(dialect: Dialect, connection: sa.Connection) -> float:
    """Age of the oldest row that a relay still has to send; of each lane its first pending row is looked at, and every
    retrying one."""
    now_us = int(connection.scalar(sa.select(dialect.now_us)) or 0)
    pending = [created for created in connection.scalars(_FIRST_OF_LANES) if created is not None]
    retrying = connection.scalar(sa.select(sa.func.min(_c.created_us)).where(state_is(State.RETRYING)))
    created = pending if retrying is None else [*pending, retrying]
    return max((now_us - min(created)) / 1e6, 1e-6) if created else 0.0


def due_now(dialect: Dialect, connection: sa.Connection, waiting_holds: bool) -> bool:
    """Return whether a row is to be sent now, whoever has its lane: a pending one, a retrying one whose time has
    come, one that nobody refused and that only stepped aside for a moment (its broker is away), or a held one whose
    head has gone."""
    soon = sa.or_(_c.due_us <= dialect.now_us, _c.attempts == 0)
    for wanted in (state_is(State.PENDING), sa.and_(state_is(State.RETRYING), soon)):
        if connection.scalar(sa.select(_c.seq).where(wanted).limit(1)) is not None:
            return True
    keys = sa.select(_c.lane, _c.key).distinct()
    held = {tuple(row) for row in connection.execute(keys.where(state_is(State.HELD)))}
    heads = {tuple(row) for row in connection.execute(keys.where(is_head(waiting_holds)))} if held else set()
    return not held <= heads


_FIRST_OF_LANES = sa.select(
    sa.select(_c.created_us)
    .where(_c.lane == trans_lane.c.lane, state_is(State.PENDING))
    .order_by(_c.seq)
    .limit(1)
    .correlate(trans_lane)
    .scalar_subquery()
)
"""One look into the index for each lane, however many rows are pending."""
