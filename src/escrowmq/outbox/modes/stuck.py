"""Rows of the modes that need an operator: stuck rows of ``trans_driven``, and stored prepares (``trans_prepared``)
without a decision. Every action is recorded: :mod:`escrowmq.outbox.acts`.

A row is STUCK where the broker holds the opposite decision, is none of the configured ones, or refuses a message that
is decided here. ``reason`` is the broker's answer, ``was`` the state before. An action only puts the row back to a
state of the table in ``driving.py``. The next ``redrive()`` of its producer group does the rest, and the row is STUCK
again if the broker's answer is the same.

A producer in merged mode that died between its prepare and its decision leaves a stored prepare. It cannot be committed
manually: its effect is a function of the consumer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code
from escrowmq.model import TransactionId
from escrowmq.outbox.acts import Change, Done, Ids, Operator, act_on_rows
from escrowmq.outbox.dialects import database_now_us, insert_if_absent
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_driven, trans_prepared, trans_recv_log
from escrowmq.platform.times import to_us

_T = trans_driven.c
_P = trans_prepared.c


@dataclass(frozen=True, slots=True)
class StuckRow:
    """One row of ``trans_driven``, without its body; ``created_us`` in microseconds since 1970."""

    id: bytes
    group: str
    """The producer group."""
    state: Stage
    was: Stage | None
    """The state before STUCK; None: it is not STUCK, or tables of version 3 did not say."""
    reason: str | None
    """The code of the broker's answer; None likewise."""
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
    """List rows of one producer group, or of all, by id; the next page is ``after`` the last one's.

    ``state``: TO_SEND lists what the compensation mode (``outbox.Compensating``) has still to send.
    """
    wanted = _T.state == int(state)
    if group is not None:
        wanted &= _T.producer_group == group
    if after is not None:
        wanted &= _T.id > model.message_id(after)
    columns = [column for column in _T if column.name not in ("body", "properties", "delay_us")]
    size = sa.func.length(_T.body).label("body_bytes")
    page = sa.select(*columns, size).where(wanted).order_by(_T.id).limit(limit)
    with engine.connect() as connection, transaction_of(connection, trans_driven):
        return [_to_stuck(row) for row in connection.execute(page)]


def retry_stuck(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Set STUCK rows back to the state before, because the cause is repaired: the next redrive retries the failed step.
    CONFLICT if a row is not STUCK, or does not name that state: then commit or roll back."""
    return _move(engine, "stuck.retry", ids, lambda row: None if row.was is None else Stage(row.was), operator)


def commit_stuck(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Set STUCK rows to be committed by the next redrive, whatever was tried before; it prepares those never prepared.
    Nothing is sent here. CONFLICT: not STUCK."""
    return _move(engine, "stuck.commit", ids, _choose(Stage.COMMITTING, Stage.DECIDED), operator)


def rollback_stuck(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Set STUCK rows to be rolled back at the broker by the next redrive, whatever was tried before. CONFLICT: not
    STUCK."""
    return _move(engine, "stuck.rollback", ids, _choose(Stage.ROLLING_BACK, Stage.ABANDONED), operator)


def resend_stuck(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Set STUCK rows to be prepared once more under their ids, and committed, by the next redrive: their business
    change is committed, and their transactions were lost (rolled back by an operator, expired).

    Within the broker's ``dedup_window`` (1 h) it returns the first transaction again, and the row is STUCK again. If
    the first one was committed there are two messages of the id after that.
    """
    return _move(engine, "stuck.resend", ids, lambda _: Stage.DECIDED, operator, transaction_id=None)


def settle_stuck(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Delete these rows, which an operator has handled; also rows TO_SEND of the compensation mode. The record keeps
    their content, without bodies.

    The broker's state does not change; for a transaction that is undecided there the table answers ROLLBACK from then
    on.
    """

    def settle(connection: sa.Connection, row: Any) -> Stage | None:
        connection.execute(sa.delete(trans_driven).where(_T.id == row.id))
        return None

    return act_on_rows(engine, "stuck.settle", ids, _each((Stage.STUCK, Stage.TO_SEND), settle), **operator)


def _move(
    engine: sa.Engine, act: str, ids: Ids, to: Callable[[Any], Stage | None], operator: Operator, **values: Any
) -> list[Done]:
    """Move STUCK rows to the state that ``to`` returns for each row (None: CONFLICT), clear their ``was``, ``reason``
    and ``attempts``, set ``values`` in them, and record action ``act``. Returns one result per id."""

    def move(connection: sa.Connection, row: Any) -> Stage | None:
        stage = to(row)
        if stage is None:
            return Stage.STUCK
        change = sa.update(trans_driven).where(_T.id == row.id).values(was=None, reason=None, attempts=0, **values)
        connection.execute(change.values(state=int(stage)))
        return stage

    return act_on_rows(engine, act, ids, _each((Stage.STUCK,), move), **operator)


def _choose(prepared: Stage, unprepared: Stage) -> Callable[[Any], Stage]:
    return lambda row: unprepared if row.transaction_id is None else prepared


def _each(allowed: tuple[Stage, ...], act: Callable[[sa.Connection, Any], Stage | None]) -> Change:
    """Return a function that applies ``act`` to each row in an allowed state; the others get CONFLICT. ``act`` returns
    the new state (None: deleted), or STUCK if the action is not possible."""
    columns = (_T.id, _T.producer_group, _T.state, _T.was, _T.reason, _T.shard, _T.transaction_id, _T.topic, _T.key)

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        rows = sa.select(*columns).where(_T.id.in_(part)).order_by(_T.id).with_for_update()
        done: dict[bytes, Done] = {}
        for row in connection.execute(rows).all():
            identity, state = bytes(row.id), Stage(row.state)
            if state not in allowed:
                done[identity] = Done(identity, Code.CONFLICT, state)
            elif (now := act(connection, row)) is Stage.STUCK:
                done[identity] = Done(identity, Code.CONFLICT, now)
            else:
                done[identity] = Done(identity, Code.OK, now, _describe(row))
        return done

    return change


def _describe(row: Any) -> str:
    """Return a text that describes a row, as it was, for the record."""
    state = Stage(row.state).name if row.was is None else f"{Stage(row.state).name}, was {Stage(row.was).name}"
    key = None if row.key is None else row.key[:100]
    parts = (row.producer_group, state, row.reason, row.topic, key, _transaction(row))
    return "; ".join(str(part) for part in parts if part is not None)


def _transaction(row: Any) -> TransactionId | None:
    return None if row.transaction_id is None else TransactionId.from_bytes(bytes(row.transaction_id))


def _to_stuck(row: Any) -> StuckRow:
    was = None if row.was is None else Stage(row.was)
    return StuckRow(
        bytes(row.id), row.producer_group, Stage(row.state), was, row.reason, row.shard, _transaction(row), row.topic,
        row.key, row.tag, row.body_bytes, row.attempts, row.created_us,
    )  # fmt: skip


# Stored prepares


@dataclass(frozen=True, slots=True)
class StoredPrepare:
    """One row of ``trans_prepared``, without its body; ``prepared_us`` in microseconds since 1970, by the database's
    clock."""

    group: str
    message_id: bytes
    """Or the digest of an id and a topic, where the id alone is another topic's."""
    topic: str
    key: str | None
    tag: str | None
    body_bytes: int
    prepared_us: int


def list_prepares(
    engine: sa.Engine, group: str, *, older_than: float = 0.0, limit: int = 100, after: str | bytes | None = None
) -> list[StoredPrepare]:
    """List prepares that a consumer group stored at least ``older_than`` seconds ago, by id; the next page is ``after``
    the last one's."""
    size = sa.func.length(_P.body).label("body_bytes")
    columns = (_P.consumer_group, _P.message_id, _P.topic, _P.key, _P.tag, size, _P.prepared_us)
    wanted = sa.select(*columns).where(_P.consumer_group == group)
    if after is not None:
        wanted = wanted.where(_P.message_id > model.message_id(after))
    with engine.connect() as connection, transaction_of(connection, trans_prepared):
        if older_than > 0:
            wanted = wanted.where(_P.prepared_us <= database_now_us(connection) - to_us(older_than))
        rows = connection.execute(wanted.order_by(_P.message_id).limit(limit))
        return [StoredPrepare(row[0], bytes(row[1]), *row[2:]) for row in rows]


def discard_prepares(engine: sa.Engine, group: str, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Delete stored prepares of a consumer group, and mark them as handled: a late commit then has no effect. Returns
    one result per id: OK, or NOT_FOUND."""

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        mine = sa.and_(_P.consumer_group == group, _P.message_id.in_(part))
        query = sa.select(_P.message_id, _P.topic, _P.key, _P.prepared_us).where(mine).order_by(_P.message_id)
        rows = connection.execute(query.with_for_update()).all()
        if not rows:
            return {}
        mark = {"consumer_group": group, "seen_us": database_now_us(connection)}
        marks = [{**mark, "message_id": row.message_id, "topic": row.topic} for row in rows]
        connection.execute(insert_if_absent(connection.dialect.name, trans_recv_log), marks)
        there = [row.message_id for row in rows]
        connection.execute(sa.delete(trans_prepared).where(_P.consumer_group == group, _P.message_id.in_(there)))
        return {bytes(row.message_id): Done(bytes(row.message_id), Code.OK, None, describe(row)) for row in rows}

    def describe(row: Any) -> str:
        key = "" if row.key is None else f"; {row.key[:100]}"
        return f"{row.topic}; prepared_us {row.prepared_us}{key}"

    return act_on_rows(engine, "prepared.discard", ids, change, {"group": group}, **operator)
