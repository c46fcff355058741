"""Messages as a consumer gets them: views of the rows of a received batch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.model import TransactionId

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Rows:
    """A DELIVERY batch whose columns become Python lists when they are first looked at."""

    __slots__ = ("_handles", "_lists", "batch", "count", "number")
    apart = False
    """Whether offsets that lie between two rows may be someone else's, so that no run may span them."""

    def __init__(self, number: int, batch: pa.RecordBatch) -> None:
        self.number = number  # of the broker
        self.batch = batch
        self.count: int = batch.num_rows
        self._lists: dict[str, list[Any]] = {}
        self._handles: list[tuple[int, int, int]] | None = None

    def list(self, name: str) -> list[Any]:
        """One column."""
        values = self._lists.get(name)
        if values is None:
            column = self.batch.column(name)
            numeric = pa.types.is_integer(column.type) and not column.null_count
            values = self._lists[name] = column.to_numpy().tolist() if numeric else column.to_pylist()
        return values

    def withdrawn(self, row: int) -> bool:
        """Return whether a row must not be handed out any more (see ``order.py``)."""
        return False

    def handle(self, row: int) -> tuple[int, int, int]:
        """Return what an acknowledgement names: lease, offset, and the offset of the row before if that is an
        earlier one of the same lease, else -2."""
        if self._handles is None:
            leases, offsets = (self.batch.column(name).to_numpy() for name in ("lease", "offset"))
            before = np.full(self.count, -2, np.int64)
            follows = (leases[1:] == leases[:-1]) & (offsets[1:] > offsets[:-1])
            if self.apart:
                follows &= offsets[1:] == offsets[:-1] + 1
            before[1:][follows] = offsets[:-1][follows]
            self._handles = list(zip(leases.tolist(), offsets.tolist(), before.tolist(), strict=True))
        return self._handles[row]


class Content:
    """The fields of every received or read message."""

    __slots__ = ("_row", "_rows")

    def __init__(self, rows: Rows, row: int) -> None:
        self._rows = rows
        self._row = row

    @property
    def topic(self) -> str:
        """The topic that it was sent to."""
        return self._rows.list("topic")[self._row]  # type: ignore[no-any-return]

    @property
    def body(self) -> bytes:
        """The body, byte for byte as it was sent."""
        return self._rows.list("body")[self._row]  # type: ignore[no-any-return]

    @property
    def key(self) -> str | None:
        """The key, None if it has none."""
        return self._rows.list("key")[self._row]  # type: ignore[no-any-return]

    @property
    def tag(self) -> str | None:
        """The tag, None if it has none."""
        return self._rows.list("tag")[self._row]  # type: ignore[no-any-return]

    @property
    def properties(self) -> dict[str, str]:
        """The properties, a new dict each time."""
        return dict(self._rows.list("properties")[self._row] or ())

    @property
    def message_id(self) -> bytes:
        """The 16 bytes that name the message for ever: what a consumer's own "seen" mark should hold."""
        return self._rows.list("message_id")[self._row]  # type: ignore[no-any-return]

    @property
    def queue(self) -> int:
        """The queue of the topic."""
        return self._rows.list("queue")[self._row]  # type: ignore[no-any-return]

    @property
    def offset(self) -> int:
        """Its number in the queue, counted from 0."""
        return self._rows.list("offset")[self._row]  # type: ignore[no-any-return]

    @property
    def position(self) -> int:
        """Return its position in the broker's log.

        A message that a transaction committed has the position of its half message, which is also the half message's
        offset in the view ``%half`` (RocketMQ: ``PreparedTransactionOffset``).
        """
        return self._rows.list("position")[self._row]  # type: ignore[no-any-return]

    @property
    def attempt(self) -> int:
        """How often this group got it, this time included."""
        return self._rows.list("attempt")[self._row]  # type: ignore[no-any-return]

    @property
    def redelivered(self) -> bool:
        """Whether this group may have seen it before."""
        return self.attempt > 1

    @property
    def born(self) -> datetime:
        """When the producer made it, by the producer's clock."""
        return moment(self._rows.list("born_us")[self._row])

    @property
    def stored(self) -> datetime:
        """When it became durable, by the broker's clock (of a half message: the prepare)."""
        return moment(self._rows.list("stored_us")[self._row])

    @property
    def transaction_id(self) -> TransactionId | None:
        """The transaction that it came with, None for plain messages."""
        raw = self._rows.list("transaction")[self._row]
        return None if raw is None else TransactionId.from_bytes(raw)

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
        """The columns."""
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


def moment(microseconds: int) -> datetime:
    """Return a time of the wire."""
    return _EPOCH + timedelta(microseconds=microseconds)
