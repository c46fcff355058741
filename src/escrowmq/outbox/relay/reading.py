"""Reads PENDING outbox rows through their index: a bounded number per lane, lowest sequence number first; and makes
the batch of them.

The cost follows from the rows that are read, not from how many are PENDING, SENT, HELD or gone. PostgreSQL reads every
lane by itself in one statement (LATERAL); how deep, follows what the lanes turned out to hold. The others walk through
the index lane by lane, from where the last walk ended, until the batch is full.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import sqlalchemy as sa

from escrowmq import schemas
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.tables import State, state_is, trans_lane, trans_message

_c = trans_message.c
FIRST_ROWS = 64
"""Rows of the first read: nothing is known yet about the size of bodies."""


class Row(NamedTuple):
    """A row of :data:`COLUMNS` as the driver returns it."""

    seq: int
    lane: int
    state: int
    attempts: int
    id: bytes
    topic: str
    key: str | None
    tag: str | None
    properties: str | None
    body: bytes
    created_us: int
    delay_us: int


COLUMNS = tuple(trans_message.c[name] for name in Row._fields)


class Reader:
    """Reads of one worker; remembers what the last ones were like."""

    def __init__(self, dialect: Dialect, owner: str, max_rows: int, max_bytes: int) -> None:
        self._dialect = dialect
        self._of_my_lanes = _of_my_lanes(dialect)
        self._owner = owner
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._per_lane = 4
        self._cursor = 0
        self._fitting = min(max_rows, FIRST_ROWS)
        self._read = self._read_laterally if dialect.name == "postgresql" else self._read_round_robin

    def pending(self, connection: sa.Connection, lanes: Sequence[int], most: int | None = None) -> list[Any]:
        """Return rows of those lanes that are to be sent; those of a lane are its lowest, in the order of their
        numbers.

        At most ``most`` rows, or else about as many as lately made a batch of the wanted size.
        """
        wanted = min(self._fitting, most or self._fitting)
        rows = self._read(connection, lanes, wanted)
        if rows and most is None:
            fitting = int(self._max_bytes * len(rows) / (1 + sum(len(row.body) for row in rows)))
            self._fitting = max(1, min(self._max_rows, fitting, 4 * self._fitting))
        rows.sort(key=itemgetter(0))
        return rows

    def retries(self, connection: sa.Connection, lanes: Sequence[int], now_us: int, most: int) -> list[Any]:
        """RETRYING rows whose time has come, those first that are due longest."""
        due = sa.select(*COLUMNS).where(state_is(State.RETRYING), _c.lane.in_(lanes), _c.due_us <= now_us)
        return list(connection.execute(due.order_by(_c.due_us).limit(most)).all())

    def unconfirmed(self, connection: sa.Connection, lanes: Sequence[int], before_us: int, most: int) -> list[Any]:
        """SENT rows that were last sent before that time: their callback is missing."""
        late = sa.select(*COLUMNS).where(state_is(State.SENT), _c.sent_us <= before_us, _c.lane.in_(lanes))
        return list(connection.execute(late.order_by(_c.sent_us).limit(most)).all())

    def _read_round_robin(self, connection: sa.Connection, lanes: Sequence[int], wanted: int) -> list[Any]:
        """From the lane after the last that was read, and round to it again."""
        ahead = [lane for lane in lanes if lane > self._cursor]
        behind = [lane for lane in lanes if lane <= self._cursor]
        rows: list[Any] = []
        for some in (ahead, behind):
            if some and len(rows) < wanted:
                rows += connection.execute(_WALK, {"lanes": some, "most": wanted - len(rows)}).all()
        if len(rows) >= wanted:
            self._cursor = rows[-1].lane
        return rows

    def _read_laterally(self, connection: sa.Connection, lanes: Sequence[int], wanted: int) -> list[Any]:
        for some in self._windows(lanes, wanted):
            each = max(-(-wanted // len(some)), min(self._per_lane, wanted))
            bound = {"owner": self._owner, "each": each, "lanes": self._dialect.numbers(some)}
            rows = list(connection.execute(self._of_my_lanes, bound).all())
            self._learn(rows, each, wanted)
            if rows:
                return rows
        return []

    def _windows(self, lanes: Sequence[int], wanted: int) -> Iterator[Sequence[int]]:
        """Read all lanes at once; some at a time, by turns, if one row of each would be too many bytes."""
        if wanted >= len(lanes):
            yield lanes
            return
        for _ in range(-(-len(lanes) // wanted)):
            start = self._cursor % len(lanes)
            self._cursor = start + wanted
            yield (*lanes, *lanes)[start : start + wanted]

    def _learn(self, rows: list[Any], each: int, wanted: int) -> None:
        """More of each lane while batches are small for want of rows from the fullest; fewer when they came out too
        big."""
        if len(rows) < wanted // 2:
            fullest = Counter(row.lane for row in rows).most_common(1)
            if fullest and fullest[0][1] >= each:
                self._per_lane = min(2 * each, self._max_rows)
        elif len(rows) > wanted:
            self._per_lane = max(each // 2, 1)


def _of_my_lanes(dialect: Dialect) -> sa.Select[Any]:
    """PostgreSQL: the lanes are looked up as they are leased at this moment, and each is read by itself."""
    message = (
        sa.select(*COLUMNS)
        .where(_c.lane == trans_lane.c.lane, state_is(State.PENDING))
        .order_by(_c.seq)
        .limit(sa.bindparam("each", type_=sa.Integer))
        .correlate(trans_lane)
        .lateral("message")
    )
    mine = sa.select(*(message.c[column.name] for column in COLUMNS))
    leased = sa.and_(trans_lane.c.owner == sa.bindparam("owner"), dialect.among(trans_lane.c.lane, "lanes"))
    return mine.select_from(trans_lane).join(message, sa.true()).where(leased)


_WALK = (
    sa.select(*COLUMNS)
    .where(state_is(State.PENDING), _c.lane.in_(sa.bindparam("lanes", expanding=True)))
    .order_by(_c.lane, _c.seq)
    .limit(sa.bindparam("most", type_=sa.Integer))
    .with_hint(trans_message, "FORCE INDEX (trans_message_by_state)", "mysql")
    .with_hint(trans_message, "FORCE INDEX (trans_message_by_state)", "mariadb")
)
"""SQLite, MariaDB, MySQL: lane by lane, in the order of the index, until there are enough."""


# To the batch that is sent


def outgoing(rows: Sequence[Any]) -> pa.RecordBatch:
    """Return the batch of at least one row of the shape of :class:`Row`."""
    n = len(rows)
    _, _, _, _, ids, topics, keys, tags, properties, bodies, created, delays = zip(*rows, strict=True)
    zeros = pa.array(np.zeros(n, np.int64))
    arrays = [
        pa.array(topics, pa.utf8()),
        pa.array(keys, pa.utf8()),
        pa.array(tags, pa.utf8()),
        _maps(properties),
        pa.array(bodies, pa.binary()),
        pa.array(ids, schemas.ID),
        pa.array(np.full(n, -1, np.int32)),
        pa.array(created, pa.int64()),
        pa.array(delays, pa.int64()),
        zeros,
        pa.nulls(n, schemas.ID),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING)


def _maps(texts: Sequence[str | None]) -> pa.Array:
    given = [text for text in texts if text is not None]
    if not given:
        return pa.nulls(len(texts), schemas.PROPERTIES)
    objects: list[dict[str, str]] = json.loads(f"[{','.join(given)}]")  # one call for all
    sizes = iter([len(pairs) for pairs in objects])
    ends = list(accumulate((0 if text is None else next(sizes) for text in texts), initial=0))
    offsets = pa.array(
        [None if text is None else end for text, end in zip(texts, ends, strict=False)] + [ends[-1]], pa.int32()
    )
    names = pa.array(list(chain.from_iterable(objects)), pa.utf8())
    values = pa.array(list(chain.from_iterable(pairs.values() for pairs in objects)), pa.utf8())
    return pa.MapArray.from_arrays(offsets, names, values)
