"""``claim_tx``: the mark that a message was handled, in the same transaction as its effect. A repeat finds the mark.

If two consumers claim one message at once, the database makes the second wait until the first has committed (then it
gets False) or rolled back (then True), or fails it (a deadlock, a serialization failure, SQLite's "database is
locked"); never are both True. :func:`escrowmq.outbox.dialects.insert_new` finds existing marks in each kind of
database, without an error that aborts the transaction.

A message is named by its topic and id, so a mark has a topic. The first message of an id is marked by that id. The mark
of a message of another topic under the same id, which is rare, is a digest of both, and the first mark is made to last
as long. So the usual claim is one INSERT, and the id of a handled message can be read in the table. ``handled.py`` lets
operators have a message handled again.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq import model
from escrowmq.client.lanes.blocking import finished
from escrowmq.errors import Code, Misuse
from escrowmq.message.names import MAX_NAME, check_name
from escrowmq.outbox.consuming import Loop, Stop
from escrowmq.outbox.dialects import database_now_us, insert_new
from escrowmq.outbox.purging import age_of, delete_older
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import trans_recv_log
from escrowmq.outbox.targets.seam import MESSAGE_ID_HEADER

CHUNK_ROWS = 1_000
"""Marks of one INSERT, and of one transaction of a purge."""
_SEEN = trans_recv_log.c

if TYPE_CHECKING:
    from escrowmq.client.consuming.consumer import Consumer
    from escrowmq.client.consuming.received import Received

    Handler = Callable[[Any, Received], object]

Database = sessionmaker[Session] | sa.Engine

Name = tuple[bytes, str | None]
"""Message id and topic (None: any topic)."""


def claim_tx(
    session: AnySession,
    message: Any = None,
    *,
    group: str,
    message_id: str | bytes | uuid.UUID | None = None,
    topic: str | None = None,
) -> bool:
    """Return whether this is the first time that ``group`` handles the message: True, continue; False, skip the effect.

    ``message`` is anything with a ``message_id`` and a ``topic`` (a received message); or pass both, as for messages of
    another broker (see :func:`header_id`). Without a topic the id is claimed for every topic. Call it before the
    effect, in the effect's transaction, whose rollback removes the mark too. Errors as
    :func:`escrowmq.outbox.send_tx`; Rejected(BAD_GROUP_NAME).
    """
    check_name(group, Code.BAD_GROUP_NAME)
    if (message is None) == (message_id is None):
        raise Misuse(Code.BAD_ARGUMENT, "what is to be claimed? A message, or message_id=, and not both")
    name = _name_of(message if message_id is None else message_id, topic)
    with transaction_of(session, trans_recv_log) as connection:
        return bool(_claim(connection, group, [name]))


def claim_batch_tx(session: AnySession, messages: Iterable[Any], group: str) -> list[bool]:
    """Claim many messages as :func:`claim_tx` does; return one answer per message. Of equal messages the first is True.

    ``messages`` are received messages or ids (an id alone is claimed for every topic). One statement per thousand (a
    few more on MariaDB if some are repeats).
    """
    check_name(group, Code.BAD_GROUP_NAME)
    names = [_name_of(message) for message in messages]
    # one order for all consumers, so that they wait for each other without deadlocks
    wanted = sorted(set(names), key=lambda name: (name[0], name[1] or ""))
    fresh: set[Name] = set()
    with transaction_of(session, trans_recv_log) as connection:
        for at in range(0, len(wanted), CHUNK_ROWS):
            fresh |= _claim(connection, group, wanted[at : at + CHUNK_ROWS])
    answers = []
    for name in names:
        answers.append(name in fresh)
        fresh.discard(name)
    return answers


def unclaim_tx(session: AnySession, messages: Iterable[Any], group: str) -> None:
    """Delete the marks that :func:`claim_tx` or :func:`claim_batch_tx` made in this transaction, because the effects of
    these messages will not happen in it."""
    with transaction_of(session, trans_recv_log) as connection:
        for identity, topic in map(_name_of, messages):
            mark: sa.ColumnElement[bool] = _SEEN.message_id == identity
            if topic is not None:
                other = _SEEN.message_id == topic_mark(identity, topic)
                mark = sa.or_(sa.and_(mark, _SEEN.topic == topic), other)
            connection.execute(sa.delete(trans_recv_log).where(_SEEN.consumer_group == group, mark))


def header_id(headers: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None) -> bytes:
    """Return the message id in the headers of a message that a relay sent by Kafka, RabbitMQ or Redis.

    ``headers``: Kafka's list of pairs, or a mapping; names and values may be bytes. Raises Misuse(BAD_ARGUMENT) without
    an id.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    for name, value in pairs:
        if _str(name) == MESSAGE_ID_HEADER:
            return model.message_id(_str(value))
    text = f"no header {MESSAGE_ID_HEADER}"
    raise Misuse(Code.BAD_ARGUMENT, text, "no relay sent this message: give its own unique id as message_id=")


def purge_seen(engine: sa.Engine, older_than: float | timedelta, *, group: str | None = None) -> int:
    """Delete marks older than ``older_than`` (seconds, or a timedelta), in short transactions. Returns how many.

    It must exceed any delay of a redelivery: the broker's ``retention`` plus the relay's retries. A message that is
    redelivered after its mark was purged has its effect twice.
    """
    only = () if group is None else (_SEEN.consumer_group == group,)
    return delete_older(engine, _SEEN.seen_us, age_of(older_than), CHUNK_ROWS, *only)


def consume(
    consumer: Consumer,
    database: Database,
    handler: Handler,
    *,
    group: str | None = None,
    max_messages: int = 500,
    idle_timeout: float | None = None,
    within: Callable[[Any, Sequence[Received]], object] | None = None,
    after: Callable[[Sequence[Received]], object] | None = None,
    stop: Stop | None = None,
) -> int:
    """Consume until the consumer is stopped or closed, ``stop`` is set, or no message arrives for ``idle_timeout``
    seconds.

    Returns how many messages had their effect. ``database`` is a ``sessionmaker`` or an Engine, whose ``begin()``
    yields the session of ``handler(session, message)``. A batch of at most ``max_messages`` is one transaction: claim,
    handle new messages, commit, then acknowledge. If that fails, its messages are handled one by one, so that only
    those whose own handling fails are given back (``nack`` with the exception as cause; dead letters after
    ``max_attempts``). ``group`` names the marks; None: the consumer's own.

    ``within(session, messages)`` is called at the end of each transaction, also with the repeats; ``after(messages)``
    after the commit, before the acknowledgement; it must not raise. ``stop`` is a ``threading.Event`` or a predicate.
    It is checked, like the consumer, after each message: handled messages are committed and acknowledged, the rest of
    the batch is released without a mark. Raises Misuse(NO_TABLES | SCHEMA_VERSION | NO_TRANSACTION), after giving the
    batch back.

    :func:`escrowmq.outbox.aio.consume` is the awaitable version.
    """
    functions = (handler, within, after, claim_batch_tx, unclaim_tx)
    return finished(Loop(consumer, database, *functions, group, stop, awaits=False).run(max_messages, idle_timeout))


# One chunk


def _claim(connection: sa.Connection, group: str, names: Sequence[Name]) -> set[Name]:
    """Insert marks for messages (id and topic each); return those that ``group`` had not handled."""
    fresh: set[Name] = set()
    left = list(names)
    while left:  # once, unless an id stands here for several topics
        first = dict(reversed(left))
        now = [name for name in left if first[name[0]] == name[1]]
        left = [name for name in left if first[name[0]] != name[1]]
        fresh |= _claim_distinct(connection, group, dict(now))
    return fresh


def _claim_distinct(connection: sa.Connection, group: str, wanted: dict[bytes, str | None]) -> set[Name]:
    """Claim as :func:`_claim` does, with one topic per id (``wanted``: topic by id; None: for every topic)."""
    new = _mark(connection, group, wanted)
    fresh: set[Name] = {(identity, wanted[identity]) for identity in new}
    known = [identity for identity, topic in wanted.items() if identity not in new and topic is not None]
    if not known:
        return fresh
    query = sa.select(_SEEN.message_id, _SEEN.topic).where(_SEEN.consumer_group == group, _SEEN.message_id.in_(known))
    if connection.dialect.name in ("mysql", "mariadb"):
        query = query.with_for_update(read=True)  # a plain read may be older than the INSERT that met the mark
    marked: dict[bytes, str | None] = {bytes(identity): topic for identity, topic in connection.execute(query)}
    if gone := {identity: wanted[identity] for identity in known if identity not in marked}:  # purged this moment
        fresh |= _claim_distinct(connection, group, gone)
    others: dict[bytes, Name] = {}
    for identity in known:
        topic, first = wanted[identity] or "", marked.get(identity)
        if first == forgotten(topic):
            mine = (_SEEN.consumer_group == group, _SEEN.message_id == identity, _SEEN.topic == first)
            change = sa.update(trans_recv_log).where(*mine).values(topic=topic, seen_us=database_now_us(connection))
            if connection.execute(change).rowcount == 1:  # of two concurrent claims, one succeeds
                fresh.add((identity, topic))
        elif first is not None and first != topic:
            others[topic_mark(identity, topic)] = (identity, topic)
    if others and (new := _mark(connection, group, {mark: topic for mark, (_, topic) in others.items()})):
        lasting = [others[mark][0] for mark in new]  # a purge must not let the first mark go before these
        change = sa.update(trans_recv_log).where(_SEEN.consumer_group == group, _SEEN.message_id.in_(lasting))
        connection.execute(change.values(seen_us=database_now_us(connection)))
        fresh |= {others[mark] for mark in new}
    return fresh


def _mark(connection: sa.Connection, group: str, marks: dict[bytes, str | None]) -> set[bytes]:
    now = database_now_us(connection)
    rows = [
        {"consumer_group": group, "message_id": mark, "seen_us": now, "topic": topic} for mark, topic in marks.items()
    ]
    return insert_new(connection, _SEEN.message_id, rows)


def forgotten(topic: str) -> str:
    """Return the text that replaces ``topic`` in a mark, so that its message is handled again; it is no valid name of a
    topic."""
    return f"%{topic}" if len(topic) < MAX_NAME else f"%{hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()}"


def stands(topic: str | None) -> bool:
    """Return whether a mark with this topic is valid: not forgotten."""
    return topic is None or not topic.startswith("%")


def topic_mark(identity: bytes, topic: str) -> bytes:
    """Return the digest (16 bytes) that marks a message, instead of its id, where the id alone marks a message of
    another topic."""
    return hashlib.blake2b(identity + topic.encode(), digest_size=16).digest()


def _name_of(thing: Any, topic: str | None = None) -> Name:
    own = None if isinstance(thing, str | bytes | uuid.UUID) else getattr(thing, "topic", None)
    return identity_of(thing), own if isinstance(own, str) and topic is None else topic


def identity_of(thing: Any) -> bytes:
    """Return the 16-byte id of a message (its ``message_id``), or of an id in any form. Raises Misuse(BAD_ARGUMENT) if
    there is none."""
    value = thing if isinstance(thing, str | bytes | uuid.UUID) else getattr(thing, "message_id", None)
    if not isinstance(value, str | bytes | uuid.UUID) or not value:
        hint = "give message_id=, such as inbox.header_id(message.headers())"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(thing).__name__} has no message id", hint)
    return model.message_id(value)


def _str(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)
