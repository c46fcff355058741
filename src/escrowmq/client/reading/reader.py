"""Reading without a group: the caller says which queues and from where, and keeps the offsets itself.

For consumers that store their position with their effect, in one transaction of their own database (then each message
has exactly one effect), and for everything that reads a topic without taking messages from anybody.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa

from escrowmq.client.consuming.delivery import Batch, Content, Rows, moment
from escrowmq.client.consuming.options import DEFAULT_BATCH
from escrowmq.client.lanes.blocking import AsyncCloses, Closes, blocking, iterating
from escrowmq.client.links.presence import Missing
from escrowmq.client.reading.reading import WAIT_SECONDS, Partition, Reading, Start
from escrowmq.client.reading.views import messages_of
from escrowmq.errors import Code, error
from escrowmq.model import TransactionId
from escrowmq.wire import DAMAGED_COLUMN


class ReadMessage(Content):
    """A message that was read, not leased: ``attempt`` is 0 and there is nothing to acknowledge."""

    __slots__ = ()

    @property
    def damaged(self) -> str | None:
        """Where the log is damaged under the message: its body, or all its content, is lost. None: it is whole."""
        return None


class DamagedMessage(ReadMessage):
    """A message under which the log is damaged. What is lost raises Corrupt(DAMAGED): the body always; all else but
    topic, queue, offset and position, too, if ``message_id`` raises."""

    __slots__ = ()

    @property
    def damaged(self) -> str:
        """The place: segment, byte, frame and position."""
        return self._rows.list(DAMAGED_COLUMN)[self._row]  # type: ignore[no-any-return]

    def _left(self, name: str) -> Any:
        """Return a value, if it is not lost. A null key or tag may be no loss: then the id is there."""
        value = self._rows.list(name)[self._row]
        known = self._rows.list("message_id")[self._row] if "message_id" in self._rows.batch.schema.names else None
        if value is None and (name in ("body", "message_id") or known is None):
            raise error(Code.DAMAGED, self.damaged)
        return value

    @property
    def body(self) -> bytes:
        """Raises Corrupt(DAMAGED)."""
        return self._left("body")  # type: ignore[no-any-return]

    @property
    def key(self) -> str | None:
        """The key, None if it has none."""
        return self._left("key")  # type: ignore[no-any-return]

    @property
    def tag(self) -> str | None:
        """The tag, None if it has none."""
        return self._left("tag")  # type: ignore[no-any-return]

    @property
    def properties(self) -> dict[str, str]:
        """The properties, a new dict each time."""
        return dict(self._left("properties") or ())

    @property
    def message_id(self) -> bytes:
        """The 16 bytes that name the message."""
        return self._left("message_id")  # type: ignore[no-any-return]

    @property
    def born(self) -> datetime:
        """When the producer made it, by the producer's clock."""
        return moment(self._left("born_us"))

    @property
    def transaction_id(self) -> TransactionId | None:
        """The transaction that it came with, None for plain messages."""
        raw = self._left("transaction")
        return None if raw is None else TransactionId.from_bytes(raw)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}/{self.queue}@{self.offset}, {self.damaged}>"


def message_at(rows: Rows, row: int) -> ReadMessage:
    """Return a message that was read: a :class:`DamagedMessage` if the log is damaged under it."""
    damaged = DAMAGED_COLUMN in rows.batch.schema.names and rows.list(DAMAGED_COLUMN)[row] is not None
    return (DamagedMessage if damaged else ReadMessage)(rows, row)


class ReadBatch(Batch[ReadMessage]):
    """Messages of one queue in order: ``arrow`` has schema DELIVERY with lease -1 and attempt 0 (or the columns asked
    for). Only if some of them are damaged it has one column more, ``damaged``, and null where content is lost.

    ``shard`` and ``queue`` say where they stand, ``next_offset`` the position after them.
    """

    __slots__ = ("_columns", "next_offset", "place")
    _message = ReadMessage

    def __init__(self, place: Partition, batch: pa.RecordBatch, next_offset: int, source: str) -> None:
        super().__init__(Rows(0, messages_of(source, batch)))
        self._columns = batch
        self.place = place
        self.next_offset = next_offset
        """The offset (of a view: the position) from which to continue after this batch."""

    @property
    def arrow(self) -> pa.RecordBatch:
        """The columns: of a system view those of the view."""
        return self._columns

    def _at(self, row: int) -> ReadMessage:
        return message_at(self._rows, row)

    @property
    def shard(self) -> int:
        """The broker's shard."""
        return self.place[0]

    @property
    def queue(self) -> int:
        """The queue of the topic."""
        return self.place[1]


class ReaderBase:
    """The base of both readers."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    def topic(self) -> str:
        """What it reads."""
        return self._reading.topic

    def positions(self) -> dict[Partition, int]:
        """Return the next offset of every (shard, queue): all below was handed out (or not wanted). Give it back as
        ``start``."""
        return dict(self._reading.positions)

    @property
    def missing(self) -> list[Missing]:
        """Brokers from which nothing is read now, with the reason. They are read when they are back."""
        return self._reading.missing()

    async def _close(self) -> None:
        self._reading.close()


class AsyncReader(ReaderBase, AsyncCloses):
    """As :class:`Reader`, to await: ``async for batch in reader.batches()``."""

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[ReadBatch]:
        """Yield batches of up to ``max_messages``, each of one queue, until :meth:`close`, or until none came for
        ``idle_timeout`` seconds (0: what is there now).

        A broker that is away is waited for. Raises RANGE_PURGED when messages left with retention before they were
        read.
        """
        reading = self._reading
        while True:
            deadline = math.inf if idle_timeout is None else time.monotonic() + idle_timeout
            while not await reading.waiting.away(
                reading.fill, min(max(deadline - time.monotonic(), 0.0), WAIT_SECONDS)
            ):
                if reading.closed.is_set() or time.monotonic() >= deadline:
                    return
            if (taken := reading.take(max_messages)) is not None:
                yield ReadBatch(*taken, reading.topic)

    async def seek(self, start: Start) -> None:
        """Go on from ``start``, see :meth:`Bus.reader`; of a mapping, partitions that are not named stay where they
        are."""
        await self._reading.waiting.away(self._reading.seek, start)

    async def close(self) -> None:
        """End iteration."""
        await self._close()

    def __aiter__(self) -> AsyncIterator[ReadBatch]:
        return self.batches()


class Reader(ReaderBase, Closes):
    """Made by :meth:`Bus.reader`. Iterate :meth:`batches`; one thread at a time, except for :meth:`close`."""

    batches = iterating(AsyncReader.batches)
    seek = blocking(AsyncReader.seek)
    close = blocking(AsyncReader.close)

    def __iter__(self) -> Iterator[ReadBatch]:
        return self.batches()
