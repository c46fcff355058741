"""Outbox rows whose attempts are used up, for an operator: list, show, send again, discard. Every act is noted in
the row.

A note is a line before the row's ``error``: when, who, what was done. The same goes to the log.
"""

from __future__ import annotations

import getpass
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code, Misuse, error
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import State, state_is, trans_message

MAX_NOTES = 4_000
"""Characters of notes and errors that a row keeps; the oldest are cut."""

logger = logging.getLogger(__name__)
_LISTED = [column for column in trans_message.c if column.name != "body"]
_MAY: dict[str, frozenset[State]] = {
    "retry": frozenset({State.WAITING, State.DISCARDED, State.RETRYING}),
    "discard": frozenset({State.WAITING, State.PENDING, State.RETRYING, State.HELD}),
}
"""From which states an act is allowed. What is SENT or DONE is done; a PENDING row is being tried by itself, a HELD one will be."""


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


@dataclass(frozen=True, slots=True)
class Done:
    """What an act did to one row: OK, NOT_FOUND, or CONFLICT: its ``state`` (as it is now) does not allow it."""

    id: bytes
    code: Code
    state: State | None


def list_messages(
    engine: sa.Engine, *, state: State | None = State.WAITING, limit: int = 100, after: int = 0
) -> list[Row]:
    """Rows in one state (None: in any) in the order of their ``seq``, without bodies; the next page is ``after`` the last ``seq``."""
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


def retry(engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None) -> list[Done]:
    """Send WAITING, RETRYING and DISCARDED rows now, attempts counted anew; one result per id. ``by``: who; None: the system's
    user."""
    return _act(engine, ids, by, "retry", {"state": State.PENDING.value, "attempts": 0, "due_us": 0})


def discard(engine: sa.Engine, ids: Iterable[str | bytes], *, by: str | None = None) -> list[Done]:
    """Never send these rows, which are not sent yet; they stay in the table, and :func:`retry` brings them back.

    A PENDING row can be on its way at this moment: its message may still come out.
    """
    return _act(engine, ids, by, "discard", {"state": State.DISCARDED.value})


def _act(engine: sa.Engine, ids: Iterable[str | bytes], by: str | None, act: str, values: dict[str, Any]) -> list[Done]:
    """One transaction: lock the rows, change those that may be, note it."""
    if isinstance(ids, str | bytes):
        raise Misuse(Code.BAD_ARGUMENT, "one id where many were expected", f"[{ids!r}]")
    wanted = [model.message_id(identity) for identity in ids]
    note = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z {act} by {by or acting_user()}"
    columns = (trans_message.c.id, trans_message.c.state, trans_message.c.error)
    rows = sa.select(*columns).where(trans_message.c.id.in_(wanted)).order_by(trans_message.c.id).with_for_update()
    changed = sa.update(trans_message).where(
        trans_message.c.id == sa.bindparam("of"), trans_message.c.state == sa.bindparam("was")
    )
    results: dict[bytes, Done] = {}
    with engine.begin() as connection, transaction_of(connection, trans_message):
        for identity, number, before in connection.execute(rows).all():
            state = State(number)
            code = Code.CONFLICT
            if state in _MAY[act]:
                noted = {**values, "error": f"{note}\n{before or ''}".rstrip()[:MAX_NOTES]}
                done = connection.execute(changed.values(noted), {"of": identity, "was": number}).rowcount
                code, state = (Code.OK, State(values["state"])) if done else (Code.CONFLICT, state)
            results[bytes(identity)] = Done(bytes(identity), code, state)
    for identity in wanted:
        done_to = results.setdefault(identity, Done(identity, Code.NOT_FOUND, None))
        logger.info("outbox %s: message %s: %s", note, identity.hex(), done_to.code.name)
    return [results[identity] for identity in wanted]


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


def acting_user() -> str:
    """Who acts, as the system knows it: for the notes of acts."""
    with suppress(OSError, KeyError):  # no user of this number is known
        return getpass.getuser()
    return "unknown"
