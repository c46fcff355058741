"""Reading what is to be sent: a bounded number of rows per lane, from the index of PENDING rows, however long the table is.

Each lane is read from its own lowest number, so the cost does not grow with the rows that are PENDING, SENT, HELD or gone. One
statement for all lanes; how many rows of each follows what the lanes turned out to hold and how big the bodies are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.relay.columns import COLUMNS
from escrowmq.outbox.relay.dialects import Dialect
from escrowmq.outbox.tables import State, trans_lane, trans_message

_c = trans_message.c
FIRST_ROWS = 256
"""Rows of the first read: nothing is known yet about the size of bodies."""
MOST_LANES = 400
"""Terms of one compound SELECT; SQLite takes 500."""


def state_is(state: State) -> sa.ColumnElement[bool]:
    """As a literal: partial indexes are used only where the statement itself says that they suffice."""
    same = _c.state == sa.literal_column(str(int(state)))
    if state >= State.WAITING:
        return sa.and_(_c.state >= sa.literal_column(str(int(State.WAITING))), same)
    return same


class Reader:
    """Reads of one worker; remembers what the last ones were like."""

    def __init__(self, dialect: Dialect, owner: str, max_rows: int, max_bytes: int) -> None:
        self._dialect = dialect
        self._owner = owner
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._per_lane = 1
        self._fitting = min(max_rows, FIRST_ROWS)

    def pending(self, connection: sa.Connection, lanes: Sequence[int], most: int | None = None) -> list[Any]:
        """Rows of those lanes that are to be sent, lowest numbers of each lane first; in the order of their numbers.

        At most ``most`` rows, or else as many as lately made a batch of the wanted size.
        """
        wanted = min(self._fitting, most or self._fitting)
        each = max(-(-wanted // len(lanes)), min(self._per_lane, wanted))
        rows = self._read(connection, lanes, each)
        if most is None:
            self._learn(rows, each, wanted)
        rows.sort(key=_number)
        return rows

    def retries(self, connection: sa.Connection, lanes: Sequence[int], now_us: int, most: int) -> list[Any]:
        """RETRYING rows whose time has come, those first that are due longest."""
        due = sa.select(*COLUMNS).where(state_is(State.RETRYING), _c.lane.in_(lanes), _c.due_us <= now_us)
        return list(connection.execute(due.order_by(_c.due_us).limit(most)).all())

    def unconfirmed(self, connection: sa.Connection, lanes: Sequence[int], before_us: int, most: int) -> list[Any]:
        """SENT rows that were last sent before that time: their callback is missing."""
        late = sa.select(*COLUMNS).where(state_is(State.SENT), _c.sent_us <= before_us, _c.lane.in_(lanes))
        return list(connection.execute(late.order_by(_c.sent_us).limit(most)).all())

    def _read(self, connection: sa.Connection, lanes: Sequence[int], each: int) -> list[Any]:
        if self._dialect.name == "postgresql":
            return list(connection.execute(_of_my_lanes(), {"owner": self._owner, "each": each}).all())
        rows: list[Any] = []
        for start in range(0, len(lanes), MOST_LANES):
            some = lanes[start : start + MOST_LANES]
            lane_names = {f"lane_{number}": lane for number, lane in enumerate(some)}
            rows += connection.execute(_of_lanes(len(some), self._dialect.name), {**lane_names, "each": each}).all()
        return rows

    def _learn(self, rows: list[Any], each: int, wanted: int) -> None:
        """More of each lane while batches are small for want of rows from the fullest; fewer when they came out too big."""
        if len(rows) < wanted // 2:
            counts: dict[int, int] = {}
            for row in rows:
                counts[row.lane] = counts.get(row.lane, 0) + 1
            if max(counts.values(), default=0) >= each:
                self._per_lane = min(2 * each, self._max_rows)
        elif len(rows) > wanted:
            self._per_lane = max(each // 2, 1)
        if rows:
            size = sum(len(row.body) for row in rows) / len(rows) + 1
            fitting = int(self._max_bytes / size)
            self._fitting = max(1, min(self._max_rows, fitting, 4 * self._fitting))


def _number(row: Any) -> int:
    number: int = row[0]
    return number


def _due() -> sa.ColumnElement[bool]:
    return state_is(State.PENDING)


@lru_cache(maxsize=1)
def _of_my_lanes() -> sa.Select[Any]:
    """PostgreSQL: the lanes are looked up as they are leased at this moment, and each is read by itself."""
    message = (
        sa.select(*COLUMNS)
        .where(_c.lane == trans_lane.c.lane, _due())
        .order_by(_c.seq)
        .limit(sa.bindparam("each", type_=sa.Integer))
        .correlate(trans_lane)
        .lateral("message")
    )
    mine = sa.select(*(message.c[column.name] for column in COLUMNS))
    return mine.select_from(trans_lane).join(message, sa.true()).where(trans_lane.c.owner == sa.bindparam("owner"))


@lru_cache(maxsize=512)
def _of_lanes(count: int, dialect: str) -> sa.CompoundSelect[Any]:
    """The others: one SELECT a lane, joined by UNION ALL."""
    parts = []
    for number in range(count):
        lane = sa.bindparam(f"lane_{number}", type_=sa.Integer)
        part = sa.select(*COLUMNS).where(_c.lane == lane, _due()).order_by(_c.seq)
        part = part.limit(sa.bindparam("each", type_=sa.Integer))
        parts.append(sa.select(part.subquery()) if dialect == "sqlite" else part)
    return sa.union_all(*parts)
