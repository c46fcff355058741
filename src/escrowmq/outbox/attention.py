"""Outbox rows that need an operator: list, show, send again, discard, settle. Every action is recorded:
:mod:`escrowmq.outbox.acts`.

Before that record (tables of version 3) an action was noted in a line before the row's ``error``: time, person, action.
Those lines stay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Unpack

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code, error
from escrowmq.outbox.acts import Done, Ids, Operator, act_on_rows
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import State, state_is, trans_message

_M = trans_message.c
_LISTED = [column for column in _M if column.name != "body"]
_SIZE = sa.func.length(_M.body).label("body_bytes")
MAY: dict[str, frozenset[State]] = {
    "retry": frozenset({State.WAITING, State.DISCARDED, State.RETRYING}),
    "discard": frozenset({State.WAITING, State.PENDING, State.RETRYING, State.HELD}),
    "settle": frozenset(State) - {State.DONE},
}
"""The states in which an action is allowed. SENT and DONE rows are done; PENDING and HELD rows are sent anyway. A SENT
row may be settled because its callback may never come."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ``trans_message``; times are microseconds since 1970, None: not yet."""

    seq: int
    id: bytes
    state: State
    topic: str
    key: str | None
    tag: str | None
    properties: dict[str, str]
    attempts: int
    created_us: int
    due_us: int
    sent_us: int | None
    done_us: int | None
    error: str | None
    body_bytes: int
    body: bytes | None = None
    """Of :func:`show` only."""


def list_messages(
    engine: sa.Engine, *, state: State | None = State.WAITING, limit: int = 100, after: int = 0
) -> list[Row]:
    """List up to ``limit`` outbox rows in one state (None: in any), ordered by ``seq``, without bodies; the next page
    begins ``after`` the last ``seq``."""
    wanted = _M.seq > after
    if state is not None:
        wanted &= state_is(State(state))
    return _rows(engine, sa.select(*_LISTED, _SIZE).where(wanted).order_by(_M.seq).limit(limit))


def show(engine: sa.Engine, message_id: str | bytes) -> Row:
    """Return the outbox row of a message, with its body. Raises Rejected(NOT_FOUND)."""
    identity = model.message_id(message_id)
    rows = _rows(engine, sa.select(trans_message, _SIZE).where(_M.id == identity))
    if not rows:
        raise error(Code.NOT_FOUND, f"the outbox has no message {identity.hex()}", "it may have been sent and purged")
    return rows[0]


def retry(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Make WAITING, RETRYING and DISCARDED rows PENDING, with attempts counted anew: the relay sends them at once.
    Returns one result per id: OK, NOT_FOUND, or CONFLICT in another state."""
    return _act(engine, ids, "retry", operator)


def discard(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Never send these unsent rows; they stay in the table, and :func:`retry` restores them. Returns one result per id:
    OK, NOT_FOUND, or CONFLICT if the state is SENT, DONE or DISCARDED.

    A PENDING row can be in flight at this moment: its message may still be published.
    """
    return _act(engine, ids, "discard", operator)


def settle(engine: sa.Engine, ids: Ids, **operator: Unpack[Operator]) -> list[Done]:
    """Mark these rows as DONE, because the operator knows that the message arrived or needs no sending. Sends nothing.

    They leave the table as sent ones do, after the relay's ``keep``. Later rows of their keys continue. A PENDING row
    can be in flight at this moment. Returns one result per id: OK, NOT_FOUND, or CONFLICT if the row is DONE already.
    """
    return _act(engine, ids, "settle", operator)


def _act(engine: sa.Engine, ids: Ids, act: str, operator: Operator) -> list[Done]:
    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        rows = sa.select(_M.id, _M.state).where(_M.id.in_(part)).order_by(_M.id).with_for_update()
        found = {bytes(identity): State(number) for identity, number in connection.execute(rows)}
        now_us = database_now_us(connection)
        changes: dict[str, dict[str, Any]] = {
            "retry": {"state": State.PENDING.value, "attempts": 0, "due_us": 0},
            "discard": {"state": State.DISCARDED.value},
            "settle": {"state": State.DONE.value, "done_us": now_us, "sent_us": sa.func.coalesce(_M.sent_us, now_us)},
        }
        may = [identity for identity, state in found.items() if state in MAY[act]]
        if may:
            connection.execute(sa.update(trans_message).where(_M.id.in_(may)).values(changes[act]))
        results = {identity: Done(identity, Code.CONFLICT, state) for identity, state in found.items()}
        return results | {identity: Done(identity, Code.OK, State(changes[act]["state"])) for identity in may}

    return act_on_rows(engine, f"outbox.{act}", ids, change, **operator)


def _rows(engine: sa.Engine, query: sa.Select[Any]) -> list[Row]:
    with engine.connect() as connection, transaction_of(connection, trans_message):
        return [_row(row) for row in connection.execute(query).mappings()]


def _row(row: Any) -> Row:
    fields = {name: row[name] for name in Row.__slots__ if name in row}
    fields["id"], fields["state"] = bytes(row["id"]), State(row["state"])
    fields["properties"] = json.loads(row["properties"]) if row["properties"] else {}
    if "body" in fields:
        fields["body"] = bytes(fields["body"])
    return Row(**fields)
