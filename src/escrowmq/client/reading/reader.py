"""Reading without a group: the caller says which queues and from where, and keeps the offsets itself.

For consumers that store their position with their effect, in one transaction of their own database (then each message has
exactly one effect), and for everything that reads a topic without taking messages from anybody.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Iterator

import pyarrow as pa

from escrowmq.client.consuming.delivery import Batch, Content, Rows
from escrowmq.client.consuming.options import DEFAULT_BATCH
from escrowmq.client.lanes.blocking import AsyncCloses, Closes, blocking, iterating
from escrowmq.client.reading.reading import WAIT_SECONDS, Partition, Reading, Start


class ReadMessage(Content):
    """A message that was read, not leased: ``attempt`` is 0 and there is nothing to acknowledge."""

    __slots__ = ()


class ReadBatch(Batch[ReadMessage]):
    """Messages of one queue in order: ``arrow`` has schema DELIVERY with lease -1 and attempt 0 (or the columns asked for).

    ``shard`` and ``queue`` say where they stand, ``next_offset`` the position after them.
    """

    __slots__ = ("place",)
    _message = ReadMessage

    def __init__(self, place: Partition, batch: pa.RecordBatch) -> None:
        super().__init__(Rows(0, batch))
        self.place = place

    @property
    def shard(self) -> int:
        """The broker's shard."""
        return self.place[0]

    @property
    def queue(self) -> int:
        """The queue of the topic."""
        return self.place[1]

    @property
    def next_offset(self) -> int:
        """The offset from which to go on after this batch."""
        return int(self.arrow.column("offset")[len(self) - 1].as_py()) + 1


class ReaderBase:
    """What both faces of a reader share."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    @property
    def topic(self) -> str:
        """What it reads."""
        return self._reading.topic

    def positions(self) -> dict[Partition, int]:
        """The next offset of every (shard, queue): all below was handed out (or not wanted). Give it back as ``start``."""
        return dict(self._reading.positions)

    async def _close(self) -> None:
        self._reading.close()


class AsyncReader(ReaderBase, AsyncCloses):
    """As :class:`Reader`, to await: ``async for batch in reader.batches()``."""

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[ReadBatch]:
        """Batches of up to ``max_messages``, each of one queue, until :meth:`close`, or until none came for
        ``idle_timeout`` seconds (0: what is there now).

        A broker that is away is waited for. Raises RANGE_PURGED when messages left with retention before they were read.
        """
        reading = self._reading
        while True:
            deadline = math.inf if idle_timeout is None else time.monotonic() + idle_timeout
            while not await reading.waiting.away(
                reading.fill, min(max(deadline - time.monotonic(), 0.0), WAIT_SECONDS)
            ):
                if reading.closed.is_set() or time.monotonic() >= deadline:
                    return
            yield ReadBatch(*reading.take(max_messages))

    async def seek(self, start: Start) -> None:
        """Go on from ``start``, see :meth:`Bus.reader`; of a mapping, partitions that are not named stay where they are."""
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
