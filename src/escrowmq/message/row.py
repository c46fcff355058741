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

ROW_OVERHEAD = 128
"""Bytes that a row takes besides its body, about; for the cap on a batch's bytes."""

_REMEMBERED = 10_000
"""Names of topics that a checker keeps as known to be good."""


class OutgoingRow(NamedTuple):
    """A checked message. ``zip(*rows)`` gives the columns; :data:`escrowmq.schemas.OUTGOING` says what each means."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: list[tuple[str, str]] | None
    message_id: bytes | None  # None: made when the batch leaves
    queue: int
    born_us: int
    delay_us: int
    immunity_us: int
    transaction: bytes | None


def row_size(row: tuple[Any, ...]) -> int:
    """Return bytes of an outgoing row, about; never fewer than its texts and its body have."""
    size = len(row[1]) + ROW_OVERHEAD
    if row[2] is not None or row[3] is not None:
        size += 4 * (len(row[2] or "") + len(row[3] or ""))
    if row[4]:
        size += sum(4 * (len(name) + len(value)) + 8 for name, value in row[4])
    return size


class MessageIds:
    """A series of ids for messages that were given none: 8 random bytes, then a counter from 1, both big-endian.

    They are made when a batch leaves, so the ids of a batch are consecutive, and the broker's de-duplication remembers
    a steady client as one run. Thread-safe: a lane's sending thread and callers with whole batches take from one
    series, and an id that was given twice would be taken for a repeat. Of one process: a forked child begins a series
    of its own.
    """

    def __init__(self) -> None:
        self.forked()
        tell_in_child(self)

    def forked(self) -> None:
        """Begin a new series of ids, because this is another process now."""
        self._instance = int.from_bytes(os.urandom(8), "big")
        self._next = 1
        self._lock = threading.Lock()

    def reserve(self, count: int) -> tuple[int, int]:
        """Return the instance and the first sequence of ``count`` consecutive ids."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return self._instance, first

    def take(self, count: int) -> npt.NDArray[Any]:
        """``count`` consecutive ids (dtype MESSAGE_ID_DTYPE)."""
        _, first = self.reserve(count)
        ids = np.empty(count, MESSAGE_ID_DTYPE)
        ids["instance"] = self._instance
        ids["sequence"] = np.arange(first, first + count, dtype=np.uint64)
        return ids

    def complete(self, given: Sequence[bytes | None]) -> bytes:
        """Return the ids given, one after the other, with new ones in the place of None."""
        if not any(given):
            return self.take(len(given)).tobytes()
        made = self.take(given.count(None)).tobytes()
        ours = (made[at : at + 16] for at in itertools.count(0, 16))
        return b"".join(next(ours) if identity is None else identity for identity in given)


class Checker:
    """Check of messages against one broker's limits before anything leaves. Remembers topic names that it checked."""

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
        """One message as a plain tuple with the fields of :class:`OutgoingRow`, which is faster to make.

        Raises Misuse(BAD_ARGUMENT) for a wrong type, Rejected for what is over a limit.
        """
        if type(topic) is not str or topic not in self._topics:
            check_name(topic, Code.BAD_TOPIC_NAME)
            if len(self._topics) < _REMEMBERED:
                self._topics.add(topic)
        if type(body) is not bytes:
            body = _bytes(body)
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
            _pairs(properties, limits.max_properties_bytes) if properties else None,
            None if message_id is None else bytes_of(message_id),
            -1 if queue is None else _queue(queue),
            time_ns() // 1000,
            0 if delay == 0 else _microseconds(delay, "delay", limits.max_delay_us, "max_delay"),
            0
            if check_immunity is None
            else _microseconds(check_immunity, "check_immunity", limits.half_retention_us, "half_retention"),
            transaction,
        )

    def rows(self, messages: Iterable[Message]) -> list[tuple[Any, ...]]:
        """Many messages as plain tuples, which were born together. Raises as :meth:`row`."""
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
                rows.append(self.row(topic, body, key, tag, m.properties, m.delay, m.queue, identity, m.check_immunity))
        return rows

    def message(self, message: Message, transaction: bytes | None = None) -> OutgoingRow:
        """Return the row of a :class:`~escrowmq.model.Message`. Raises as :meth:`row`."""
        if not isinstance(message, Message):
            raise Misuse(Code.BAD_ARGUMENT, f"{type(message).__name__} is not a Message")
        m = message
        fields = m.topic, m.body, m.key, m.tag, m.properties, m.delay, m.queue, m.message_id, m.check_immunity
        return OutgoingRow._make(self.row(*fields, transaction))


def _bytes(body: Any) -> bytes:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    hint = "encode it first: text.encode()" if isinstance(body, str) else "bodies are bytes"
    raise Misuse(Code.BAD_ARGUMENT, f"the body is {type(body).__name__}, not bytes", hint)


def _check_text(text: Any, what: str, limit: int, code: Code) -> None:
    if type(text) is not str:
        raise Misuse(Code.BAD_ARGUMENT, f"the {what} is {type(text).__name__}, not str")
    size = len(text) if text.isascii() else _byte_length(text, what)
    if size > limit:
        raise Rejected(code, f"the {what} has {size} bytes, the limit is {limit}")


def _byte_length(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"the {what} is not valid Unicode: {problem}") from None


def _pairs(properties: Mapping[str, str], limit: int) -> list[tuple[str, str]]:
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


def _queue(queue: Any) -> int:
    if type(queue) is not int:
        raise Misuse(Code.BAD_ARGUMENT, f"queue is {type(queue).__name__}, not int")
    if not 0 <= queue <= MAX_QUEUE:
        raise Rejected(Code.BAD_QUEUE, f"queue {queue}")
    return queue


def _microseconds(seconds: Any, what: str, longest_us: int, setting: str) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise Misuse(Code.BAD_ARGUMENT, f"{what} is {type(seconds).__name__}, not seconds")
    if not 0 <= seconds <= longest_us / 1e6:
        raise Rejected(Code.BAD_DELAY, f"{what} {seconds} is not within 0 to {longest_us / 1e6} seconds", setting)
    return to_us(seconds)
