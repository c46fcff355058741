"""Outbox rows whose attempts are used up, for an operator: list, show, send again, discard, settle. Every act is
recorded: :mod:`escrowmq.outbox.acts`.

Before there was that record (tables of version 3) an act was noted in a line before the row's ``error``: when, who,
what was done. Those lines stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code, error
from escrowmq.outbox.acts import Done, act_on_rows
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import State, state_is, trans_message

_LISTED = [column for column in trans_message.c if column.name != "body"]
MAY: dict[str, frozenset[State]] = {
    "retry": frozenset({State.WAITING, State.DISCARDED, State.RETRYING}),
    "discard": frozenset({State.WAITING, State.PENDING, State.RETRYING, State.HELD}),
    "settle": frozenset(State) - {State.DONE},
}
"""From which states an act is allowed. What is SENT or DONE is done; a PENDING row is being tried by itself, a HELD one
will be. A SENT row may be settled because it may wait for a callback that will never come.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ``trans_message``; times are microseconds since 1970, None for what has not happened."""

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
    """Return rows in one state (None: in any) in the order of their ``seq``, without bodies; the next page is
    ``after`` the last ``seq``."""
    wanted = trans_message.c.seq > after
    if state is not None:
        wanted &= state_is(State(state))
    return _rows(engine, sa.select(*_LISTED, _SIZE).where(wanted).order_by(trans_message.c.seq).limit(limit))


def show(engine: sa.Engine, message_id: str | bytes) -> Row:
    """One row with its body. Raises Rejected(NOT_FOUND)."""
    identity = model.message_id(message_id)
    rows = _rows(engine, sa.select(trans_message, _SIZE).where(trans_message.c.id == identity))
    if not rows:
        raise error(Code.NOT_FOUND, f"the outbox has no message {identity.hex()}", "it may have been sent and purged")
    return rows[0]


def retry(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Send WAITING, RETRYING and DISCARDED rows now, attempts counted anew; one result per id. ``by``: who; None: the
    system's user; ``why``: the reason, for the record."""
    return _act(engine, ids, "retry", by, why)


def discard(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Never send these rows, which are not sent yet; they stay in the table, and :func:`retry` brings them back.

    A PENDING row can be on its way at this moment: its message may still come out.
    """
    return _act(engine, ids, "discard", by, why)


def settle(
    engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Mark these rows as DONE manually: a person knows that the message arrived, or was seen to otherwise. Nothing is
    sent.

    They leave the table as sent ones do, after the relay's ``keep``. Later rows of their keys continue. A PENDING row
    can be on its way at this moment.
    """
    return _act(engine, ids, "settle", by, why)


def _act(engine: sa.Engine, ids: Iterable[str | bytes], act: str, by: str | None, why: str | None) -> list[Done]:
    """Change those rows whose state allows it."""

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        columns = (trans_message.c.id, trans_message.c.state)
        rows = sa.select(*columns).where(trans_message.c.id.in_(part)).order_by(trans_message.c.id).with_for_update()
        found = {bytes(identity): State(number) for identity, number in connection.execute(rows)}
        values = _values(connection, act)
        may = [identity for identity, state in found.items() if state in MAY[act]]
        if may:
            connection.execute(sa.update(trans_message).where(trans_message.c.id.in_(may)).values(values))
        results = {identity: Done(identity, Code.CONFLICT, state) for identity, state in found.items()}
        return results | {identity: Done(identity, Code.OK, State(values["state"])) for identity in may}

    return act_on_rows(engine, f"outbox.{act}", ids, change, by=by, why=why)


def _values(connection: sa.Connection, act: str) -> dict[str, Any]:
    if act == "retry":
        return {"state": State.PENDING.value, "attempts": 0, "due_us": 0}
    if act == "discard":
        return {"state": State.DISCARDED.value}
    now_us = database_now_us(connection)
    sent_us = sa.func.coalesce(trans_message.c.sent_us, now_us)
    return {"state": State.DONE.value, "sent_us": sent_us, "done_us": now_us}


_SIZE = sa.func.length(trans_message.c.body).label("body_bytes")


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
