"""Rows of ``trans_driven`` that wait for a person: list them, decide them, settle them. Every act is recorded:
:mod:`escrowmq.outbox.acts`.

A row is STUCK where the broker holds the opposite decision, is none of those that are named, or refuses a message that
is decided here. What it says of the row is in ``reason``, where the row stood before in ``was``. An act only puts the
row back to a state of the table in ``driving.py``; the next ``redrive()`` of its producer group does the rest, and the
row is STUCK again if the broker's answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code
from escrowmq.model import TransactionId
from escrowmq.outbox.acts import Done, act_on_rows
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_driven

_T = trans_driven.c
_STUCK = frozenset({Stage.STUCK})


@dataclass(frozen=True, slots=True)
class StuckRow:
    """One row of ``trans_driven``, without its body; ``created_us`` in microseconds since 1970."""

    id: bytes
    group: str
    """Of the producers."""
    state: Stage
    was: Stage | None
    """Where it stood before it was STUCK; None: it is not STUCK, or tables of version 3 did not say."""
    reason: str | None
    """The code that the broker answered; None likewise."""
    shard: int | None
    transaction: TransactionId | None
    topic: str
    key: str | None
    tag: str | None
    body_bytes: int
    attempts: int
    created_us: int


def list_stuck(
    engine: sa.Engine,
    group: str | None = None,
    *,
    state: Stage = Stage.STUCK,
    limit: int = 100,
    after: str | bytes | None = None,
) -> list[StuckRow]:
    """Return rows of one producer group, or of all, by id; the next page is ``after`` the last one's. ``state``:
    TO_SEND lists
    what the compensation mode (``outbox.Compensating``) has still to send."""
    wanted = _T.state == int(state)
    if group is not None:
        wanted &= _T.producer_group == group
    if after is not None:
        wanted &= _T.id > model.message_id(after)
    columns = [column for column in _T if column.name not in ("body", "properties", "delay_us")]
    size = sa.func.length(_T.body).label("body_bytes")
    page = sa.select(*columns, size).where(wanted).order_by(_T.id).limit(limit)
    with engine.connect() as connection, transaction_of(connection, trans_driven):
        return [_row(row) for row in connection.execute(page)]


def retry_stuck(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Try once more what was tried: the cause is mended. CONFLICT if the row does not say what that was: then commit or
    roll back."""
    return _move(engine, "stuck.retry", ids, lambda row: None if row.was is None else Stage(row.was), by, why)


def commit_stuck(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Commit their transactions at the broker, whatever was tried before; a message that was never prepared is."""
    return _move(engine, "stuck.commit", ids, _committing, by, why)


def rollback_stuck(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Roll their transactions back at the broker, whatever was tried before."""
    return _move(engine, "stuck.rollback", ids, _rolling_back, by, why)


def resend_stuck(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Prepare these messages once more under their ids, and commit them: their business change is committed, and their
    transactions were lost (rolled back by an operator, expired).

    Within the broker's ``dedup_window`` (1 h) it gives the first transaction again, and the row is STUCK again. If the
    first one was committed there are two messages of the id after that.
    """
    return _move(engine, "stuck.resend", ids, lambda _: Stage.DECIDED, by, why, forgets=True)


def settle_stuck(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Delete these rows: a person has seen to them. Also rows TO_SEND of the compensation mode. The record keeps what
    each said, without its body.

    What stands at the broker stays as it is; of a transaction that is undecided there the table answers ROLLBACK from
    then on.
    """

    def settle(connection: sa.Connection, row: Any) -> Stage | None:
        connection.execute(sa.delete(trans_driven).where(_T.id == row.id))
        return None

    may = frozenset({Stage.STUCK, Stage.TO_SEND})
    return act_on_rows(engine, "stuck.settle", ids, _each(may, settle), by=by, why=why)


def _move(
    engine: sa.Engine,
    act: str,
    ids: Iterable[str | bytes],
    to: Callable[[Any], Stage | None],
    by: str | None,
    why: str | None,
    *,
    forgets: bool = False,
) -> list[Done]:
    """Bring STUCK rows to another state; None: that cannot be."""

    def move(connection: sa.Connection, row: Any) -> Stage | None:
        stage = to(row)
        if stage is None:
            return Stage.STUCK
        values: dict[str, Any] = {"state": int(stage), "was": None, "reason": None, "attempts": 0}
        values |= {"transaction_id": None} if forgets else {}
        connection.execute(sa.update(trans_driven).where(_T.id == row.id).values(values))
        return stage

    return act_on_rows(engine, act, ids, _each(_STUCK, move), by=by, why=why)


def _each(
    may: frozenset[Stage], act: Callable[[sa.Connection, Any], Stage | None]
) -> Callable[[sa.Connection, list[bytes]], dict[bytes, Done]]:
    """Do it to each row that may be; ``act`` tells where the row stands then (None: it is gone), which is STUCK if it
    could not be."""
    columns = (_T.id, _T.producer_group, _T.state, _T.was, _T.reason, _T.shard, _T.transaction_id, _T.topic, _T.key)

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        rows = sa.select(*columns).where(_T.id.in_(part)).order_by(_T.id).with_for_update()
        done: dict[bytes, Done] = {}
        for row in connection.execute(rows).all():
            identity, state = bytes(row.id), Stage(row.state)
            if state not in may:
                done[identity] = Done(identity, Code.CONFLICT, state)
                continue
            now = act(connection, row)
            code = Code.CONFLICT if now is Stage.STUCK else Code.OK
            done[identity] = Done(identity, code, now, _said(row) if code is Code.OK else None)
        return done

    return change


def _said(row: Any) -> str:
    """Render a row, as it was, for the record."""
    transaction = None if row.transaction_id is None else TransactionId.from_bytes(bytes(row.transaction_id))
    stood = Stage(row.state).name if row.was is None else f"{Stage(row.state).name}, was {Stage(row.was).name}"
    parts = (row.producer_group, stood, row.reason, row.topic, None if row.key is None else row.key[:100], transaction)
    return "; ".join(str(part) for part in parts if part is not None)


def _committing(row: Any) -> Stage:
    return Stage.DECIDED if row.transaction_id is None else Stage.COMMITTING


def _rolling_back(row: Any) -> Stage:
    return Stage.ABANDONED if row.transaction_id is None else Stage.ROLLING_BACK


def _row(row: Any) -> StuckRow:
    transaction = None if row.transaction_id is None else TransactionId.from_bytes(bytes(row.transaction_id))
    was = None if row.was is None else Stage(row.was)
    return StuckRow(
        bytes(row.id), row.producer_group, Stage(row.state), was, row.reason, row.shard, transaction, row.topic,
        row.key, row.tag, row.body_bytes, row.attempts, row.created_us,
    )  # fmt: skip
