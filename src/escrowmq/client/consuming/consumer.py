"""The consumer; :class:`Consumer` blocks, :class:`AsyncConsumer` is awaited.

Quality of service, per consumer:

- ``qos=0``, at most once: messages are acknowledged before they are handed out.
- ``qos=1``, at least once: acknowledge after the effect. What is not acknowledged comes back, flagged ``redelivered``.
- ``qos=2``, exactly one effect: needs the help of the database that holds the effect. The handler writes
  ``message.message_id`` under a unique key *in the same transaction* as its effect; ``seen=`` names a function that looks
  it up. What was seen is acknowledged and passed over. The unique key, not the look-up, is what makes it exact: a lease
  may end while its first consumer still works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.delivery import Batch
from escrowmq.client.consuming.options import DEFAULT_BATCH
from escrowmq.client.consuming.received import (
    AsyncReceived,
    AsyncReceivedBatch,
    LeasedRows,
    Received,
    ReceivedBase,
    ReceivedBatch,
)
from escrowmq.client.lanes.blocking import AsyncCloses, Closes, blocking, iterating
from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import Act

MessageT = TypeVar("MessageT", bound=ReceivedBase)
BatchT = TypeVar("BatchT", bound=Batch[Any])


class ConsumerBase(Generic[MessageT, BatchT]):
    """What both faces of a consumer share: its machinery, what iteration is in the middle of, and how it goes on."""

    def __init__(self, consumption: Consumption, message: type[MessageT], batch: type[BatchT]) -> None:
        self._consumption = consumption
        self._message = message
        self._batch = batch
        self._iterating = threading.Lock()  # guards what follows, and closing; held for moments only
        self._rows: LeasedRows | None = None  # from which messages are taken, and the next row of it
        self._row = 0

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._consumption.group

    @property
    def refused(self) -> int:
        """Acknowledgements that came too late; those messages are delivered again."""
        return self._consumption.refused

    @property
    def missing(self) -> list[Missing]:
        """Of several brokers, those that this consumer gets nothing from now, with the reason. It joins them by itself."""
        return self._consumption.missing()

    async def _close(self) -> None:
        consumption = self._consumption
        with self._iterating:
            first, consumption.closed = not consumption.closed, True
            rows, self._rows = self._rows, None
        if rows is not None:
            consumption.give_back(rows.number, rows.batch.slice(self._row))
        if first:
            consumption.arrival.set()
            await consumption.waiting.away(consumption.close)

    def _without_withdrawn(self, batch: pa.RecordBatch, number: int) -> LeasedRows | None:
        """What of the rest of a batch may still be handed out; None, and another batch is to be taken: nothing."""
        consumption = self._consumption
        self._rows = None
        rows = LeasedRows(number, batch, consumption)
        if (withdrawn := consumption.withdrawn_of(rows)) is not None:
            rows = LeasedRows(number, batch.filter(pa.array(~withdrawn)), consumption)
        return rows if rows.count else None

    async def _next_batch(self, idle_timeout: float | None) -> bool:
        """Have a batch to take messages from; False when iteration is over."""
        rows = await self._next_rows(DEFAULT_BATCH, idle_timeout, one_by_one=True)
        if rows is None:
            return False
        with self._iterating:
            closed = self._consumption.closed
            if not closed and self._rows is None:
                self._rows, self._row = rows, 0
                return True
        if closed:
            self._consumption.give_back(rows.number, rows.batch)
        else:  # another thread or task was first
            self._consumption.fetcher.put_back(rows.number, rows.batch)
        return not closed

    async def _next_rows(
        self, max_messages: int, idle_timeout: float | None, *, one_by_one: bool = False
    ) -> LeasedRows | None:
        consumption, fetcher = self._consumption, self._consumption.fetcher
        deadline = None if idle_timeout is None else time.monotonic() + idle_timeout
        if not consumption.closed:
            fetcher.start(max_messages, one_by_one)
        while not consumption.closed:
            if (rows := await self._take(max_messages)) is not None:
                return rows
            left = None if deadline is None else deadline - time.monotonic()
            if not await consumption.arrival.wait(lambda: fetcher.has_something() or consumption.closed, left):
                return None
        return None

    async def _take(self, max_messages: int) -> LeasedRows | None:
        """Up to ``max_messages`` of what has arrived; with qos 0 and 2, acknowledged or screened."""
        taken = self._consumption.fetcher.take()
        if taken is None:
            return None
        number, batch = taken
        if batch.num_rows > max_messages:
            self._consumption.fetcher.put_back(number, batch.slice(max_messages))
            batch = batch.slice(0, max_messages)
        return await self._screened(LeasedRows(number, batch, self._consumption))

    async def _screened(self, rows: LeasedRows) -> LeasedRows | None:
        consumption = self._consumption
        if (withdrawn := consumption.withdrawn_of(rows)) is not None:
            rows = LeasedRows(rows.number, rows.batch.filter(pa.array(~withdrawn)), consumption)
        if not rows.batch.num_rows:
            return None
        if consumption.qos == 0:
            try:
                await consumption.act_on_all(rows, Act.ACK, 0, None, True)
            except EscrowError as problem:
                if problem.code not in (Code.LEASE_LOST, Code.DISCONNECTED):
                    raise
                return None  # another consumer has them: at most once
        elif consumption.qos == 2:
            seen = await consumption.waiting.away(self._seen, rows)
            for row in np.flatnonzero(seen).tolist():
                consumption.act(rows, row, Act.ACK, 0, None)
            if seen.any():
                rows = LeasedRows(rows.number, rows.batch.filter(pa.array(~seen)), consumption)
        return rows if rows.batch.num_rows else None

    def _seen(self, rows: LeasedRows) -> Any:
        """With qos=2: which rows the consumer's own database has a mark of."""
        seen = self._consumption.seen
        assert seen is not None
        return np.array([seen(self._message(rows, row)) for row in range(rows.count)], np.bool_)


class ConsumerCalls(ConsumerBase[MessageT, BatchT]):
    """What a consumer does that waits."""

    async def messages(self, *, idle_timeout: float | None = None) -> AsyncIterator[MessageT]:
        """One message after the other, until :meth:`close`, or until none came for ``idle_timeout`` seconds."""
        message, ordered = self._message, self._consumption.order is not None
        while True:
            with self._iterating:
                if (rows := self._rows) is not None:
                    row = self._row
                    if ordered and rows.withdrawn(row):
                        rows, row = self._without_withdrawn(rows.batch.slice(row), rows.number), 0
                if rows is not None:
                    self._row = row + 1
                    self._rows = None if row + 1 == rows.count else rows
            if rows is not None:
                yield message(rows, row)
            elif not await self._next_batch(idle_timeout):
                return

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[BatchT]:
        """Batches of up to ``max_messages``, until :meth:`close`, or until none came for ``idle_timeout`` seconds."""
        while (rows := await self._next_rows(max_messages, idle_timeout)) is not None:
            yield self._batch(rows)

    async def receive(self, max_messages: int = 1, wait: float = 0.0) -> list[MessageT]:
        """Ask once: what is there, or comes within ``wait`` seconds. For tests and scripts; iteration is faster."""
        consumption = self._consumption
        if (taken := await self._take(max_messages)) is not None:
            return list(self._batch(taken))
        found: list[MessageT] = []
        for number, batch in await consumption.receive_once(max_messages, wait):
            if consumption.order is not None:
                consumption.order.came(number, batch)
            if (rows := await self._screened(LeasedRows(number, batch, consumption))) is not None:
                found.extend(self._batch(rows))
        return found

    async def flush(self, timeout: float | None = None) -> int:
        """Wait until all acknowledgements are durable or refused; how many were refused in this consumer's life.

        Raises Unknown(TIMED_OUT) if that takes longer than ``timeout`` seconds.
        """
        consumption = self._consumption
        patience = consumption.timeout if timeout is None else timeout
        deadline = time.monotonic() + patience
        for lane in consumption.lanes:
            if not await consumption.waiting.away(lane.drain, max(deadline - time.monotonic(), 0.0)):
                raise error(Code.TIMED_OUT, "acknowledgements are still on their way")
        return self.refused

    async def close(self) -> None:
        """Send the acks that wait, give back what was not handed out, end iteration.

        What was handed out and not acknowledged comes back when its lease ends.
        """
        await self._close()


class AsyncConsumer(ConsumerCalls[AsyncReceived, AsyncReceivedBatch], AsyncCloses):
    """As :class:`Consumer`, to await: ``async for message in consumer``, ``async for batch in consumer.batches()``.

    Several tasks may iterate one consumer.
    """

    def __init__(self, consumption: Consumption) -> None:
        super().__init__(consumption, AsyncReceived, AsyncReceivedBatch)

    def __aiter__(self) -> AsyncIterator[AsyncReceived]:
        return self.messages()


class Consumer(ConsumerBase[Received, ReceivedBatch], Closes):
    """Receives the messages of a consumer group. Made by :meth:`Bus.consumer`. Iterate it, or its :meth:`batches`.

    Thread-safe: several threads may iterate one consumer and share its messages.
    """

    def __init__(self, consumption: Consumption) -> None:
        super().__init__(consumption, Received, ReceivedBatch)

    messages = iterating(ConsumerCalls[Received, ReceivedBatch].messages)
    batches = iterating(ConsumerCalls[Received, ReceivedBatch].batches)
    receive = blocking(ConsumerCalls[Received, ReceivedBatch].receive)
    flush = blocking(ConsumerCalls[Received, ReceivedBatch].flush)
    close = blocking(ConsumerCalls[Received, ReceivedBatch].close)

    def __iter__(self) -> Iterator[Received]:
        return self.messages()
