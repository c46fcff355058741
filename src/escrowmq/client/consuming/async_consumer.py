"""The consumer, to await."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pyarrow as pa

from escrowmq.client.consuming.consumption import (
    DEFAULT_BATCH,
    Consumption,
    delay_us,
)
from escrowmq.client.consuming.delivery import Content, Rows
from escrowmq.client.lanes.lanes import LoopLane
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import (
    Act,
)


class AsyncReceived(Content):
    """As :class:`~escrowmq.client.consuming.consumer.Received`, to await."""

    __slots__ = ("_consumption",)

    def __init__(self, rows: Rows, row: int, consumption: Consumption[LoopLane]) -> None:
        super().__init__(rows, row)
        self._consumption = consumption

    async def ack(self) -> None:
        """As :meth:`Received.ack`: sent in the background; :meth:`AsyncConsumer.flush` waits."""
        self._consumption.act(self._rows, self._row, Act.ACK, 0, None, None)

    async def nack(self, delay: float | None = None, cause: str | None = None) -> None:
        """As :meth:`Received.nack`."""
        self._consumption.act(self._rows, self._row, Act.NACK, delay_us(delay), cause, None)

    async def extend(self, seconds: float) -> None:
        """As :meth:`Received.extend`."""
        future = asyncio.get_running_loop().create_future()
        self._consumption.act(self._rows, self._row, Act.EXTEND, delay_us(seconds), None, future)
        await future


class AsyncReceivedBatch:
    """As :class:`~escrowmq.client.consuming.consumer.ReceivedBatch`, to await."""

    __slots__ = ("_consumption", "_rows")

    def __init__(self, rows: Rows, consumption: Consumption[LoopLane]) -> None:
        self._rows = rows
        self._consumption = consumption

    @property
    def arrow(self) -> pa.RecordBatch:
        """The columns."""
        return self._rows.batch

    def __len__(self) -> int:
        return int(self._rows.batch.num_rows)

    def __iter__(self) -> Iterator[AsyncReceived]:
        return (AsyncReceived(self._rows, row, self._consumption) for row in range(len(self)))

    def __getitem__(self, row: int) -> AsyncReceived:
        return AsyncReceived(self._rows, range(len(self))[row], self._consumption)

    async def ack(self, *, wait: bool = True) -> None:
        """As :meth:`ReceivedBatch.ack`."""
        await self._act(Act.ACK, 0, None, wait)

    async def nack(self, delay: float | None = None, cause: str | None = None, *, wait: bool = True) -> None:
        """As :meth:`ReceivedBatch.nack`."""
        await self._act(Act.NACK, delay_us(delay), cause, wait)

    async def extend(self, seconds: float) -> None:
        """As :meth:`ReceivedBatch.extend`."""
        await self._act(Act.EXTEND, delay_us(seconds), None, True)

    async def _act(self, act: Act, delay: int, cause: str | None, wait: bool) -> None:
        if not len(self):
            return
        future = asyncio.get_running_loop().create_future() if wait else None
        self._consumption.act_on_all(self._rows, act, delay, cause, future)
        if future is not None:
            answer, resent = await future
            if (code := self._consumption.first_refusal(answer, resent)) is not None:
                raise error(code)


class AsyncConsumer:
    """As :class:`~escrowmq.client.consuming.consumer.Consumer`: ``async for message in consumer``, ``async for batch in
    consumer.batches()``. Several tasks may iterate one consumer."""

    def __init__(self, consumption: Consumption[LoopLane], arrival: asyncio.Event) -> None:
        self._consumption = consumption
        self._arrival = arrival
        self._current: tuple[Rows, int] | None = None

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._consumption.group

    @property
    def refused(self) -> int:
        """Acknowledgements that came too late; those messages are delivered again."""
        return self._consumption.refused

    def __aiter__(self) -> AsyncIterator[AsyncReceived]:
        return self.messages()

    async def messages(self, *, idle_timeout: float | None = None) -> AsyncIterator[AsyncReceived]:
        """As :meth:`Consumer.messages`."""
        while True:
            if self._current is None:
                fresh = await self._next_rows(DEFAULT_BATCH, idle_timeout)
                if fresh is None:
                    return
                if self._current is not None:
                    self._consumption.fetcher.put_back(fresh.number, fresh.batch)
                else:
                    self._current = (fresh, 0)
            if self._consumption.closed:
                return
            rows, row = self._current
            self._current = None if row + 1 >= rows.batch.num_rows else (rows, row + 1)
            yield AsyncReceived(rows, row, self._consumption)

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[AsyncReceivedBatch]:
        """As :meth:`Consumer.batches`."""
        while (rows := await self._next_rows(max_messages, idle_timeout)) is not None:
            yield AsyncReceivedBatch(rows, self._consumption)

    async def receive(self, max_messages: int = 1, wait: float = 0.0) -> list[AsyncReceived]:
        """As :meth:`Consumer.receive`."""
        consumption = self._consumption
        found: list[AsyncReceived] = []
        if (taken := await self._take(max_messages)) is not None:
            found.extend(AsyncReceivedBatch(taken, consumption))
            return found
        for number, future in await asyncio.to_thread(consumption.receive_now, max_messages, wait):
            batch = await asyncio.wait_for(asyncio.wrap_future(future), wait + consumption.timeout)
            if (rows := await self._screened(Rows(number, batch))) is not None:
                found.extend(AsyncReceivedBatch(rows, consumption))
        return found

    async def flush(self, timeout: float | None = None) -> int:
        """As :meth:`Consumer.flush`."""
        patience = self._consumption.timeout if timeout is None else timeout
        for lane in self._consumption.lanes:
            if not await asyncio.to_thread(lane.drain, patience):
                raise error(Code.TIMED_OUT, "acknowledgements are still on their way")
        return self.refused

    async def close(self) -> None:
        """As :meth:`Consumer.close`."""
        current, self._current = self._current, None
        if current is not None:
            rows, row = current
            self._consumption.give_back(rows.number, rows.batch.slice(row))
        await asyncio.to_thread(self._consumption.close)
        self._arrival.set()

    async def _next_rows(self, max_messages: int, idle_timeout: float | None) -> Rows | None:
        deadline = None if idle_timeout is None else time.monotonic() + idle_timeout
        if not self._consumption.closed:
            self._consumption.fetcher.start(max_messages)
        while not self._consumption.closed:
            self._arrival.clear()
            if (rows := await self._take(max_messages)) is not None:
                return rows
            if self._consumption.fetcher.has_something():
                continue
            left = None if deadline is None else deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return None
        self._arrival.set()  # for the other tasks that iterate
        return None

    async def _take(self, max_messages: int) -> Rows | None:
        taken = self._consumption.fetcher.take()
        if taken is None:
            return None
        number, batch = taken
        if batch.num_rows > max_messages:
            self._consumption.fetcher.put_back(number, batch.slice(max_messages))
            batch = batch.slice(0, max_messages)
        return await self._screened(Rows(number, batch))

    async def _screened(self, rows: Rows) -> Rows | None:
        consumption = self._consumption
        if not rows.batch.num_rows:
            return None
        if consumption.qos == 0:
            try:
                await AsyncReceivedBatch(rows, consumption).ack()
            except EscrowError as problem:
                if problem.code not in (Code.LEASE_LOST, Code.DISCONNECTED):
                    raise
                return None  # another consumer has them: at most once
        elif consumption.qos == 2:
            make = lambda rows, row: AsyncReceived(rows, row, consumption)  # noqa: E731
            unseen = await asyncio.to_thread(consumption.unseen, rows, make)
            for row in np.flatnonzero(~unseen).tolist():
                consumption.act(rows, row, Act.ACK, 0, None, None)
            if not unseen.all():
                rows = Rows(rows.number, rows.batch.filter(pa.array(unseen)))
        return rows if rows.batch.num_rows else None
