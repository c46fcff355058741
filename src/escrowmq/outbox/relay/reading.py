"""Reads PENDING outbox rows through their index, a bounded number per lane, lowest sequence number first; and converts
them to a batch.

The cost follows from the rows that are read, not from how many are PENDING, SENT, HELD or deleted. PostgreSQL reads
each lane by itself in one statement (LATERAL), as many rows as the lanes lately had. The others walk through the index
lane by lane, from where the last walk ended, until the batch is full.
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
"""Rows of the first read, when the size of bodies is unknown."""


class Row(NamedTuple):
    """The columns of a row that is read, in the order of :data:`COLUMNS`."""

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
SEQ = itemgetter(Row._fields.index("seq"))
"""Returns the number of a row, quicker than by its name."""


class Reader:
    """Reads rows for one worker, in sizes that follow from its last reads."""

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
        """Return PENDING rows of those lanes, ordered by ``seq``; those of a lane are its lowest.

        At most ``most`` rows; by default about as many as made a batch of the wanted size lately.
        """
        wanted = min(self._fitting, most or self._fitting)
        rows = self._read(connection, lanes, wanted)
        if rows and most is None:
            fitting = int(self._max_bytes * len(rows) / (1 + sum(len(row.body) for row in rows)))
            self._fitting = max(1, min(self._max_rows, fitting, 4 * self._fitting))
        rows.sort(key=SEQ)
        return rows

    def due(
        self, connection: sa.Connection, lanes: Sequence[int], state: State, before_us: int, most: int
    ) -> list[Any]:
        """Return at most ``most`` RETRYING rows due at ``before_us``, or SENT rows last sent by then, the oldest first.
        ``state`` is one of these two."""
        moment = _c.due_us if state is State.RETRYING else _c.sent_us
        rows = sa.select(*COLUMNS).where(state_is(state), moment <= before_us, _c.lane.in_(lanes))
        return list(connection.execute(rows.order_by(moment).limit(most)).all())

    def _read_round_robin(self, connection: sa.Connection, lanes: Sequence[int], wanted: int) -> list[Any]:
        """Return up to ``wanted`` PENDING rows, lane by lane: first of the lanes after the one where the last read
        ended, then of the others."""
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
        """Yield the lanes of each read: all, or ``wanted`` of them by turns if one row of each lane would be more than
        ``wanted``."""
        if wanted >= len(lanes):
            yield lanes
            return
        for _ in range(-(-len(lanes) // wanted)):
            start = self._cursor % len(lanes)
            self._cursor = start + wanted
            yield (*lanes, *lanes)[start : start + wanted]

    def _learn(self, rows: list[Any], each: int, wanted: int) -> None:
        """Adapt the rows that are read per lane: more if the last read filled less than half the batch although a lane
        had ``each``, fewer if it returned more than ``wanted``."""
        if len(rows) < wanted // 2:
            fullest = Counter(row.lane for row in rows).most_common(1)
            if fullest and fullest[0][1] >= each:
                self._per_lane = min(2 * each, self._max_rows)
        elif len(rows) > wanted:
            self._per_lane = max(each // 2, 1)


def _of_my_lanes(dialect: Dialect) -> sa.Select[Any]:
    """Return the query of PostgreSQL, which reads each lane that is leased at this moment by itself."""
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
"""The query of SQLite, MariaDB and MySQL: lane by lane, in the order of the index, until there are enough."""


# To the batch that is sent


def outgoing(rows: Sequence[Any]) -> pa.RecordBatch:
    """Convert rows of the shape of :class:`Row`, at least one, to a record batch of the schema OUTGOING."""
    columns: dict[str, Any] = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    columns["message_id"], columns["born_us"] = columns["id"], columns["created_us"]
    columns["properties"] = _maps(columns["properties"])
    columns["queue"], columns["immunity_us"] = np.full(len(rows), -1, np.int32), np.zeros(len(rows), np.int64)
    columns["transaction"] = pa.nulls(len(rows), schemas.ID)
    return pa.RecordBatch.from_pydict({name: columns[name] for name in schemas.OUTGOING.names}, schemas.OUTGOING)


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
