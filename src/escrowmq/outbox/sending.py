"""``send_tx``: writes a message to ``trans_message`` inside the caller's database transaction.

On PostgreSQL a notification goes with the rows: it is delivered when, and only when, they are committed (a savepoint rolled back
takes it along, which is why "once per transaction" is left to PostgreSQL, which folds equal ones). With one row it is part
of the INSERT and costs no statement of its own.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
import xxhash
from sqlalchemy.exc import IntegrityError

from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.row import OutgoingRow
from escrowmq.model import Message
from escrowmq.outbox.dialects import database_now_us, is_duplicate
from escrowmq.outbox.limits import Content, checker, columns, contents
from escrowmq.outbox.session import AnySession, transaction_of
from escrowmq.outbox.tables import CHANNEL, LANES, State, trans_message
from escrowmq.settings import BrokerSettings

CHUNK_ROWS = 5_000
CHUNK_BYTES = 4 << 20
"""Of one INSERT: well below MariaDB's ``max_allowed_packet`` (16 MiB) even when every byte must be escaped."""

_INSERT = sa.insert(trans_message).inline()
_NOTIFY = sa.func.pg_notify(CHANNEL, "")
_INSERT_AND_NOTIFY = _INSERT.returning(_NOTIFY)
_turns = itertools.count(random.randrange(LANES))


def send_tx(
    session: AnySession,
    topic: str | Message,
    body: bytes | None = None,
    *,
    key: str | None = None,
    tag: str | None = None,
    properties: Mapping[str, str] | None = None,
    delay: float = 0.0,
    message_id: str | bytes | uuid.UUID | None = None,
    limits: BrokerSettings | None = None,
) -> bytes:
    """Put one message (or a :class:`~escrowmq.Message`) into the outbox; its 16-byte id.

    It is sent if and only if the transaction of ``session`` (a Session, scoped_session or Connection) commits. Nothing is flushed or
    committed. ``delay`` is seconds after the relay's send; ``limits`` a broker's settings, None: the defaults.

    Raises before anything is written: Rejected for what is over a limit, Misuse(BAD_ARGUMENT) for what is unusable,
    Misuse(NO_TRANSACTION), Misuse(NO_TABLES), Misuse(SCHEMA_VERSION). Rejected(MESSAGE_ID_TAKEN) if the id is there already.
    """
    check = checker(limits)
    if isinstance(topic, Message):
        if body is not None:
            raise Misuse(Code.BAD_ARGUMENT, "a Message has its own body")
        row = check.message(topic)
    else:
        row = OutgoingRow._make(check.row(topic, body, key, tag, properties, delay, message_id=message_id))
    found = contents([row])
    _insert(session, found)
    return found[0].id


def send_batch_tx(
    session: AnySession,
    messages: Iterable[Message] | pa.RecordBatch | pa.Table,
    *,
    limits: BrokerSettings | None = None,
) -> list[bytes]:
    """Put many messages into the outbox; their ids, in the order given.

    An iterable of :class:`~escrowmq.Message`, or columns named as in :data:`escrowmq.schemas.OUTGOING` (``topic`` and ``body`` must
    be there). One INSERT for thousands of rows. All are checked before the first is written; errors as :func:`send_tx`.
    """
    if isinstance(messages, pa.RecordBatch | pa.Table):
        found = columns(messages, limits)
    elif isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Message):
        check = checker(limits)
        found = contents([check.message(message) for message in messages])
    else:
        raise Misuse(Code.BAD_ARGUMENT, f"{type(messages).__name__} is not messages, a record batch or a table")
    _insert(session, found)
    return [content.id for content in found]


def lane_of(key: str | None) -> int:
    """The lane of a key: the same for ever, in every process. Without a key: by turns."""
    return next(_turns) % LANES if key is None else xxhash.xxh64_intdigest(key.encode()) % LANES


def _insert(session: AnySession, found: list[Content]) -> None:
    with transaction_of(session, trans_message) as connection:
        now = database_now_us(connection)
        wakes = connection.dialect.name == "postgresql"
        try:
            if len(found) == 1:
                connection.execute(_INSERT_AND_NOTIFY if wakes else _INSERT, _row(found[0], now))
                return
            for chunk in _chunks(found):
                connection.execute(_INSERT, [_row(content, now) for content in chunk])
            if wakes and found:
                connection.execute(sa.select(_NOTIFY))
        except IntegrityError as problem:
            if is_duplicate(problem):
                hint = "roll back; a message id names one message for ever"
                text = "the outbox has a message of this id already"
                raise Rejected(Code.MESSAGE_ID_TAKEN, text, hint) from problem
            raise


def _row(content: Content, now: int) -> dict[str, Any]:
    fresh = {"state": State.PENDING.value, "attempts": 0, "due_us": 0, "created_us": now}
    return {**content._asdict(), **fresh, "lane": lane_of(content.key)}


def _chunks(found: list[Content]) -> Iterator[list[Content]]:
    """Runs of at most CHUNK_ROWS rows and about CHUNK_BYTES of bodies and properties."""
    chunk: list[Content] = []
    size = 0
    for content in found:
        added = len(content.body) + len(content.properties or "")
        if chunk and (len(chunk) >= CHUNK_ROWS or size + added > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(content)
        size += added
    if chunk:
        yield chunk
