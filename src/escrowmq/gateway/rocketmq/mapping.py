"""Messages and names of RocketMQ as those of the broker, and back. docs/rocketmq.md has the same tables.

A RocketMQ message has several keys and a message group; a message of the broker has one key, which orders. The key is
the message group if there is one, else the first of the keys. What does not fit is kept in properties whose names begin
with ``rocketmq.``; deliveries to RocketMQ clients do not show them.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from escrowmq.gateway.rocketmq.protocol import definition
from escrowmq.gateway.rocketmq.statuses import Refusal, Status
from escrowmq.message.names import is_name
from escrowmq.model import Message, message_id

OWN = "rocketmq."
"""Prefix of the properties that this gateway writes."""
ID, KEYS, GROUPED = OWN + "id", OWN + "keys", OWN + "grouped"
CLIENT, HOST, TRACE = OWN + "client", OWN + "host", OWN + "trace"
PLAIN_PRODUCERS = "rocketmq"
"""Producer group of messages without a transaction."""

MAX_BODY = 4 << 20
MAX_PROPERTIES, MAX_PROPERTIES_BYTES = 128, 16 << 10
MAX_GROUP_BYTES = 64
MAX_RECOVERY_SECONDS = 3600
_ID_PREFIX = "01"
"""Version of the message ids that clients make: 1 byte, before 16 bytes of their own."""
_RESERVED = frozenset({"KEYS", "TAGS", "DELAY", "TRAN_MSG", "PGROUP", "MSG_REGION", "UNIQ_KEY", "__SHARDINGKEY"})


class Incoming(NamedTuple):
    """A message of a client, and how it is sent."""

    message: Message
    client_id: str
    """The client's own message id, which the answer repeats."""
    transactional: bool
    delayed: bool


def name_of(resource: Any, code: int) -> str:
    """Return the name of a topic or group. Raises Refusal(``code``) for an invalid one, or one with a namespace."""
    if resource.resource_namespace:
        raise Refusal(code, f"namespace {resource.resource_namespace!r:.80}: this server has none; leave it empty")
    if not is_name(resource.name) or "." in resource.name:
        raise Refusal(code, f"{resource.name!r:.140}: a name has 1 to 127 of A-Z a-z 0-9 _ -")
    return str(resource.name)


def consumer_group(group: str, topic: str) -> str:
    """Return the consumer group of the broker for one topic of a RocketMQ group, whose topics have filters each."""
    return f"{group}.{topic}"


def producer_group(topic: str) -> str:
    """Return the producer group of the transactions of a topic: RocketMQ's gRPC clients have no group of their own."""
    return f"{PLAIN_PRODUCERS}.{topic}"


def to_message(given: Any, client: str) -> Incoming:
    """Return a client's message as one of the broker. ``client``: the id of the client. Raises Refusal."""
    system = given.system_properties
    kind = system.message_type
    if not system.message_id:
        raise Refusal(Status.ILLEGAL_MESSAGE_ID, "a message has an id")
    if not given.body:
        raise Refusal(Status.MESSAGE_BODY_EMPTY, "a message has a body")
    properties = dict(given.user_properties)
    _check_properties(properties)
    if "|" in system.tag or system.tag != system.tag.strip():
        raise Refusal(Status.ILLEGAL_MESSAGE_TAG, f"tag {system.tag!r:.80}: without | and outer spaces")
    if any(not key.strip() for key in system.keys):
        raise Refusal(Status.ILLEGAL_MESSAGE_KEY, "a key is blank")
    _check_kind(system, kind)
    keys, group = list(system.keys), system.message_group
    key = group or (keys[0] if keys else None)
    if group:
        properties[GROUPED] = "1"
    if keys != ([] if key is None else [key]):
        properties[KEYS] = json.dumps(keys, ensure_ascii=False, separators=(",", ":"))
    properties |= {name: value for name, value in ((HOST, system.born_host), (TRACE, system.trace_context)) if value}
    identity = message_id(_own_id(system.message_id))
    if client_message_id(identity) != system.message_id:
        properties[ID] = system.message_id
    transactional = kind == definition.TRANSACTION
    immunity = None
    if transactional:
        properties[CLIENT] = client
        if system.HasField("orphaned_transaction_recovery_duration"):
            immunity = _recovery_seconds(system.orphaned_transaction_recovery_duration)
    message = Message(
        name_of(given.topic, Status.ILLEGAL_TOPIC),
        _body(given),
        key=key,
        tag=system.tag or None,
        properties=properties,
        delay=_delay(system),
        check_immunity=immunity,
        message_id=identity,
    )
    return Incoming(message, system.message_id, transactional, kind == definition.DELAY)


def _check_properties(properties: Mapping[str, str]) -> None:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if len(properties) > MAX_PROPERTIES or size > MAX_PROPERTIES_BYTES:
        raise Refusal(
            Status.MESSAGE_PROPERTIES_TOO_LARGE,
            f"{len(properties)} properties of {size} bytes; the limits are {MAX_PROPERTIES} and {MAX_PROPERTIES_BYTES}",
        )
    for name in properties:
        if not name or name in _RESERVED or name.startswith(OWN):
            raise Refusal(Status.ILLEGAL_MESSAGE_PROPERTY_KEY, f"the property name {name!r:.80} is reserved")


def _check_kind(system: Any, kind: int) -> None:
    delayed, grouped = system.HasField("delivery_timestamp"), bool(system.message_group)
    if kind not in (definition.NORMAL, definition.FIFO, definition.DELAY, definition.TRANSACTION):
        raise Refusal(Status.UNSUPPORTED, "messages are NORMAL, FIFO, DELAY or TRANSACTION here")
    if delayed != (kind == definition.DELAY) or grouped != (kind == definition.FIFO):
        name = definition.MessageType.Name(kind)
        text = f"a message of type {name} {'with' if delayed else 'without'} a delivery time"
        text += f" and {'with' if grouped else 'without'} a message group"
        raise Refusal(Status.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, text)
    if len(system.message_group.encode()) > MAX_GROUP_BYTES:
        raise Refusal(Status.ILLEGAL_MESSAGE_GROUP, f"a message group has at most {MAX_GROUP_BYTES} bytes")


def _recovery_seconds(duration: Any) -> float:
    seconds = duration_seconds(duration)
    if not 0 <= seconds <= MAX_RECOVERY_SECONDS:
        raise Refusal(Status.BAD_REQUEST, f"recovery after {seconds} s: 0 to {MAX_RECOVERY_SECONDS}")
    return seconds


def _body(given: Any) -> bytes:
    """Return the body, decompressed, so that every reader gets what the application sent."""
    body: bytes = given.body
    if given.system_properties.body_encoding == definition.GZIP:
        inflating = zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            body = inflating.decompress(body, MAX_BODY + 1)
        except zlib.error as problem:
            raise Refusal(Status.MESSAGE_CORRUPTED, f"the body is not compressed data: {problem}") from None
        if len(body) <= MAX_BODY and not inflating.eof:
            raise Refusal(Status.MESSAGE_CORRUPTED, "the compressed body is cut off")
    if len(body) > MAX_BODY:
        raise Refusal(Status.MESSAGE_BODY_TOO_LARGE, f"the body has more than {MAX_BODY} bytes")
    return body


def _delay(system: Any) -> float:
    if not system.HasField("delivery_timestamp"):
        return 0.0
    at = system.delivery_timestamp
    return float(max(at.seconds + at.nanos / 1e9 - time.time(), 0.0))


def _own_id(text: str) -> str:
    """Return the id at the broker: that of RocketMQ's clients is a version and 16 bytes, which are the broker's."""
    return text[2:].lower() if len(text) == 34 and text.startswith(_ID_PREFIX) else text


def client_message_id(raw: bytes) -> str:
    """Return the id that clients see of a message id of the broker."""
    return _ID_PREFIX + raw.hex().upper()


def to_client(topic: str, row: Mapping[str, Any]) -> Any:
    """Return a message for a client: a row with ``body``, ``key``, ``tag``, ``properties``, ``message_id`` (bytes) and
    ``born_us``."""
    properties = dict(row["properties"] or ())
    key, keys = row["key"], properties.get(KEYS)
    body = row["body"]
    system = definition.SystemProperties(
        tag=row["tag"] or None,
        keys=json.loads(keys) if keys is not None else [key] if key is not None else [],
        message_id=properties.get(ID) or client_message_id(row["message_id"]),
        body_digest=definition.Digest(type=definition.MD5, checksum=_md5(body)),
        body_encoding=definition.IDENTITY,
        message_type=definition.FIFO if GROUPED in properties else definition.NORMAL,
        born_host=properties.get(HOST, ""),
        trace_context=properties.get(TRACE),
    )
    if GROUPED in properties:
        system.message_group = key
    system.born_timestamp.FromMicroseconds(row["born_us"])
    return definition.Message(
        topic=definition.Resource(name=topic),
        user_properties={name: value for name, value in properties.items() if not name.startswith(OWN)},
        system_properties=system,
        body=body,
    )


def to_orphan(checked: Any) -> Any:
    """Return a half message for a check-back. ``checked``: a :class:`~escrowmq.model.CheckedMessage`."""
    row = {
        "body": checked.body,
        "key": checked.key,
        "tag": checked.tag,
        "properties": checked.properties,
        "message_id": checked.message_id,
        "born_us": _microseconds(checked.born),
    }
    message = to_client(checked.topic, row)
    message.system_properties.message_type = definition.TRANSACTION
    return message


def _microseconds(when: datetime) -> int:
    return round(when.timestamp() * 1_000_000)


def _md5(body: bytes) -> str:
    # The digest that all clients compute alike; some write CRC32 as a decimal, some as eight digits.
    return hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def duration_seconds(duration: Any) -> float:
    """Return a duration of the protocol in seconds."""
    return float(duration.seconds + duration.nanos / 1e9)


def tags_of(expression: Any) -> list[str]:
    """Return the tags of a filter, none for all. Raises Refusal for SQL."""
    if expression.type == definition.SQL:
        raise Refusal(Status.ILLEGAL_FILTER_EXPRESSION, "filters are tags here (a || b), not SQL92")
    if expression.expression.strip() in ("", "*"):
        return []
    tags = [tag.strip() for tag in expression.expression.split("||")]
    if not all(tags):
        raise Refusal(Status.ILLEGAL_FILTER_EXPRESSION, f"{expression.expression!r:.80}: tags are separated by ||")
    return tags
