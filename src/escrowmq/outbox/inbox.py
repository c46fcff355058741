"""``claim_tx``: the mark that a message was handled, in the same transaction as its effect. A repeat finds the mark.

Two consumers that claim one message at once: the database makes the second wait until the first has committed (then it gets False) or
rolled back (then True), or fails it (a deadlock, a serialization failure, SQLite's "database is locked"); never are both True.

How a mark that is there already is noticed in each kind of database, without an error that aborts the transaction and without
taking other errors for one: :func:`escrowmq.outbox.dialects.insert_new`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq import model
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.message.names import check_name
from escrowmq.outbox.dialects import insert_new
from escrowmq.outbox.purging import age_of, delete_older
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import trans_recv_log
from escrowmq.outbox.targets.seam import MESSAGE_ID_HEADER

if TYPE_CHECKING:
    from escrowmq.client.consuming.consumer import Consumer
    from escrowmq.client.consuming.received import Received, ReceivedBatch

    Handler = Callable[[Any, Received], object]

Database = sessionmaker[Session] | sa.Engine
logger = logging.getLogger(__name__)

_STOPS = frozenset({Code.NO_TABLES, Code.SCHEMA_VERSION, Code.NO_TRANSACTION})
"""No message's fault: the loop cannot go on."""

CHUNK_ROWS = 1_000
"""Marks of one INSERT, and of one step of a purge."""

_SEEN = trans_recv_log.c


def claim_tx(
    session: AnySession,
    message: Any = None,
    *,
    group: str,
    message_id: str | bytes | uuid.UUID | None = None,
) -> bool:
    """Whether this is the first time that ``group`` handles the message: True, go on; False, skip the effect.

    ``message`` is anything with a ``message_id`` (what a consumer gave you); or give the id itself, as for messages that came
    by another broker (see :func:`header_id`). Call it before the effect, in the effect's transaction; if that rolls back, the
    mark is gone too. Errors as :func:`escrowmq.outbox.send_tx`; Rejected(BAD_GROUP_NAME).
    """
    check_name(group, Code.BAD_GROUP_NAME)
    if (message is None) == (message_id is None):
        raise Misuse(Code.BAD_ARGUMENT, "what is to be claimed? A message, or message_id=, and not both")
    identity = identity_of(message if message_id is None else message_id)
    with transaction_of(session, trans_recv_log) as connection:
        return bool(_claim(connection, group, [identity]))


def claim_batch_tx(session: AnySession, messages: Iterable[Any], group: str) -> list[bool]:
    """:func:`claim_tx` for many: one answer per message, in their order. Of equal ids within ``messages`` the first is True.

    ``messages`` are received messages or ids. One statement for a thousand of them (a few more on MariaDB if some are repeats).
    """
    check_name(group, Code.BAD_GROUP_NAME)
    ids = [identity_of(message) for message in messages]
    wanted = sorted(set(ids))  # one order for all consumers: those that overlap wait, they do not deadlock
    fresh: set[bytes] = set()
    with transaction_of(session, trans_recv_log) as connection:
        for at in range(0, len(wanted), CHUNK_ROWS):
            fresh |= _claim(connection, group, wanted[at : at + CHUNK_ROWS])
    answers = []
    for identity in ids:
        answers.append(identity in fresh)
        fresh.discard(identity)
    return answers


def header_id(headers: Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None) -> bytes:
    """The message id in the headers of a message that a relay sent by Kafka, RabbitMQ or Redis.

    Takes Kafka's list of pairs or a mapping; names and values may be bytes. Raises Misuse(BAD_ARGUMENT) if it is not there.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    for name, value in pairs:
        if _str(name) == MESSAGE_ID_HEADER:
            return model.message_id(_str(value))
    text = f"no header {MESSAGE_ID_HEADER}"
    raise Misuse(Code.BAD_ARGUMENT, text, "no relay sent this message: give its own unique id as message_id=")


def purge_seen(engine: sa.Engine, older_than: float | timedelta, *, group: str | None = None) -> int:
    """Delete marks older than ``older_than`` (seconds, or a timedelta); how many. In short transactions of its own.

    It must be longer than any redelivery can take: the broker's ``retention`` plus the relay's retries. A message that comes again
    after its mark was purged has its effect twice.
    """
    only = () if group is None else (_SEEN.consumer_group == group,)
    return delete_older(engine, _SEEN.seen_us, age_of(older_than), CHUNK_ROWS, *only)


# The loop around it


def consume(
    consumer: Consumer,
    database: Database,
    handler: Handler,
    *,
    group: str | None = None,
    max_messages: int = 500,
    idle_timeout: float | None = None,
) -> int:
    """Consume until ``consumer`` is closed, or nothing came for ``idle_timeout`` seconds; how many messages had their effect.

    ``database`` is a ``sessionmaker`` or an Engine: its ``begin()`` gives what ``handler(session, message)`` gets. A batch is one
    transaction: claim, handle what is new, commit, then acknowledge. If that fails, its messages are done one by one, so that only
    those whose own handling fails go back (``nack`` with the exception as cause; dead letters after ``max_attempts``). ``group`` names
    the marks; None: the consumer's own. Raises Misuse(NO_TABLES | SCHEMA_VERSION | NO_TRANSACTION), after giving the batch back.
    """
    name = consumer.group if group is None else group
    effects = 0
    for batch in consumer.batches(max_messages, idle_timeout=idle_timeout):
        try:
            effects += _handle(database, handler, list(batch), name)
        except Exception as problem:
            if isinstance(problem, Misuse) and problem.code in _STOPS:
                batch.nack(0.0, "the consumer cannot claim", wait=False)
                raise
            logger.info("a batch of %d messages failed; doing them one by one: %r", len(batch), problem)
            effects += _handle_apart(database, handler, batch, name)
            continue
        try:
            batch.ack()
        except EscrowError as problem:  # the effects are committed: what comes again finds its mark
            logger.info("a batch of %d messages was handled but not acknowledged: %s", len(batch), problem)
    return effects


def _handle(database: Database, handler: Handler, messages: list[Received], group: str) -> int:
    """One transaction; how many effects it has."""
    with database.begin() as session:
        first = claim_batch_tx(session, messages, group)
        for message, new in zip(messages, first, strict=True):
            if new:
                handler(session, message)
    return sum(first)


def _handle_apart(database: Database, handler: Handler, batch: ReceivedBatch, group: str) -> int:
    """A transaction per message; those that fail are delivered again."""
    effects = 0
    for message in batch:
        try:
            effects += _handle(database, handler, [message], group)
        except Exception as problem:
            logger.warning("%r failed, attempt %d", message, message.attempt, exc_info=True)
            message.nack(cause=f"{type(problem).__name__}: {problem}"[:500])
        else:
            message.ack()
    return effects


# One chunk


def _claim(connection: sa.Connection, group: str, ids: Sequence[bytes]) -> set[bytes]:
    """Mark them; those that had no mark."""
    now = time.time_ns() // 1000
    rows = [{"consumer_group": group, "message_id": identity, "seen_us": now} for identity in ids]
    return insert_new(connection, trans_recv_log.c.message_id, rows)


def identity_of(thing: Any) -> bytes:
    """The 16 bytes that name a message: of a received message, or of an id. Raises Misuse(BAD_ARGUMENT) if there are none."""
    value = thing if isinstance(thing, str | bytes | uuid.UUID) else getattr(thing, "message_id", None)
    if not isinstance(value, str | bytes | uuid.UUID) or not value:
        hint = "give message_id=, such as inbox.header_id(message.headers())"
        raise Misuse(Code.BAD_ARGUMENT, f"{type(thing).__name__} has no message id", hint)
    return model.message_id(value)


def _str(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)
