"""Checks one outgoing message against the limits, assigns a missing id, and converts it to a row of values."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from time import time_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from escrowmq.errors import Code, Misuse, Rejected
from escrowmq.message.limits import MAX_QUEUE, Limits
from escrowmq.message.names import check_name
from escrowmq.model import Message
from escrowmq.model import message_id as bytes_of
from escrowmq.platform.forks import tell_in_child
from escrowmq.platform.times import to_us
from escrowmq.schemas import MESSAGE_ID_DTYPE

ROW_OVERHEAD = 128  # approximate bytes of a row besides its body, for the limit of a batch's bytes

_MAX_KNOWN_TOPICS = 10_000  # maximum number of valid topic names that a checker remembers


class OutgoingRow(NamedTuple):
    """A checked message. ``zip(*rows)`` yields the columns, which :data:`escrowmq.schemas.OUTGOING` describes."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: list[tuple[str, str]] | None
    message_id: bytes | None  # None: generated when the batch is sent
    queue: int
    born_us: int
    delay_us: int
    immunity_us: int
    transaction: bytes | None


def row_size(row: tuple[Any, ...]) -> int:
    """Return the approximate bytes of an outgoing row, at least those of its texts and its body."""
    size = len(row[1]) + ROW_OVERHEAD
    if row[2] is not None or row[3] is not None:
        size += 4 * (len(row[2] or "") + len(row[3] or ""))
    if row[4]:
        size += sum(4 * (len(name) + len(value)) + 8 for name, value in row[4])
    return size


class MessageIds:
    """A series of ids for messages without an own id: 8 random bytes, then a counter from 1, both big-endian. Ids are
    generated when a batch is sent, so the ids of a batch are consecutive, and the broker's de-duplication stores a
    steady client as one range. Thread-safe: a lane's sending thread and callers with whole batches share a series, and
    an id assigned twice would count as a repeat. Not shared between processes: a forked child starts its own series."""

    def __init__(self) -> None:
        self.on_fork()
        tell_in_child(self)

    def on_fork(self) -> None:
        self._instance = int.from_bytes(os.urandom(8), "big")
        self._next = 1
        self._lock = threading.Lock()

    def reserve(self, count: int) -> tuple[int, int]:
        """Reserve ``count`` consecutive ids; return their instance and first sequence."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return self._instance, first

    def take(self, count: int) -> npt.NDArray[Any]:
        _, first = self.reserve(count)
        ids = np.empty(count, MESSAGE_ID_DTYPE)
        ids["instance"] = self._instance
        ids["sequence"] = np.arange(first, first + count, dtype=np.uint64)
        return ids

    def complete(self, given: Sequence[bytes | None]) -> bytes:
        if not any(given):
            return self.take(len(given)).tobytes()
        generated = self.take(given.count(None)).tobytes()
        new_ids = (generated[at : at + 16] for at in itertools.count(0, 16))
        return b"".join(next(new_ids) if identity is None else identity for identity in given)


class Checker:
    """Checks messages against one broker's limits before they are sent. Remembers valid topic names."""

    __slots__ = ("_topics", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._topics: set[str] = set()

    def row(
        self,
        topic: str,
        body: bytes | bytearray | memoryview | None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: float = 0.0,
        queue: int | None = None,
        message_id: Any = None,
        check_immunity: float | None = None,
        transaction: bytes | None = None,
    ) -> tuple[Any, ...]:
        """Convert one message to a plain tuple with the fields of :class:`OutgoingRow`, which is faster to create.
        Raises Misuse(BAD_ARGUMENT) for a wrong type, Rejected if a limit is exceeded."""
        if type(topic) is not str or topic not in self._topics:
            check_name(topic, Code.BAD_TOPIC_NAME)
            if len(self._topics) < _MAX_KNOWN_TOPICS:
                self._topics.add(topic)
        if type(body) is not bytes:
            body = _to_bytes(body)
        limits = self.limits
        if len(body) > limits.max_body_bytes:
            raise Rejected(Code.BODY_TOO_LARGE, f"the body has {len(body)} bytes, the limit is {limits.max_body_bytes}")
        if key is not None:
            _check_text(key, "key", limits.max_key_bytes, Code.KEY_TOO_LARGE)
        if tag is not None:
            _check_text(tag, "tag", limits.max_tag_bytes, Code.TAG_TOO_LARGE)
        return (
            topic,
            body,
            key,
            tag,
            _check_properties(properties, limits.max_properties_bytes) if properties else None,
            None if message_id is None else bytes_of(message_id),
            -1 if queue is None else _check_queue(queue),
            time_ns() // 1000,
            0 if delay == 0 else _to_microseconds(delay, "delay", limits.max_delay_us, "max_delay"),
            0
            if check_immunity is None
            else _to_microseconds(check_immunity, "check_immunity", limits.half_retention_us, "half_retention"),
            transaction,
        )

    def rows(self, messages: Iterable[Message]) -> list[tuple[Any, ...]]:
        """Convert many messages to plain tuples with one birth time. Raises as :meth:`row`."""
        rows: list[tuple[Any, ...]] = []
        topics, longest, now = self._topics, self.limits.max_body_bytes, time_ns() // 1000
        for m in messages:
            if not isinstance(m, Message):
                raise Misuse(Code.BAD_ARGUMENT, f"{type(m).__name__} is not a Message")
            topic, body, key, tag, identity = m.topic, m.body, m.key, m.tag, m.message_id
            known = type(topic) is str and topic in topics and type(body) is bytes and len(body) <= longest
            plain = key is None and tag is None and identity is None and m.properties is None and m.queue is None
            if known and plain and m.check_immunity is None and m.delay == 0:
                rows.append((topic, body, None, None, None, None, -1, now, 0, 0, None))
            else:
                rows.append(self.message(m))
        return rows

    def message(self, message: Message, transaction: bytes | None = None) -> OutgoingRow:
        """Convert a :class:`~escrowmq.model.Message` to a row. Raises as :meth:`row`."""
        if not isinstance(message, Message):
            raise Misuse(Code.BAD_ARGUMENT, f"{type(message).__name__} is not a Message")
        m = message
        fields = m.topic, m.body, m.key, m.tag, m.properties, m.delay, m.queue, m.message_id, m.check_immunity
        return OutgoingRow._make(self.row(*fields, transaction))


def _to_bytes(body: Any) -> bytes:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    hint = "encode it first: text.encode()" if isinstance(body, str) else "bodies are bytes"
    raise Misuse(Code.BAD_ARGUMENT, f"the body is {type(body).__name__}, not bytes", hint)


def _check_text(text: Any, name: str, limit: int, code: Code) -> None:
    if type(text) is not str:
        raise Misuse(Code.BAD_ARGUMENT, f"the {name} is {type(text).__name__}, not str")
    size = len(text) if text.isascii() else _byte_length(text, name)
    if size > limit:
        raise Rejected(code, f"the {name} has {size} bytes, the limit is {limit}")


def _byte_length(text: str, name: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"the {name} is not valid Unicode: {problem}") from None


def _check_properties(properties: Mapping[str, str], limit: int) -> list[tuple[str, str]]:
    if not isinstance(properties, Mapping):
        raise Misuse(Code.BAD_ARGUMENT, f"properties are {type(properties).__name__}, not a mapping")
    pairs = list(properties.items())
    size = 0
    for name, value in pairs:
        if type(name) is not str or type(value) is not str:
            raise Misuse(Code.BAD_ARGUMENT, f"property {name!r:.100} = {value!r:.100}: names and values are str")
        size += _byte_length(name, "property name") + _byte_length(value, "property value")
    if size > limit:
        raise Rejected(Code.PROPERTIES_TOO_LARGE, f"the properties have {size} bytes, the limit is {limit}")
    return pairs


def _check_queue(queue: Any) -> int:
    if type(queue) is not int:
        raise Misuse(Code.BAD_ARGUMENT, f"queue is {type(queue).__name__}, not int")
    if not 0 <= queue <= MAX_QUEUE:
        raise Rejected(Code.BAD_QUEUE, f"queue {queue}")
    return queue


def _to_microseconds(seconds: Any, name: str, longest_us: int, setting: str) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise Misuse(Code.BAD_ARGUMENT, f"{name} is {type(seconds).__name__}, not seconds")
    if not 0 <= seconds <= longest_us / 1e6:
        raise Rejected(Code.BAD_DELAY, f"{name} {seconds} is not within 0 to {longest_us / 1e6} seconds", setting)
    return to_us(seconds)
