"""Messages on their way out: checked against the broker's limits, then turned into columns.

Message ids are 16 bytes: 8 random ones of the lane, then a counter. They are given when a batch leaves, so the ids of a
batch are consecutive, and the broker's de-duplication remembers a steady client as one run.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq import schemas
from escrowmq.client.producing.values import make_receipt, make_transaction_id
from escrowmq.errors import Code, EscrowError, Misuse, Rejected, error
from escrowmq.model import Message, Receipt, TransactionId, message_id

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}")
_ZEROS = pa.array(np.zeros(1 << 16, np.int64))
_ANY_QUEUE = pa.array(np.full(1 << 16, -1, np.int32))

ROW_OVERHEAD = 128
"""Bytes that a row takes besides its body, about; for the cap on a batch's bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The broker's limits, as its ``hello`` told them."""

    max_body_bytes: int = 4 << 20
    max_key_bytes: int = 1024
    max_tag_bytes: int = 128
    max_properties_bytes: int = 32 << 10
    max_batch_rows: int = 65_536
    max_batch_bytes: int = 64 << 20
    max_delay: float = 40 * 86400.0

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Limits:
        """Those of ``told`` that this client knows."""
        return cls(**{name: told[name] for name in cls.__slots__ if told.get(name) is not None})


def check_name(name: Any, code: Code) -> str:
    """``name`` if it is one of a topic or group; raises ``code`` otherwise."""
    if type(name) is not str or _NAME.fullmatch(name) is None:
        raise Rejected(code, f"{name!r:.200}") if isinstance(name, str) else Misuse(code, f"{name!r:.200} is not a str")
    return name


class Checker:
    """Checks messages before anything leaves. One per link; remembers topic names that it has seen."""

    __slots__ = ("_topics", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._topics: set[str] = set()

    def row(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        key: str | None,
        tag: str | None,
        properties: Mapping[str, str] | None,
        delay: float,
        queue: int | None,
        identity: Any,
        immunity: float | None,
        transaction: bytes | None,
    ) -> tuple[Any, ...]:
        """The row of one message. Raises Misuse(BAD_ARGUMENT) for a wrong type, Rejected for what is over a limit."""
        if topic not in self._topics:
            check_name(topic, Code.BAD_TOPIC_NAME)
            if len(self._topics) < 10_000:
                self._topics.add(topic)
        if type(body) is not bytes:
            body = _bytes(body)
        limits = self.limits
        if len(body) > limits.max_body_bytes:
            raise Rejected(Code.BODY_TOO_LARGE, f"the body has {len(body)} bytes, the limit is {limits.max_body_bytes}")
        if key is not None:
            _text(key, "key", limits.max_key_bytes, Code.KEY_TOO_LARGE)
        if tag is not None:
            _text(tag, "tag", limits.max_tag_bytes, Code.TAG_TOO_LARGE)
        pairs = _pairs(properties, limits.max_properties_bytes) if properties else None
        return (
            topic,
            body,
            key,
            tag,
            pairs,
            None if identity is None else _identity(identity),
            -1 if queue is None else _queue(queue),
            time.time_ns() // 1000,
            0 if delay == 0 else _microseconds(delay, "delay", limits.max_delay),
            0 if immunity is None else _microseconds(immunity, "check_immunity", limits.max_delay),
            transaction,
        )

    def message(self, message: Message, transaction: bytes | None = None) -> tuple[Any, ...]:
        """The row of a :class:`Message`."""
        if not isinstance(message, Message):
            raise Misuse(Code.BAD_ARGUMENT, f"{type(message).__name__} is not a Message")
        return self.row(
            message.topic,
            message.body,
            message.key,
            message.tag,
            message.properties,
            message.delay,
            message.queue,
            message.message_id,
            message.check_immunity,
            transaction,
        )


def _bytes(body: Any) -> bytes:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    hint = "encode it first: text.encode()" if isinstance(body, str) else "bodies are bytes"
    raise Misuse(Code.BAD_ARGUMENT, f"the body is {type(body).__name__}, not bytes", hint)


def _text(text: Any, what: str, limit: int, code: Code) -> None:
    if type(text) is not str:
        raise Misuse(Code.BAD_ARGUMENT, f"the {what} is {type(text).__name__}, not str")
    size = len(text) if text.isascii() else len(_encode(text, what))
    if size > limit:
        raise Rejected(code, f"the {what} has {size} bytes, the limit is {limit}")


def _encode(text: str, what: str) -> bytes:
    try:
        return text.encode()
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
        size += len(_encode(name, "property name")) + len(_encode(value, "property value"))
    if size > limit:
        raise Rejected(Code.PROPERTIES_TOO_LARGE, f"the properties have {size} bytes, the limit is {limit}")
    return pairs


def _identity(identity: Any) -> bytes:
    try:
        return message_id(identity)
    except (TypeError, AttributeError):
        raise Misuse(Code.BAD_ARGUMENT, f"message_id is {type(identity).__name__}, not str, bytes or UUID") from None


def _queue(queue: Any) -> int:
    if type(queue) is not int:
        raise Misuse(Code.BAD_ARGUMENT, f"queue is {type(queue).__name__}, not int")
    if not 0 <= queue < 1 << 31:
        raise Rejected(Code.BAD_QUEUE, f"queue {queue}")
    return queue


def _microseconds(seconds: Any, what: str, limit: float) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise Misuse(Code.BAD_ARGUMENT, f"{what} is {type(seconds).__name__}, not seconds")
    if not 0 <= seconds <= limit:
        raise Rejected(Code.BAD_DELAY, f"{what} {seconds} is not within 0 to {limit} seconds")
    return round(seconds * 1_000_000)


class MessageIds:
    """16-byte ids: 8 random bytes, then a counter from 1, both big-endian."""

    def __init__(self) -> None:
        self._instance = int.from_bytes(os.urandom(8), "big")
        self._next = 1

    def take(self, count: int) -> npt.NDArray[Any]:
        """``count`` consecutive ids (dtype MESSAGE_ID_DTYPE). Called by one sender at a time."""
        first, self._next = self._next, self._next + count
        ids = np.empty(count, schemas.MESSAGE_ID_DTYPE)
        ids["instance"] = self._instance
        ids["sequence"] = np.arange(first, first + count, dtype=np.uint64)
        return ids


class OutgoingCodec:
    """Rows of :meth:`Checker.row` to OUTGOING batches; PRODUCED answers to receipts."""

    def __init__(self) -> None:
        self._ids = MessageIds()

    def encode(self, rows: Sequence[tuple[Any, ...]]) -> tuple[pa.RecordBatch, bytes]:
        """The batch, and the message ids as bytes."""
        n = len(rows)
        topics, bodies, keys, tags, pairs, given, queues, born, delays, immunities, joins = zip(*rows, strict=True)
        ids = self._make_ids(given)
        arrays = [
            pa.array(topics, pa.utf8()),
            _optional(keys, pa.utf8()),
            _optional(tags, pa.utf8()),
            _optional(pairs, schemas.PROPERTIES),
            pa.array(bodies, pa.binary()),
            pa.FixedSizeBinaryArray.from_buffers(schemas.ID, n, [None, pa.py_buffer(ids)]),
            _ANY_QUEUE[:n] if n <= 1 << 16 and min(queues) == -1 == max(queues) else pa.array(queues, pa.int32()),
            pa.array(born, pa.int64()),
            _numbers(delays),
            _numbers(immunities),
            _optional(joins, schemas.ID),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING), ids

    def _make_ids(self, given: Sequence[bytes | None]) -> bytes:
        if not any(given):
            return self._ids.take(len(given)).tobytes()
        made = self._ids.take(given.count(None)).tobytes()
        ours = (made[at : at + 16] for at in itertools.count(0, 16))
        return b"".join(next(ours) if identity is None else identity for identity in given)

    def decode(
        self, rows: Sequence[tuple[Any, ...]], memo: Any, answer: pa.RecordBatch, resent: bool
    ) -> list[Receipt | EscrowError]:
        """A receipt or an error a row."""
        ids: bytes = memo
        positions, queues, offsets = (answer.column(at).to_numpy().tolist() for at in (1, 2, 3))
        codes = answer.column(0).to_numpy()
        receipts: list[Any] = [
            make_receipt(ids[at : at + 16], row[0], queue, position, offset if offset >= 0 else None, transaction)
            for row, at, queue, position, offset, transaction in zip(
                rows, itertools.count(0, 16), queues, positions, offsets, _transactions(answer.column(4)), strict=False
            )
        ]
        for at in np.flatnonzero(codes).tolist():
            receipts[at] = row_error(int(codes[at]), ids[16 * at : 16 * at + 16])
        return receipts

    def columns(self, data: pa.RecordBatch) -> pa.RecordBatch:
        """A whole batch of schema OUTGOING from a user's: missing columns get their defaults, ids included.

        ``topic`` and ``body`` must be there. ``message_id`` may be 16-byte binary, other binary or text (digested as
        :func:`escrowmq.model.message_id` does); null ids are made. Raises Rejected(BAD_BATCH) naming the column.
        """
        n = data.num_rows
        known = {field.name for field in schemas.OUTGOING}
        if (missing := {"topic", "body"} - set(data.schema.names)) or (unknown := set(data.schema.names) - known):
            problem = f"column {sorted(missing)[0]!r} is missing" if missing else f"no column {sorted(unknown)[0]!r}"
            raise Rejected(Code.BAD_BATCH, problem, f"columns: {', '.join(schemas.OUTGOING.names)}")
        now = time.time_ns() // 1000
        defaults: dict[str, Any] = {"queue": -1, "born_us": now, "delay_us": 0, "immunity_us": 0}
        arrays = []
        for field in schemas.OUTGOING:
            column = data.column(field.name) if field.name in data.schema.names else None
            if field.name == "message_id":
                arrays.append(self._id_column(column, n))
            elif column is None:
                default = defaults.get(field.name)
                arrays.append(
                    pa.nulls(n, field.type) if default is None else pa.repeat(pa.scalar(default, field.type), n)
                )
            else:
                arrays.append(_cast(column, field, defaults.get(field.name)))
        return pa.RecordBatch.from_arrays(arrays, schema=schemas.OUTGOING)

    def _id_column(self, column: pa.Array | None, n: int) -> pa.Array:
        if column is None:
            return pa.FixedSizeBinaryArray.from_buffers(schemas.ID, n, [None, pa.py_buffer(self._ids.take(n))])
        if column.type == schemas.ID and not column.null_count:
            return column
        given = [None if value is None else _identity(value) for value in column.to_pylist()]
        return pa.FixedSizeBinaryArray.from_buffers(schemas.ID, n, [None, pa.py_buffer(self._make_ids(given))])


def _transactions(ids: pa.Array) -> Iterable[TransactionId | None]:
    """The column of transaction ids as values."""
    if ids.null_count == len(ids):
        return itertools.repeat(None)
    if ids.null_count:
        return [None if raw is None else TransactionId.from_bytes(raw) for raw in ids.to_pylist()]
    raw = np.frombuffer(ids.buffers()[1], schemas.TRANSACTION_ID_DTYPE)[ids.offset : ids.offset + len(ids)]
    return map(make_transaction_id, raw["shard"].tolist(), raw["epoch"].tolist(), raw["position"].tolist())


def row_error(code: int, identity: bytes | None = None) -> EscrowError:
    """The error of one refused row."""
    problem = error(Code(code))
    if identity is not None:
        problem.add_note(f"message id {identity.hex()}")
    return problem


def _optional(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind) if any(value is not None for value in values) else pa.nulls(len(values), kind)


def _numbers(values: Sequence[int]) -> pa.Array:
    return pa.array(values, pa.int64()) if any(values) or len(values) > 1 << 16 else _ZEROS[: len(values)]


def _cast(column: pa.Array, field: pa.Field, default: int | None) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    try:
        column = column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as problem:
        raise Rejected(Code.BAD_BATCH, f"column {field.name!r}: {column.type} is not {field.type}: {problem}") from None
    if column.null_count and default is not None:
        column = pc.fill_null(column, pa.scalar(default, field.type))
    if column.null_count and not field.nullable:
        raise Rejected(Code.BAD_BATCH, f"column {field.name!r} has nulls")
    return column


def as_batch(data: Any, checker: Checker, codec: OutgoingCodec) -> pa.RecordBatch:
    """One OUTGOING batch from messages, a record batch or a table. Raises Misuse or Rejected for what is unusable."""
    if isinstance(data, pa.Table):
        chunks = data.combine_chunks().to_batches()
        data = chunks[0] if chunks else schemas.empty(data.schema)
    if isinstance(data, pa.RecordBatch):
        return codec.columns(data)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise Misuse(Code.BAD_ARGUMENT, f"{type(data).__name__} is not messages, a record batch or a table")
    rows = [checker.message(message) for message in data]
    return codec.encode(rows)[0] if rows else schemas.empty(schemas.OUTGOING)


def oversized(batch: pa.RecordBatch, limits: Limits) -> npt.NDArray[np.bool_]:
    """Which rows have a body over the limit: they must not travel."""
    lengths = pc.binary_length(batch.column("body")).to_numpy(zero_copy_only=False)
    return np.asarray(lengths > limits.max_body_bytes)


def split(batch: pa.RecordBatch, limits: Limits) -> list[pa.RecordBatch]:
    """``batch`` in slices that are each within the limits of one request."""
    if batch.num_rows <= limits.max_batch_rows and batch.nbytes <= limits.max_batch_bytes * 3 // 4:
        return [batch] if batch.num_rows else []
    sizes = pc.binary_length(batch.column("body")).to_numpy(zero_copy_only=False) + ROW_OVERHEAD
    other = max(batch.nbytes - int(sizes.sum()), 0) // batch.num_rows
    ends = np.cumsum(sizes + other)
    slices, start = [], 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + limits.max_batch_bytes * 3 // 4, side="right"))
        stop = min(max(stop, start + 1), start + limits.max_batch_rows, batch.num_rows)
        slices.append(batch.slice(start, stop - start))
        start = stop
    return slices
