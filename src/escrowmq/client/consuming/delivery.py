"""Messages as views of the rows of a received batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.model import TransactionId

T_co = TypeVar("T_co", covariant=True)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Rows:
    """A DELIVERY batch whose columns become Python lists when they are first used."""

    __slots__ = ("_handles", "_lists", "batch", "count", "number")
    apart = False
    """Whether offsets between two rows may belong to another consumer, so that no run may span them."""

    def __init__(self, number: int, batch: pa.RecordBatch) -> None:
        self.number = number  # of the broker
        self.batch = batch
        self.count: int = batch.num_rows
        self._lists: dict[str, list[Any]] = {}
        self._handles: list[tuple[int, int, int]] | None = None

    def list(self, name: str) -> list[Any]:
        """Return a column as a Python list, converted at its first use."""
        values = self._lists.get(name)
        if values is None:
            column = self.batch.column(name)
            numeric = pa.types.is_integer(column.type) and not column.null_count
            values = self._lists[name] = column.to_numpy().tolist() if numeric else column.to_pylist()
        return values

    def withdrawn(self, row: int) -> bool:
        """Return whether the message in a row must not be handed out any more (see ``order.py``). Never, in this base
        class."""
        return False

    def handle(self, row: int) -> tuple[int, int, int]:
        """Return the lease and the offset of a row, and the offset of the row before it in the same lease; -2 if there
        is none."""
        if self._handles is None:
            leases, offsets = (self.batch.column(name).to_numpy() for name in ("lease", "offset"))
            before = np.full(self.count, -2, np.int64)
            follows = (leases[1:] == leases[:-1]) & (offsets[1:] > offsets[:-1])
            if self.apart:
                follows &= offsets[1:] == offsets[:-1] + 1
            before[1:][follows] = offsets[:-1][follows]
            self._handles = list(zip(leases.tolist(), offsets.tolist(), before.tolist(), strict=True))
        return self._handles[row]


class Field(Protocol[T_co]):
    """A read-only property of a message."""

    def __get__(self, message: object, kind: Any = None, /) -> T_co: ...


def field(column: str, doc: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """Return a read-only property of a message: its value in ``column``, changed by ``convert`` if given."""
    if convert is None:
        return property(lambda message: message._rows.list(column)[message._row], doc=doc)
    return property(lambda message: convert(message._rows.list(column)[message._row]), doc=doc)


def _properties(pairs: Any) -> dict[str, str]:
    return dict(pairs or ())


def _time(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def _transaction_id(raw: bytes | None) -> TransactionId | None:
    return None if raw is None else TransactionId.from_bytes(raw)


class Content:
    """The fields of every received or read message."""

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: Rows, row: int) -> None:
        self._rows = rows
        self._row = row

    topic: Field[str] = field("topic", "The topic that it was sent to.")
    body: Field[bytes] = field("body", "The body, byte for byte as it was sent.")
    key: Field[str | None] = field("key", "The key, None if it has none.")
    tag: Field[str | None] = field("tag", "The tag, None if it has none.")
    properties: Field[dict[str, str]] = field("properties", "The properties, a new dict each time.", _properties)
    message_id: Field[bytes] = field(
        "message_id", """The 16 bytes that name the message for ever: what a consumer's own "seen" mark should hold."""
    )
    queue: Field[int] = field("queue", "The queue of the topic.")
    offset: Field[int] = field("offset", "Its number in the queue, counted from 0.")
    position: Field[int] = field(
        "position",
        "Its position in the broker's log: of a committed message that of its half message, which is also the half "
        "message's offset in the view ``%half`` (RocketMQ: ``PreparedTransactionOffset``).",
    )
    attempt: Field[int] = field("attempt", "How often this group got it, this time included.")
    born: Field[datetime] = field("born_us", "When the producer made it, by the producer's clock.", _time)
    stored: Field[datetime] = field(
        "stored_us", "When it became durable, by the broker's clock (of a half message: the prepare).", _time
    )
    transaction_id: Field[TransactionId | None] = field(
        "transaction", "The transaction that it came with, None for plain messages.", _transaction_id
    )

    @property
    def redelivered(self) -> bool:
        """Return whether this group may have received the message before: its attempt is above 1."""
        return self.attempt > 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}/{self.queue}@{self.offset}, {len(self.body)} bytes>"


ContentT = TypeVar("ContentT", bound=Content)


class Batch(Generic[ContentT]):
    """Messages as columns: ``arrow`` is a record batch of schema DELIVERY. Iterating and indexing give its messages."""

    __slots__ = ("_rows",)
    _message: type[ContentT]

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def arrow(self) -> pa.RecordBatch:
        """The messages as a record batch."""
        return self._rows.batch

    def __len__(self) -> int:
        return self._rows.count

    def __iter__(self) -> Iterator[ContentT]:
        rows = self._rows
        return (self._at(row) for row in range(rows.count) if not rows.withdrawn(row))

    def __getitem__(self, row: int) -> ContentT:
        return self._at(range(len(self))[row])

    def _at(self, row: int) -> ContentT:
        return self._message(self._rows, row)
