"""Ids that the scheduler could not deal with: it counts its tries, and what waits for a person is listed, tried again
or settled.

A row of ``trans_compensation_case`` is written before its id is settled in the set store, so no id is ever in neither.
What a person does is recorded: :mod:`escrowmq.outbox.acts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import sqlalchemy as sa

from escrowmq.compensation.journal import MAX_REASON, Database, transaction
from escrowmq.errors import Code
from escrowmq.outbox.acts import Done, act_on_rows, ids_of
from escrowmq.outbox.dialects import database_now_us, insert_if_absent
from escrowmq.outbox.purging import age_of
from escrowmq.outbox.tables import trans_compensation_case
from escrowmq.platform.times import to_us

PIECE = 500
"""Ids named in one statement."""


class CaseState(IntEnum):
    """Where an id stands that was not dealt with at once."""

    TRYING = 0
    """A try failed; the id is still in the set store, and the scheduler tries it again."""
    STUCK = 1
    """A person decides: found nowhere, or its handler failed too often."""
    CONFLICT = 2
    """A person decides: it was announced, and yet rolled back or expired."""
    RETRY = 3
    """A person wants it tried again: the next run of a scheduler looks it up."""
    SETTLED = 4
    """A person settled it: nothing is done about it any more."""
    DONE = 5
    """Dealt with after all."""


WAITING = frozenset({CaseState.STUCK, CaseState.CONFLICT})
"""What waits for a person."""

_C = trans_compensation_case.c
MAY: dict[CaseState, frozenset[CaseState]] = {
    CaseState.RETRY: frozenset({CaseState.STUCK, CaseState.CONFLICT, CaseState.SETTLED}),
    CaseState.SETTLED: frozenset({CaseState.TRYING, CaseState.STUCK, CaseState.CONFLICT, CaseState.RETRY}),
}
"""To which state a person may bring it from which."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row; times are microseconds since 1970, by the database's clock."""

    name: str
    """Of the compensation."""
    message_id: bytes
    state: CaseState
    attempts: int
    """Tries that failed since it came, or since a person had it tried again."""
    first_us: int
    changed_us: int
    reason: str
    """Why the last try failed."""
    notes: str | None
    """A line for each operator action before there was the record of acts, the newest first."""


@dataclass(frozen=True, slots=True)
class CaseDone:
    """The result of an operation on one case: OK, NOT_FOUND, or CONFLICT: its ``state`` (as it is now) does not allow
    it.
    """

    message_id: bytes
    code: Code
    state: CaseState | None


# For a person


def list_cases(
    database: Database,
    name: str | None = None,
    *,
    states: Collection[CaseState] | None = WAITING,
    limit: int = 100,
    after: Case | None = None,
) -> list[Case]:
    """Cases in some states (None: in any), of one compensation or of all, by name and id; the next page is ``after``
    the last one."""
    wanted = sa.select(trans_compensation_case)
    if name is not None:
        wanted = wanted.where(_C.name == name)
    if after is not None:
        same = sa.and_(_C.name == after.name, _C.message_id > after.message_id)
        wanted = wanted.where(same if name == after.name else sa.or_(_C.name > after.name, same))
    wanted = wanted.order_by(_C.name, _C.message_id).limit(limit)
    # Of one compensation each state is read by itself: in an index its rows stand in this order.
    parts = [states] if name is None or states is None else [{state} for state in states]
    found: list[Case] = []
    with transaction(database, trans_compensation_case) as connection:
        for part in parts:
            chosen = wanted if part is None else wanted.where(_C.state.in_([state.value for state in part]))
            found += [_case(row) for row in connection.execute(chosen)]
    return sorted(found, key=lambda case: (case.name, case.message_id))[:limit] if len(parts) > 1 else found


def count_cases(database: Database, name: str | None = None) -> dict[CaseState, int]:
    """Return how many cases there are in each state."""
    counted = sa.select(_C.state, sa.func.count()).group_by(_C.state)
    if name is not None:
        counted = counted.where(_C.name == name)
    counts = dict.fromkeys(CaseState, 0)
    with transaction(database, trans_compensation_case) as connection:
        counts.update({CaseState(state): count for state, count in connection.execute(counted)})
    return counts


def retry_cases(
    database: Database, name: str, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[CaseDone]:
    """Have them looked up and handled by the next run of a scheduler, tries counted anew; one result an id. ``by``:
    who; None: the system's user; ``why``: the reason, for the record. Also what a person had settled."""
    return _act(database, name, ids, by, why, CaseState.RETRY)


def settle_cases(
    database: Database, name: str, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[CaseDone]:
    """Do nothing more about them, ever: a person has seen to it. One result an id. The message at the broker stays as
    it is."""
    return _act(database, name, ids, by, why, CaseState.SETTLED)


def purge_cases(database: Database, older_than: float, name: str | None = None) -> int:
    """Delete DONE and SETTLED cases that have not changed for so many seconds; how many. An id that a person settled
    must not come again after that: choose it longer than the key topic is kept."""
    age = age_of(older_than)
    ended = _C.state.in_([CaseState.DONE.value, CaseState.SETTLED.value])
    with transaction(database, trans_compensation_case) as connection:
        old = sa.delete(trans_compensation_case).where(ended, _C.changed_us < database_now_us(connection) - to_us(age))
        return connection.execute(old if name is None else old.where(_C.name == name)).rowcount


def _act(
    database: Database, name: str, ids: Iterable[str | bytes], by: str | None, why: str | None, to: CaseState
) -> list[CaseDone]:
    """Each case that may be is brought ``to`` its new state, and it is recorded."""

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        found = {bytes(row.message_id): CaseState(row.state) for row in _rows(connection, name, part, locked=True)}
        may = [identity for identity, state in found.items() if state in MAY[to]]
        values = {"state": to.value, "changed_us": database_now_us(connection)}
        values |= {"attempts": 0} if to is CaseState.RETRY else {}
        for at in range(0, len(may), PIECE):
            these = sa.and_(_C.name == name, _C.message_id.in_(may[at : at + PIECE]))
            connection.execute(sa.update(trans_compensation_case).where(these).values(values))
        results = {identity: Done(identity, Code.CONFLICT, state) for identity, state in found.items()}
        return results | {identity: Done(identity, Code.OK, to) for identity in may}

    act = "compensation.retry" if to is CaseState.RETRY else "compensation.settle"
    wanted = list(dict.fromkeys(ids_of(ids)))
    done = act_on_rows(_engine_of(database), act, wanted, change, by=by, why=why, name=name)
    return [CaseDone(one.id, one.code, None if one.state is None else CaseState(one.state)) for one in done]


def _engine_of(database: Database) -> sa.Engine:
    """Return the engine that holds the cases."""
    if isinstance(database, sa.Engine):
        return database
    with transaction(database, trans_compensation_case) as connection:
        return connection.engine


# For the scheduler


class Cases:
    """The cases of one compensation, as its schedulers write them. Every method is a transaction of its own."""

    def __init__(self, database: Database, name: str, max_attempts: int) -> None:
        self._database = database
        self._name = name
        self._max_attempts = max_attempts

    def settled(self, ids: Sequence[bytes]) -> set[bytes]:
        """Return those that a person has settled."""
        with transaction(self._database, trans_compensation_case) as connection:
            rows = _rows(connection, self._name, ids)
            return {bytes(row.message_id) for row in rows if row.state == CaseState.SETTLED}

    def to_retry(self, limit: int) -> list[bytes]:
        """Return those that a person wants tried again, the longest waiting first."""
        wanted = sa.select(_C.message_id).where(_C.name == self._name, _C.state == CaseState.RETRY.value)
        with transaction(self._database, trans_compensation_case) as connection:
            return [bytes(one) for one in connection.scalars(wanted.order_by(_C.changed_us).limit(limit))]

    def conflicts(self, reasons: dict[bytes, str]) -> None:
        """Record cases that wait for a person from now on."""
        self._write(reasons, CaseState.CONFLICT)

    def failed(self, reasons: dict[bytes, str]) -> set[bytes]:
        """One more try of these failed; those that are STUCK by now: they wait for a person, and the others are tried
        again."""
        return self._write(reasons, CaseState.TRYING)

    def done(self, ids: Sequence[bytes]) -> None:
        """Record cases that were dealt with: those that nobody touched are deleted, the rest are kept as DONE."""
        with transaction(self._database, trans_compensation_case) as connection:
            for row in _rows(connection, self._name, ids):
                mine = _is(self._name, bytes(row.message_id)), _C.state == row.state
                if row.state == CaseState.TRYING and row.notes is None:
                    connection.execute(sa.delete(trans_compensation_case).where(*mine))
                elif row.state not in (CaseState.SETTLED, CaseState.DONE):
                    values = {"state": CaseState.DONE.value, "changed_us": database_now_us(connection)}
                    connection.execute(sa.update(trans_compensation_case).where(*mine).values(values))

    def _write(self, reasons: dict[bytes, str], to: CaseState) -> set[bytes]:
        """Count a try of each; those that wait for a person now. What a person settled stays so."""
        waiting: set[bytes] = set()
        if not reasons:
            return waiting
        with transaction(self._database, trans_compensation_case) as connection:
            now_us = database_now_us(connection)
            first = {"name": self._name, "state": CaseState.TRYING.value, "attempts": 0, "first_us": now_us}
            rows = [{**first, "message_id": i, "changed_us": now_us, "reason": ""} for i in sorted(reasons)]
            connection.execute(insert_if_absent(connection.dialect.name, trans_compensation_case), rows)
            for row in _rows(connection, self._name, sorted(reasons), locked=True):
                identity, state = bytes(row.message_id), CaseState(row.state)
                if state is CaseState.SETTLED:
                    waiting.add(identity)
                    continue
                attempts = row.attempts + 1
                if to is CaseState.TRYING and attempts >= self._max_attempts:
                    then = CaseState.STUCK
                elif (
                    to is CaseState.TRYING
                ):  # what a person wants tried again is in no run, so it must stay in that state
                    then = CaseState.RETRY if state is CaseState.RETRY else CaseState.TRYING
                else:
                    then = to
                values = {
                    "state": then.value,
                    "attempts": attempts,
                    "changed_us": now_us,
                    "reason": reasons[identity][:MAX_REASON],
                }
                connection.execute(sa.update(trans_compensation_case).where(_is(self._name, identity)).values(values))
                if then in WAITING:
                    waiting.add(identity)
        return waiting


def _is(name: str, identity: bytes) -> sa.ColumnElement[bool]:
    return sa.and_(_C.name == name, _C.message_id == identity)


def _rows(connection: sa.Connection, name: str, ids: Sequence[bytes], *, locked: bool = False) -> list[Any]:
    rows: list[Any] = []
    for at in range(0, len(ids), PIECE):
        some = sa.select(trans_compensation_case).where(_C.name == name, _C.message_id.in_(ids[at : at + PIECE]))
        some = some.order_by(_C.message_id)
        rows += connection.execute(some.with_for_update() if locked else some).all()
    return rows


def _case(row: Any) -> Case:
    fields = {name: getattr(row, name) for name in Case.__slots__}
    return Case(**fields | {"message_id": bytes(row.message_id), "state": CaseState(row.state)})
