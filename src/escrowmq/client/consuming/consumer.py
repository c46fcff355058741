"""The consumer; :class:`Consumer` blocks, :class:`AsyncConsumer` is awaited.

Quality of service, per consumer:

- ``qos=0``, at most once: messages are acknowledged before they are handed out.
- ``qos=1``, at least once: acknowledge after the effect. What is not acknowledged comes back, flagged ``redelivered``.
- ``qos=2``, exactly one effect: needs the help of the database that holds the effect. The handler writes
  ``message.message_id`` under a unique key *in the same transaction* as its effect; ``seen=`` names a function that
  looks it up. What was seen is acknowledged and passed over. The unique key, not the look-up, is what makes it exact: a
  lease may end while its first consumer still works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np
import pyarrow as pa

from escrowmq import hooks
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
from escrowmq.client.lanes.blocking import AsyncCloses, Closes, at_once, blocking, iterating
from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, EscrowError, error
from escrowmq.model import Act

GRACE_SECONDS = 30.0
"""Time (s) that closing gives to loops over a consumer: what Kubernetes gives to a container, and Kafka's consumer to
itself."""
LOCK_SECONDS = 0.1
"""The lock of an iteration is held for moments only; longer by a thread that a signal handler interrupted."""

MessageT = TypeVar("MessageT", bound=ReceivedBase)
BatchT = TypeVar("BatchT", bound=Batch[Any])


class ConsumerBase(Generic[MessageT, BatchT]):
    """The base of both consumers: their machinery and the state of their iteration."""

    def __init__(self, consumption: Consumption, message: type[MessageT], batch: type[BatchT]) -> None:
        self._consumption = consumption
        self._message = message
        self._batch = batch
        self._iterating = threading.Lock()  # guards what follows, and closing; held for moments only
        self._rows: LeasedRows | None = None  # from which messages are taken, and the next row of it
        self._row = 0
        self._then: Callable[[], Awaitable[None]] | None = None  # what follows when a loop has finished closing

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
        """Brokers that this consumer gets nothing from now, with the reason. It rejoins them by itself."""
        return self._consumption.missing()

    @property
    def stopped(self) -> bool:
        """Whether it was stopped or closed: nothing more is handed out."""
        return self._consumption.stopped

    def _stop(self) -> None:
        """Receive nothing more, and end the loops over this consumer. Never waits; safe in a signal handler.

        What was not handed out goes back at once. A message that was handed out can still be acknowledged.
        """
        self._consumption.stop()
        # A signal handler may have interrupted the thread that holds the lock; that one gives the rest back when it
        # continues.
        if self._iterating.acquire(timeout=LOCK_SECONDS):
            try:
                self._give_back_rest()
            finally:
                self._iterating.release()

    def _give_back_rest(self) -> None:
        """Give back the rows that were taken and not handed out. With the lock held.

        With ``qos=0`` they are acknowledged already, and are still handed out.
        """
        if self._consumption.qos == 0:
            return
        rows, self._rows = self._rows, None
        if rows is not None:
            self._consumption.give_back(rows.number, rows.batch.slice(self._row))

    async def _close(self, grace: float = GRACE_SECONDS, *, again: bool = True) -> bool:
        """Close; False if the caller's own loop has to end first, which then finishes it. ``again``: a second call
        waits for nothing."""
        consumption = self._consumption
        if consumption.closing and again:
            consumption.hurried = True
        consumption.closing = True
        self._stop()
        if not consumption.hurried:
            await consumption.arrival.wait(lambda: consumption.hurried or not consumption.iterations.others, grace)
            if consumption.iterations.mine and not consumption.hurried:
                consumption.unfinished = True
                await consumption.waiting.away(consumption.drain)
                return False
        await consumption.waiting.away(consumption.close)
        return True

    async def _loop_ended(self, runner: object) -> None:
        """Finish what waits for a loop over this consumer."""
        consumption = self._consumption
        consumption.iterations.end(runner)
        if consumption.closing:
            consumption.arrival.set()
        if consumption.unfinished:
            await consumption.waiting.away(consumption.close)
            if (then := self._then) is not None:
                self._then = None
                await then()

    def _without_withdrawn(self, batch: pa.RecordBatch, number: int) -> LeasedRows | None:
        """Return the rows of a batch that may still be handed out, or None if another batch must be taken."""
        consumption = self._consumption
        self._rows = None
        rows = LeasedRows(number, batch, consumption)
        if (withdrawn := consumption.find_withdrawn(rows)) is not None:
            rows = LeasedRows(number, batch.filter(pa.array(~withdrawn)), consumption)
        return rows if rows.count else None

    async def _next_batch(self, idle_timeout: float | None) -> bool:
        """Have a batch to take messages from; False when iteration is over."""
        rows = await self._next_rows(DEFAULT_BATCH, idle_timeout, one_by_one=True)
        if rows is None:
            return False
        with self._iterating:
            stopped = self._consumption.stopped
            if not stopped and self._rows is None:
                self._rows, self._row = rows, 0
                return True
        if stopped:
            self._consumption.give_back(rows.number, rows.batch)
        else:  # another thread or task was first
            self._consumption.fetcher.put_back(rows.number, rows.batch)
        return not stopped

    async def _next_rows(
        self, max_messages: int, idle_timeout: float | None, *, one_by_one: bool = False
    ) -> LeasedRows | None:
        consumption, fetcher = self._consumption, self._consumption.fetcher
        deadline = None if idle_timeout is None else time.monotonic() + idle_timeout
        if not consumption.stopped:
            fetcher.start(max_messages, one_by_one)
        while not consumption.stopped:
            if (rows := await self._take(max_messages)) is not None:
                if consumption.stopped and consumption.qos != 0:  # with qos 0 they are acknowledged already
                    consumption.give_back(rows.number, rows.batch)
                    return None
                return rows
            left = None if deadline is None else deadline - time.monotonic()
            if not await consumption.arrival.wait(lambda: fetcher.has_something() or consumption.stopped, left):
                return None
        return None

    async def _take(self, max_messages: int) -> LeasedRows | None:
        """Return up to ``max_messages`` of what has arrived; with qos 0 and 2, acknowledged or screened."""
        taken = self._consumption.fetcher.take()
        if taken is None:
            return None
        number, batch = taken
        if batch.num_rows > max_messages:
            self._consumption.fetcher.put_back(number, batch.slice(max_messages))
            batch = batch.slice(0, max_messages)
        return await self._screen(LeasedRows(number, batch, self._consumption))

    async def _screen(self, rows: LeasedRows) -> LeasedRows | None:
        consumption = self._consumption
        if (withdrawn := consumption.find_withdrawn(rows)) is not None:
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
    """The calls of a consumer that wait."""

    async def messages(self, *, idle_timeout: float | None = None) -> AsyncIterator[MessageT]:
        """One message after the other, until :meth:`stop`, or until none came for ``idle_timeout`` seconds."""
        message, ordered = self._message, self._consumption.order is not None
        runner = self._consumption.iterations.begin()
        try:
            while True:
                with self._iterating:
                    if self._consumption.stopped and self._consumption.qos != 0:
                        self._give_back_rest()
                        return
                    if (rows := self._rows) is not None:
                        row = self._row
                        if ordered and rows.withdrawn(row):
                            rows, row = self._without_withdrawn(rows.batch.slice(row), rows.number), 0
                    if rows is not None:
                        self._row = row + 1
                        self._rows = None if row + 1 == rows.count else rows
                if rows is not None and not hooks.installed:
                    yield message(rows, row)
                elif rows is not None:
                    one = message(rows, row)
                    with hooks.around(hooks.Call("handle", one.topic, 1, (one,))):
                        yield one
                elif not await self._next_batch(idle_timeout):
                    return
        finally:
            await self._loop_ended(runner)

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[BatchT]:
        """Yield batches of up to ``max_messages``, until :meth:`stop`, or until none came for ``idle_timeout``
        seconds."""
        runner = self._consumption.iterations.begin()
        try:
            while (rows := await self._next_rows(max_messages, idle_timeout)) is not None:
                batch = self._batch(rows)
                if not hooks.installed:
                    yield batch
                    continue
                with hooks.around(hooks.Call("handle", None, len(batch), cast(Sequence[Any], batch), batch.arrow)):
                    yield batch
        finally:
            await self._loop_ended(runner)

    async def receive(self, max_messages: int = 1, wait: float = 0.0) -> list[MessageT]:
        """Ask once: what is there, or comes within ``wait`` seconds. For tests and scripts; iteration is faster."""
        consumption = self._consumption
        if (taken := await self._take(max_messages)) is not None:
            return list(self._batch(taken))
        found: list[MessageT] = []
        for number, batch in await consumption.receive_once(max_messages, wait):
            if consumption.order is not None:
                consumption.order.add(number, batch)
            if (rows := await self._screen(LeasedRows(number, batch, consumption))) is not None:
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

    async def close(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, let the loops over this consumer end, send the acknowledgements that wait, then disconnect.

        Loops of other threads or tasks may take ``grace`` seconds. Called within a loop over this consumer, or in a
        signal handler that interrupted one, it returns at once and the end of that loop disconnects; so a message that
        is being handled can be acknowledged. A second call waits for nothing. A message that was handed out and not
        acknowledged is delivered again when its lease ends.
        """
        await self._close(grace)


class AsyncConsumer(ConsumerCalls[AsyncReceived, AsyncReceivedBatch], AsyncCloses):
    """As :class:`Consumer`, to await: ``async for message in consumer``, ``async for batch in consumer.batches()``.

    Several tasks may iterate one consumer.
    """

    def __init__(self, consumption: Consumption) -> None:
        super().__init__(consumption, AsyncReceived, AsyncReceivedBatch)

    stop = at_once(ConsumerBase._stop)

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
    stop = ConsumerBase._stop
    close = blocking(ConsumerCalls[Received, ReceivedBatch].close)

    def __iter__(self) -> Iterator[Received]:
        return self.messages()
