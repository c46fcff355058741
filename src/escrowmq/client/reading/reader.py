"""Reading without a group: the caller chooses the queues and where to begin, and keeps the offsets itself.

For consumers that store their position with their effect, in one transaction of their own database (then each message
has exactly one effect), and for programs that read a topic without leasing its messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa

from escrowmq.client.consuming.delivery import Batch, Content, Rows
from escrowmq.client.consuming.options import DEFAULT_BATCH
from escrowmq.client.lanes.blocking import AsyncCloses, Closes, blocking, iterating
from escrowmq.client.links.presence import Missing
from escrowmq.client.reading.reading import Partition, Reading, Start
from escrowmq.client.reading.views import messages_of
from escrowmq.errors import Code, error
from escrowmq.wire import DAMAGED_COLUMN


class ReadMessage(Content):
    """A message that was read, not leased: ``attempt`` is 0, and it cannot be acknowledged."""

    __slots__ = ()

    @property
    def damaged(self) -> str | None:
        """Where the log is damaged under the message: its body, or all its content, is lost. None: the message is
        whole."""
        return None


class DamagedMessage(ReadMessage):
    """A message under which the log is damaged. What is lost raises Corrupt(DAMAGED): the body always; if
    ``message_id`` raises, all else but topic, queue, offset and position, too."""

    __slots__ = ()

    @property
    def damaged(self) -> str:
        """Where the log is damaged under the message: segment, byte, frame and position."""
        return self._rows.list(DAMAGED_COLUMN)[self._row]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}/{self.queue}@{self.offset}, {self.damaged}>"


def _unless_lost(column: str, whole: Any) -> property:
    """Return a property for damaged messages: as ``whole``, but it raises Corrupt(DAMAGED) if the value in ``column``
    is lost. A null key or tag is no loss if there is a message id."""

    def get(message: DamagedMessage) -> Any:
        rows, row = message._rows, message._row
        known = "message_id" in rows.batch.schema.names and rows.list("message_id")[row] is not None
        if rows.list(column)[row] is None and (column in ("body", "message_id") or not known):
            raise error(Code.DAMAGED, message.damaged)
        return whole.fget(message)

    return property(get, doc=whole.__doc__)


for _name in ("body", "key", "tag", "properties", "message_id", "born", "transaction_id"):
    _column = {"born": "born_us", "transaction_id": "transaction"}.get(_name, _name)
    setattr(DamagedMessage, _name, _unless_lost(_column, getattr(ReadMessage, _name)))


def message_at(rows: Rows, row: int) -> ReadMessage:
    """Return the message in a row that was read: if the log is damaged under it a :class:`DamagedMessage`, which lacks
    its body, or all content."""
    damaged = DAMAGED_COLUMN in rows.batch.schema.names and rows.list(DAMAGED_COLUMN)[row] is not None
    return (DamagedMessage if damaged else ReadMessage)(rows, row)


class ReadBatch(Batch[ReadMessage]):
    """Messages of one ``queue`` at the broker of a ``shard``, in order; ``next_offset``: where to continue.

    ``arrow`` has schema DELIVERY with lease -1 and attempt 0 (or the chosen columns). If some of them are damaged, it
    has the column ``damaged``, too, and nulls where content is lost.
    """

    __slots__ = ("_columns", "next_offset", "place", "queue", "shard")
    _message = ReadMessage

    def __init__(self, place: Partition, batch: pa.RecordBatch, next_offset: int, source: str) -> None:
        super().__init__(Rows(0, messages_of(source, batch)))
        self._columns = batch
        self.place = place
        self.shard, self.queue = place
        self.next_offset = next_offset  # of a view: the position

    @property
    def arrow(self) -> pa.RecordBatch:
        """The messages as a record batch; of a system view with the view's columns."""
        return self._columns

    def _at(self, row: int) -> ReadMessage:
        return message_at(self._rows, row)


class ReaderBase:
    """The base of both readers."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    def topic(self) -> str:
        """The name of the topic or system view that is read."""
        return self._reading.topic

    def positions(self) -> dict[Partition, int]:
        """Return the offset at which each partition (shard, queue) continues: the ``start`` of a reader that continues
        here."""
        return dict(self._reading.positions)

    @property
    def missing(self) -> list[Missing]:
        """Brokers from which nothing is read until they are back, with the reason."""
        return self._reading.missing()

    async def _close(self) -> None:
        self._reading.close()


class AsyncReader(ReaderBase, AsyncCloses):
    """The awaitable form of :class:`Reader`: ``async for batch in reader.batches()``."""

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[ReadBatch]:
        """Yield batches of up to ``max_messages``, each of one queue, until :meth:`close`, or until none came for
        ``idle_timeout`` seconds (0: only the messages that are there now).

        Waits for a broker that is away. Raises RANGE_PURGED if retention removed messages before they were read.
        """
        reading = self._reading
        while True:
            deadline = math.inf if idle_timeout is None else time.monotonic() + idle_timeout
            while not await reading.waiting.away(reading.fill, deadline - time.monotonic()):
                if reading.closed.is_set() or time.monotonic() >= deadline:
                    return
            if (taken := reading.take(max_messages)) is not None:
                yield ReadBatch(*taken, reading.topic)

    async def seek(self, start: Start) -> None:
        """Continue at ``start`` (see :meth:`Bus.reader`). Partitions that it does not name keep their positions."""
        await self._reading.waiting.away(self._reading.seek, start)

    async def close(self) -> None:
        """End iteration, and the threads that wait for messages."""
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
