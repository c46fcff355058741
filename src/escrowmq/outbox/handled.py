"""Marks of the receive log, for an operator: list, forget (so that a message is handled again), settle (so that it is
skipped). Every action is recorded: :mod:`escrowmq.outbox.acts`.

A forgotten mark with a topic stays as a row, with ``%`` before the topic: only that topic's message may claim it again.
If it were deleted, a message of another topic under the same id, whose own mark stands beside it, would be handled
twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import sqlalchemy as sa

from escrowmq import model
from escrowmq.errors import Code
from escrowmq.message.names import check_name
from escrowmq.outbox.acts import Change, Done, Ids, Operator, act_on_rows
from escrowmq.outbox.inbox import claim_tx, forgotten, stands, topic_mark
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_recv_log

_SEEN = trans_recv_log.c


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark; ``seen_us`` in microseconds since 1970, by the database's clock."""

    group: str
    message_id: bytes
    """Or the digest of an id and a topic, where the id alone is another topic's."""
    topic: str | None
    """None: it stands for every topic."""
    seen_us: int
    is_forgotten: bool
    """Whether the message may be handled again."""


def list_marks(engine: sa.Engine, group: str, *, limit: int = 100, after: str | bytes | None = None) -> list[Mark]:
    """List up to ``limit`` marks of a consumer group, ordered by message id; the next page begins ``after`` the id of
    the last one."""
    page = sa.select(trans_recv_log).limit(limit)
    return _read(engine, group, page if after is None else page.where(_SEEN.message_id > model.message_id(after)))


def show_marks(engine: sa.Engine, group: str, ids: Ids) -> list[Mark]:
    """Return the existing marks of a consumer group for up to a thousand message ids."""
    wanted = [model.message_id(identity) for identity in ids]
    return _read(engine, group, sa.select(trans_recv_log).where(_SEEN.message_id.in_(wanted)))


def _read(engine: sa.Engine, group: str, query: sa.Select[Any]) -> list[Mark]:
    query = query.where(_SEEN.consumer_group == group).order_by(_SEEN.message_id)
    with engine.connect() as connection, transaction_of(connection, trans_recv_log):
        return [_mark(row) for row in connection.execute(query)]


def forget_marks(
    engine: sa.Engine, group: str, ids: Ids, *, topic: str | None = None, **operator: Unpack[Operator]
) -> list[Done]:
    """Remove marks: when a message is redelivered, ``group`` handles it once more. This does not redeliver it: reset
    the consumer group for that, or send the message again. ``topic``: of the messages; needed only where messages of
    several topics have the same id. Returns one result per id: OK, or NOT_FOUND."""

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        return {identity: done for identity in part if (done := _forget(connection, group, identity, topic))}

    return _act(engine, "inbox.forget", group, ids, change, topic, operator)


def settle_marks(
    engine: sa.Engine, group: str, ids: Ids, *, topic: str | None = None, **operator: Unpack[Operator]
) -> list[Done]:
    """Mark messages as handled manually, so that ``group`` skips them. Returns one result per id: OK, or CONFLICT if
    there is a mark already.

    ``topic``: of the messages; None: whatever their topic. A purge of old marks deletes these too: the message must not
    arrive after that.
    """

    def change(connection: sa.Connection, part: list[bytes]) -> dict[bytes, Done]:
        done: dict[bytes, Done] = {}
        for identity in part:
            new = claim_tx(connection, group=group, message_id=identity, topic=topic)
            done[identity] = Done(identity, Code.OK if new else Code.CONFLICT, None)
        return done

    return _act(engine, "inbox.settle", group, ids, change, topic, operator)


def _act(
    engine: sa.Engine, act: str, group: str, ids: Ids, change: Change, topic: str | None, operator: Operator
) -> list[Done]:
    check_name(group, Code.BAD_GROUP_NAME)
    about = {"group": group} if topic is None else {"group": group, "topic": topic}
    return act_on_rows(engine, act, ids, change, about, **operator)


def _forget(connection: sa.Connection, group: str, identity: bytes, topic: str | None) -> Done | None:
    names = [identity] if topic is None else [identity, topic_mark(identity, topic)]
    query = sa.select(trans_recv_log).where(_SEEN.consumer_group == group, _SEEN.message_id.in_(names))
    for row in connection.execute(query.order_by(_SEEN.message_id).with_for_update()).all():
        mark = _mark(row)
        mine = sa.and_(_SEEN.consumer_group == group, _SEEN.message_id == mark.message_id)
        if mark.is_forgotten or (mark.topic is not None and topic not in (None, mark.topic)):
            continue
        if mark.message_id != identity or mark.topic is None:
            connection.execute(sa.delete(trans_recv_log).where(mine))
        else:
            connection.execute(sa.update(trans_recv_log).where(mine).values(topic=forgotten(mark.topic)))
        return Done(identity, Code.OK, None, f"seen_us {mark.seen_us}, topic {mark.topic}")
    return None


def _mark(row: Any) -> Mark:
    gone = not stands(row.topic)
    topic = row.topic[1:] if gone else row.topic
    return Mark(row.consumer_group, bytes(row.message_id), topic, row.seen_us, gone)
