"""``send_tx``: writes a message to ``trans_message`` inside the caller's database transaction.

On PostgreSQL a notification goes with the rows, and is delivered when, and only when, they are committed. (A rolled
back savepoint removes it, so each call notifies; PostgreSQL folds equal notifications of a transaction.) With one row
it is part of the INSERT and costs no statement of its own.

Messages are checked against the broker's limits here, because the relay has no caller to raise an error to. The limits
come from the settings and environment variables of a broker (``ESCROWMQ_MAX_BODY_BYTES``, ...), or from the caller's
:class:`~escrowmq.settings.BrokerSettings`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
import xxhash
from sqlalchemy.exc import IntegrityError

from escrowmq import hooks
from escrowmq.client.producing.outgoing import OutgoingCodec, one_batch
from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.limits import Limits, refusals
from escrowmq.message.names import check_name
from escrowmq.message.row import Checker, OutgoingRow
from escrowmq.model import Message
from escrowmq.outbox.dialects import database_now_us, is_duplicate
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
    """Put one message (or a :class:`~escrowmq.Message`) into the outbox; return its 16-byte id.

    It is sent if and only if the transaction of ``session`` (a Session, scoped_session or Connection) commits. Nothing
    is flushed or committed. ``delay`` is seconds after the relay's send; ``limits`` a broker's settings, None: the
    defaults.

    Raises before it writes: Rejected for a message over a limit, Misuse(BAD_ARGUMENT) for an unusable one,
    Misuse(NO_TRANSACTION | NO_TABLES | SCHEMA_VERSION). Rejected(MESSAGE_ID_TAKEN) if the id exists.
    """
    check = checker(limits)
    if isinstance(topic, Message):
        if body is not None:
            raise Misuse(Code.BAD_ARGUMENT, "a Message has its own body")
        row = check.message(topic)
    else:
        row = OutgoingRow._make(check.row(topic, body, key, tag, properties, delay, message_id=message_id))
    found = contents([row])
    (_insert_with_hooks if hooks.installed else _insert)(session, found)
    return found[0].id


def send_batch_tx(
    session: AnySession,
    messages: Iterable[Message] | pa.RecordBatch | pa.Table,
    *,
    limits: BrokerSettings | None = None,
) -> list[bytes]:
    """Put many messages into the outbox; return their ids in order.

    ``messages`` is an iterable of :class:`~escrowmq.Message`, or columns named as in
    :data:`escrowmq.schemas.OUTGOING` (``topic`` and ``body`` are required). One INSERT for thousands of rows. All are
    checked before the first is written; errors as :func:`send_tx`.
    """
    if isinstance(messages, pa.RecordBatch | pa.Table):
        found = columns(messages, limits)
    elif isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Message):
        check = checker(limits)
        found = contents([check.message(message) for message in messages])
    else:
        raise Misuse(Code.BAD_ARGUMENT, f"{type(messages).__name__} is not messages, a record batch or a table")
    (_insert_with_hooks if hooks.installed else _insert)(session, found)
    return [content.id for content in found]


def lane_of(key: str | None) -> int:
    """Return the lane (0 to 63) of a key, which never changes; without a key, the next one in turn."""
    return next(_turns) % LANES if key is None else xxhash.xxh64_intdigest(key.encode()) % LANES


def _insert_with_hooks(session: AnySession, found: list[Content]) -> None:
    topics = {content.topic for content in found}
    properties = [json.loads(content.properties) if content.properties else None for content in found]
    call = hooks.Call("store", topics.pop() if len(topics) == 1 else None, len(found), found, None, [*properties])
    call.max_properties_bytes = BrokerSettings().max_properties_bytes  # the broker's own are not known here
    with hooks.around(call):
        pairs = zip(found, properties, call.properties or properties, strict=True)
        changed = [one if new is old else one._replace(properties=json.dumps(new)) for one, old, new in pairs]
        _insert(session, changed)


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
            if not is_duplicate(problem):
                raise
            hint = "roll back; a message id names one message for ever"
            raise Rejected(Code.MESSAGE_ID_TAKEN, "the outbox has a message of this id already", hint) from problem


def _row(content: Content, now: int) -> dict[str, Any]:
    fresh = {"state": State.PENDING.value, "attempts": 0, "due_us": 0, "created_us": now}
    return {**content._asdict(), **fresh, "lane": lane_of(content.key)}


def _chunks(found: list[Content]) -> Iterator[list[Content]]:
    """Split messages for one INSERT each: at most CHUNK_ROWS rows and about CHUNK_BYTES of bodies and properties."""
    start, size = 0, 0
    for at, content in enumerate(found):
        added = len(content.body) + len(content.properties or "")
        if at > start and (at - start >= CHUNK_ROWS or size + added > CHUNK_BYTES):
            yield found[start:at]
            start, size = at, 0
        size += added
    if found:
        yield found[start:]


# Limits

_ELSEWHERE = "a row of the table has no place for it: the relay's target chooses queues, and no half message is made"


class Content(NamedTuple):
    """A message as it is stored. ``properties``: a JSON object, or None."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: str | None
    id: bytes
    delay_us: int


@cache
def checker(settings: BrokerSettings | None) -> Checker:
    """Return the validator of messages against a broker's limits; ``settings`` None: the defaults and the
    environment."""
    return Checker(Limits.of(dataclasses.asdict(settings or BrokerSettings.load())))


def contents(rows: Sequence[OutgoingRow]) -> list[Content]:
    """Check rows and convert them to what the table stores, with new ids where they have none. Writes nothing.

    Raises Misuse(BAD_ARGUMENT) for a queue, a ``check_immunity`` or a NUL character, which the table cannot store.
    """
    for row in rows:
        if row.queue != -1 or row.immunity_us:
            raise Misuse(Code.BAD_ARGUMENT, "a queue or check_immunity was given", _ELSEWHERE)
        if "\0" in (row.key or "") or "\0" in (row.tag or ""):
            raise _nul()
    ids = complete_ids([row.message_id for row in rows])
    return [
        Content(row.topic, row.body, row.key, row.tag, _json(row.properties), identity, row.delay_us)
        for row, identity in zip(rows, ids, strict=True)
    ]


def columns(data: pa.RecordBatch | pa.Table, settings: BrokerSettings | None) -> list[Content]:
    """Check and convert columns named as in :data:`escrowmq.schemas.OUTGOING`; ``topic`` and ``body`` are required.

    Returns what the table stores, one per row; writes nothing. Raises Rejected naming the first row over a limit,
    Rejected(BAD_BATCH) for wrong columns, or as :func:`contents`.
    """
    if not data.num_rows:
        return []
    batch = _codec.columns(one_batch(data) if isinstance(data, pa.Table) else data)
    for topic in pc.unique(batch.column("topic")).to_pylist():
        check_name(topic, Code.BAD_TOPIC_NAME)
    codes = refusals(batch, checker(settings).limits)
    if codes.any():
        first = int(np.flatnonzero(codes)[0])
        others = np.count_nonzero(codes == codes[first]) - 1
        raise Rejected(Code(codes[first]), f"row {first} of the batch is over the limit, and {others} more")
    half = batch.column("immunity_us").to_numpy().any() or batch.column("transaction").null_count < batch.num_rows
    if half or (batch.column("queue").to_numpy() != -1).any():
        raise Misuse(Code.BAD_ARGUMENT, "a queue, immunity_us or transaction was given", _ELSEWHERE)
    if any(pc.any(pc.match_substring(batch.column(name), "\0")).as_py() for name in ("key", "tag")):
        raise _nul()
    names = ("topic", "body", "key", "tag", "properties", "message_id", "delay_us")
    values: dict[str, Any] = {name: batch.column(name).to_pylist() for name in names}
    values["properties"] = map(_json, values["properties"])
    return list(map(Content._make, zip(*values.values(), strict=True)))


def _json(pairs: Iterable[tuple[str, str]] | None) -> str | None:
    return json.dumps(dict(pairs), ensure_ascii=False, separators=(",", ":")) if pairs else None


def _nul() -> Misuse:
    return Misuse(Code.BAD_ARGUMENT, "a key or tag has a NUL character", "PostgreSQL cannot store one in a text")


def complete_ids(given: Sequence[bytes | None]) -> list[bytes]:
    """Return the ids, with new ones of this process's series in the place of None. Thread-safe."""
    raw = _codec.ids.complete(given)
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


_codec = OutgoingCodec()
