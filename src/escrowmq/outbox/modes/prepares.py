"""Stored prepares of the both-reach mode (``trans_prepared``) whose end does not come, for an operator: list, discard.
Every act is recorded: :mod:`escrowmq.outbox.acts`.

A producer in merged mode that died between its prepare and its decision leaves one. Nobody can commit it manually: its
effect is a function of the consumer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code
from escrowmq.outbox.acts import Done, act_on_rows
from escrowmq.outbox.dialects import database_now_us, insert_if_absent
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_prepared, trans_recv_log
from escrowmq.platform.times import to_us

_T = trans_prepared.c


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
    engine: sa.Engine,
    group: str,
    *,
    older_than: float = 0.0,
    limit: int = 100,
    after: str | bytes | None = None,
) -> list[StoredPrepare]:
    """List prepares that a consumer group stored ``older_than`` seconds ago, by id; the next page is ``after`` the
    last one's."""
    size = sa.func.length(_T.body).label("body_bytes")
    columns = (_T.consumer_group, _T.message_id, _T.topic, _T.key, _T.tag, size, _T.prepared_us)
    wanted = sa.select(*columns).where(_T.consumer_group == group)
    if after is not None:
        wanted = wanted.where(_T.message_id > model.message_id(after))
    with engine.connect() as connection, transaction_of(connection, trans_prepared):
        if older_than > 0:
            wanted = wanted.where(_T.prepared_us <= database_now_us(connection) - to_us(older_than))
        rows = connection.execute(wanted.order_by(_T.message_id).limit(limit))
        return [StoredPrepare(row[0], bytes(row[1]), *row[2:]) for row in rows]


def discard_prepares(
    engine: sa.Engine, group: str, ids: Iterable[str | bytes], *, by: str | None = None, why: str | None = None
) -> list[Done]:
    """Delete stored prepares, and mark them as handled: a commit that comes after all has no effect."""

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        mine = sa.and_(_T.consumer_group == group, _T.message_id.in_(part))
        query = sa.select(_T.message_id, _T.topic, _T.key, _T.prepared_us).where(mine).order_by(_T.message_id)
        rows = connection.execute(query.with_for_update()).all()
        if not rows:
            return {}
        now_us = database_now_us(connection)
        marks: list[dict[str, Any]] = [
            {"consumer_group": group, "message_id": row.message_id, "seen_us": now_us, "topic": row.topic}
            for row in rows
        ]
        connection.execute(insert_if_absent(connection.dialect.name, trans_recv_log), marks)
        there = [row.message_id for row in rows]
        connection.execute(sa.delete(trans_prepared).where(_T.consumer_group == group, _T.message_id.in_(there)))
        return {bytes(row.message_id): Done(bytes(row.message_id), Code.OK, None, _said(row)) for row in rows}

    return act_on_rows(engine, "prepared.discard", ids, change, by=by, why=why, group=group)


def _said(row: Any) -> str:
    key = "" if row.key is None else f"; {row.key[:100]}"
    return f"{row.topic}; prepared_us {row.prepared_us}{key}"
