"""Ids that the scheduler could not repair: it counts its tries, and operators list, retry or settle the stuck ones.

A row of ``trans_compensation_case`` is written before its id is settled in the set store, so an id is always in one of
the two. Operator actions are recorded: :mod:`escrowmq.outbox.acts`.
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
"""Ids per statement."""


class CaseState(IntEnum):
    """State of an id that was not repaired at once."""

    TRYING = 0
    """A try failed; the id is still in the set store, and the scheduler retries it."""
    STUCK = 1
    """An operator must decide: found nowhere, or its handler failed too often."""
    CONFLICT = 2
    """An operator must decide: it was announced, but rolled back or expired."""
    RETRY = 3
    """An operator requested a retry: the next run of a scheduler looks it up."""
    SETTLED = 4
    """An operator settled it: no further action."""
    DONE = 5
    """Repaired after failures."""


WAITING = frozenset({CaseState.STUCK, CaseState.CONFLICT})
"""States that wait for an operator."""

_C = trans_compensation_case.c
ALLOWED: dict[CaseState, frozenset[CaseState]] = {
    CaseState.RETRY: frozenset({CaseState.STUCK, CaseState.CONFLICT, CaseState.SETTLED}),
    CaseState.SETTLED: frozenset({CaseState.TRYING, CaseState.STUCK, CaseState.CONFLICT, CaseState.RETRY}),
}
"""Allowed operator transitions: new state, and the states it may follow."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row; times are microseconds since 1970 by the database's clock."""

    name: str
    """Name of the compensation."""
    message_id: bytes
    state: CaseState
    attempts: int
    """Failed tries since the first one, or since an operator requested a retry."""
    first_us: int
    changed_us: int
    reason: str
    """Reason of the last failed try."""
    notes: str | None
    """One line per operator action from before actions were recorded separately, newest first."""


@dataclass(frozen=True, slots=True)
class CaseDone:
    """Result of an operator action on one case: OK, NOT_FOUND, or CONFLICT if its current ``state`` forbids it."""

    message_id: bytes
    code: Code
    state: CaseState | None


# For operators


def list_cases(
    database: Database,
    name: str | None = None,
    *,
    states: Collection[CaseState] | None = WAITING,
    limit: int = 100,
    after: Case | None = None,
) -> list[Case]:
    """Return cases in some states (None: any), of one compensation or of all, by name and id, from ``after`` on."""
    wanted = sa.select(trans_compensation_case)
    if name is not None:
        wanted = wanted.where(_C.name == name)
    if after is not None:
        same = sa.and_(_C.name == after.name, _C.message_id > after.message_id)
        wanted = wanted.where(same if name == after.name else sa.or_(_C.name > after.name, same))
    wanted = wanted.order_by(_C.name, _C.message_id).limit(limit)
    # With one compensation each state is read separately: an index has its rows in this order.
    parts = [states] if name is None or states is None else [{state} for state in states]
    found: list[Case] = []
    with transaction(database, trans_compensation_case) as connection:
        for part in parts:
            chosen = wanted if part is None else wanted.where(_C.state.in_([state.value for state in part]))
            for row in connection.execute(chosen):
                fields = {name: getattr(row, name) for name in Case.__slots__}
                fields |= {"message_id": bytes(row.message_id), "state": CaseState(row.state)}
                found.append(Case(**fields))
    return sorted(found, key=lambda case: (case.name, case.message_id))[:limit] if len(parts) > 1 else found


def count_cases(database: Database, name: str | None = None) -> dict[CaseState, int]:
    """Count the cases in each state."""
    counted = sa.select(_C.state, sa.func.count()).group_by(_C.state)
    if name is not None:
        counted = counted.where(_C.name == name)
    counts = dict.fromkeys(CaseState, 0)
    with transaction(database, trans_compensation_case) as connection:
        counts.update({CaseState(state): count for state, count in connection.execute(counted)})
    return counts


Ids = Iterable[str | bytes]


def retry_cases(
    database: Database, name: str, ids: Ids, *, by: str | None = None, why: str | None = None
) -> list[CaseDone]:
    """Let the next scheduler run look them up and handle them, with tries counted from 0; also settled cases.
    ``by``: operator (None: the system's user); ``why``: the recorded reason. Returns one result per id."""
    return _change_states(database, name, ids, by, why, CaseState.RETRY)


def settle_cases(
    database: Database, name: str, ids: Ids, *, by: str | None = None, why: str | None = None
) -> list[CaseDone]:
    """Settle cases: the scheduler ignores these ids; their messages stay unchanged. Returns one result per id."""
    return _change_states(database, name, ids, by, why, CaseState.SETTLED)


def purge_cases(database: Database, older_than: float, name: str | None = None) -> int:
    """Delete DONE and SETTLED cases unchanged for ``older_than`` seconds; return their number. Keep settled ones longer
    than the key topic, because a purged id could reappear."""
    age = age_of(older_than)
    ended = _C.state.in_([CaseState.DONE.value, CaseState.SETTLED.value])
    with transaction(database, trans_compensation_case) as connection:
        old = sa.delete(trans_compensation_case).where(ended, _C.changed_us < database_now_us(connection) - to_us(age))
        return connection.execute(old if name is None else old.where(_C.name == name)).rowcount


def _change_states(
    database: Database, name: str, ids: Ids, by: str | None, why: str | None, to: CaseState
) -> list[CaseDone]:
    """Set each case that allows it to state ``to``, and record the operator action."""

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        found = {bytes(row.message_id): CaseState(row.state) for row in _find_rows(connection, name, part, locked=True)}
        may = [identity for identity, state in found.items() if state in ALLOWED[to]]
        values = {"state": to.value, "changed_us": database_now_us(connection)}
        values |= {"attempts": 0} if to is CaseState.RETRY else {}
        for at in range(0, len(may), PIECE):
            these = sa.and_(_C.name == name, _C.message_id.in_(may[at : at + PIECE]))
            connection.execute(sa.update(trans_compensation_case).where(these).values(values))
        results = {identity: Done(identity, Code.CONFLICT, state) for identity, state in found.items()}
        return results | {identity: Done(identity, Code.OK, to) for identity in may}

    act = "compensation.retry" if to is CaseState.RETRY else "compensation.settle"
    wanted = list(dict.fromkeys(ids_of(ids)))
    with transaction(database, trans_compensation_case) as connection:
        engine = connection.engine
    done = act_on_rows(engine, act, wanted, change, {"name": name}, by=by, why=why)
    return [CaseDone(one.id, one.code, None if one.state is None else CaseState(one.state)) for one in done]


# For the scheduler


class Cases:
    """Cases of one compensation, as written by its schedulers. Every method is a separate transaction."""

    def __init__(self, database: Database, name: str, max_attempts: int) -> None:
        self._database = database
        self._name = name
        self._max_attempts = max_attempts

    def find_settled(self, ids: Sequence[bytes]) -> set[bytes]:
        """Return the ids that an operator has settled."""
        with transaction(self._database, trans_compensation_case) as connection:
            rows = _find_rows(connection, self._name, ids)
            return {bytes(row.message_id) for row in rows if row.state == CaseState.SETTLED}

    def find_to_retry(self, limit: int) -> list[bytes]:
        """Return the ids with a requested retry, the longest waiting first."""
        wanted = sa.select(_C.message_id).where(_C.name == self._name, _C.state == CaseState.RETRY.value)
        with transaction(self._database, trans_compensation_case) as connection:
            return [bytes(one) for one in connection.scalars(wanted.order_by(_C.changed_us).limit(limit))]

    def record_conflicts(self, reasons: dict[bytes, str]) -> None:
        """Record conflicts, which an operator must decide."""
        self._write(reasons, CaseState.CONFLICT)

    def record_failures(self, reasons: dict[bytes, str]) -> set[bytes]:
        """Count a failed try of each. Returns those that are now STUCK (for an operator); the others are retried."""
        return self._write(reasons, CaseState.TRYING)

    def record_done(self, ids: Sequence[bytes]) -> None:
        """Record completion: delete cases without operator actions, keep the others as DONE."""
        with transaction(self._database, trans_compensation_case) as connection:
            for row in _find_rows(connection, self._name, ids):
                mine = _is_case(self._name, bytes(row.message_id)), _C.state == row.state
                if row.state == CaseState.TRYING and row.notes is None:
                    connection.execute(sa.delete(trans_compensation_case).where(*mine))
                elif row.state not in (CaseState.SETTLED, CaseState.DONE):
                    values = {"state": CaseState.DONE.value, "changed_us": database_now_us(connection)}
                    connection.execute(sa.update(trans_compensation_case).where(*mine).values(values))

    def _write(self, reasons: dict[bytes, str], to: CaseState) -> set[bytes]:
        """Count a try of each; return those that now wait for an operator. Settled cases stay settled."""
        waiting: set[bytes] = set()
        if not reasons:
            return waiting
        with transaction(self._database, trans_compensation_case) as connection:
            now_us = database_now_us(connection)
            first = {"name": self._name, "state": CaseState.TRYING.value, "attempts": 0, "first_us": now_us}
            rows = [{**first, "message_id": i, "changed_us": now_us, "reason": ""} for i in sorted(reasons)]
            connection.execute(insert_if_absent(connection.dialect.name, trans_compensation_case), rows)
            for row in _find_rows(connection, self._name, sorted(reasons), locked=True):
                identity, state = bytes(row.message_id), CaseState(row.state)
                if state is CaseState.SETTLED:
                    waiting.add(identity)
                    continue
                attempts, then = row.attempts + 1, to
                if to is CaseState.TRYING and attempts >= self._max_attempts:
                    then = CaseState.STUCK
                elif to is CaseState.TRYING and state is CaseState.RETRY:  # it is in no run, so it keeps that state
                    then = CaseState.RETRY
                changed = {"state": then.value, "attempts": attempts, "changed_us": now_us}
                changed["reason"] = reasons[identity][:MAX_REASON]
                case = sa.update(trans_compensation_case).where(_is_case(self._name, identity))
                connection.execute(case.values(changed))
                if then in WAITING:
                    waiting.add(identity)
        return waiting


def _is_case(name: str, identity: bytes) -> sa.ColumnElement[bool]:
    return sa.and_(_C.name == name, _C.message_id == identity)


def _find_rows(connection: sa.Connection, name: str, ids: Sequence[bytes], *, locked: bool = False) -> list[Any]:
    rows: list[Any] = []
    for at in range(0, len(ids), PIECE):
        some = sa.select(trans_compensation_case).where(_C.name == name, _C.message_id.in_(ids[at : at + PIECE]))
        some = some.order_by(_C.message_id)
        rows += connection.execute(some.with_for_update() if locked else some).all()
    return rows
