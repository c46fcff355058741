"""``send_tx``: writes a message to ``trans_message`` inside the caller's database transaction.

On PostgreSQL a notification goes with the rows: it is delivered when, and only when, they are committed (a savepoint
rolled back takes it along, which is why "once per transaction" is left to PostgreSQL, which folds equal ones). With one
row it is part of the INSERT and costs no statement of its own.

Messages are checked against the broker's limits here: when the relay sends them there is no caller to raise an error
to. The limits come from the same table of settings and environment variables (``ESCROWMQ_MAX_BODY_BYTES``, ...); a
caller whose broker has others passes its :class:`~escrowmq.settings.BrokerSettings`.
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
    """Put one message (or a :class:`~escrowmq.Message`) into the outbox; its 16-byte id.

    It is sent if and only if the transaction of ``session`` (a Session, scoped_session or Connection) commits. Nothing
    is flushed or committed. ``delay`` is seconds after the relay's send; ``limits`` a broker's settings, None: the
    defaults.

    Raises before anything is written: Rejected for what is over a limit, Misuse(BAD_ARGUMENT) for what is unusable,
    Misuse(NO_TRANSACTION), Misuse(NO_TABLES), Misuse(SCHEMA_VERSION). Rejected(MESSAGE_ID_TAKEN) if the id is there
    already.
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
    """Put many messages into the outbox; their ids, in the order given.

    An iterable of :class:`~escrowmq.Message`, or columns named as in :data:`escrowmq.schemas.OUTGOING` (``topic`` and
    ``body`` must be there). One INSERT for thousands of rows. All are checked before the first is written; errors as
    :func:`send_tx`.
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
    """Return the lane of a key: the same for ever, in every process. Without a key: by turns."""
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
            if is_duplicate(problem):
                hint = "roll back; a message id names one message for ever"
                text = "the outbox has a message of this id already"
                raise Rejected(Code.MESSAGE_ID_TAKEN, text, hint) from problem
            raise


def _row(content: Content, now: int) -> dict[str, Any]:
    fresh = {"state": State.PENDING.value, "attempts": 0, "due_us": 0, "created_us": now}
    return {**content._asdict(), **fresh, "lane": lane_of(content.key)}


def _chunks(found: list[Content]) -> Iterator[list[Content]]:
    """Yield runs of at most CHUNK_ROWS rows and about CHUNK_BYTES of bodies and properties."""
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


# Limits

_ELSEWHERE = "a row of the table has no place for it: the relay's target chooses queues, and no half message is made"


class Content(NamedTuple):
    """A message as the table keeps it. ``properties``: a JSON object, or None."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: str | None
    id: bytes
    delay_us: int


@cache
def checker(settings: BrokerSettings | None) -> Checker:
    """Return the checker of a broker's limits; None: the defaults and the environment."""
    return Checker(Limits.of(dataclasses.asdict(settings or BrokerSettings.load())))


def contents(rows: Sequence[OutgoingRow]) -> list[Content]:
    """Check rows and return them as they are stored; ids are made where none is given.

    Raises Misuse(BAD_ARGUMENT) for what a table cannot hold: a queue, a ``check_immunity``, a NUL character.
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
    """Contents from columns named as in :data:`escrowmq.schemas.OUTGOING`; only ``topic`` and ``body`` must be there.

    Raises Rejected naming the first row that is over a limit, Rejected(BAD_BATCH) for wrong columns, or as
    :func:`contents`.
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
    topics, bodies, keys, tags, pairs, ids, delays = (
        batch.column(name).to_pylist()
        for name in ("topic", "body", "key", "tag", "properties", "message_id", "delay_us")
    )
    return list(map(Content._make, zip(topics, bodies, keys, tags, map(_json, pairs), ids, delays, strict=True)))


def _json(pairs: Iterable[tuple[str, str]] | None) -> str | None:
    return json.dumps(dict(pairs), ensure_ascii=False, separators=(",", ":")) if pairs else None


def _nul() -> Misuse:
    return Misuse(Code.BAD_ARGUMENT, "a key or tag has a NUL character", "PostgreSQL cannot store one in a text")


# Ids are one series per process.


def complete_ids(given: Sequence[bytes | None]) -> list[bytes]:
    """Return the ids given, with new ones in the place of None. Thread-safe."""
    raw = _codec.ids.complete(given)
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


_codec = OutgoingCodec()
