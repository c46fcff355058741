"""The consumer: :class:`Consumer` blocks, :class:`AsyncConsumer` is awaited.

Quality of service, per consumer:

- ``qos=0``, at most once: messages are acknowledged before they are handed out.
- ``qos=1``, at least once: acknowledge after the effect. Unacknowledged messages are redelivered (``redelivered``).
- ``qos=2``, exactly one effect, with the help of the database that holds the effect. The handler writes
  ``message.message_id`` under a unique key *in the same transaction* as its effect; ``seen=`` is a function that looks
  it up. Messages that it finds are acknowledged and skipped. The unique key, not the look-up, makes it exact: a lease
  may expire while its first consumer still works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np

from escrowmq import hooks
from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.delivery import Batch
from escrowmq.client.consuming.fetching import NO_ROWS
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
"""Time (s) that closing gives to loops over a consumer: as Kubernetes to a container, and Kafka's consumer to itself.
"""
LOCK_SECONDS = 0.1
"""The lock of an iteration is held for moments only, except by a thread that a signal handler interrupted."""

MessageT = TypeVar("MessageT", bound=ReceivedBase)
BatchT = TypeVar("BatchT", bound=Batch[Any])


class ConsumerBase(Generic[MessageT, BatchT]):
    """The base of both consumers: their shared state and that of their iteration."""

    def __init__(self, consumption: Consumption, message: type[MessageT], batch: type[BatchT]) -> None:
        self._consumption = consumption
        self._message = message
        self._batch = batch
        self._iterating = threading.Lock()  # guards the fields below, and closing; held for moments only
        self._rows: LeasedRows | None = None  # from which messages are taken, and the next row of it
        self._row = 0
        self._then: Callable[[], Awaitable[None]] | None = None  # called when a loop has finished closing

    @property
    def group(self) -> str:
        """The name of the consumer group."""
        return self._consumption.group

    @property
    def refused(self) -> int:
        """The number of acknowledgements that came too late; those messages are redelivered."""
        return self._consumption.refused

    @property
    def missing(self) -> list[Missing]:
        """Brokers that this consumer gets nothing from now, with the reason. It rejoins them by itself."""
        return self._consumption.missing()

    @property
    def stopped(self) -> bool:
        """Return whether the consumer was stopped or closed: nothing more is handed out."""
        return self._consumption.stopped

    def _stop(self) -> None:
        """Receive nothing more, and end the loops over this consumer. Never waits; safe in a signal handler.

        Messages that were not handed out are given back at once; the others can still be acknowledged.
        """
        self._consumption.stop()
        # A thread that a signal handler interrupted while it held the lock gives the rest back when it continues.
        if self._iterating.acquire(timeout=LOCK_SECONDS):
            try:
                self._give_back_rest()
            finally:
                self._iterating.release()

    def _give_back_rest(self) -> None:
        """Give the messages that were taken from the buffer and not handed out back to the broker. With the lock
        held."""
        if self._consumption.qos == 0:  # they are acknowledged already, and are still handed out
            return
        rows, self._rows = self._rows, None
        if rows is not None:
            self._consumption.give_back(rows.number, rows.batch.slice(self._row))

    async def _close(self, grace: float = GRACE_SECONDS, *, again: bool = True) -> bool:
        """Close the consumer after the loops over it have ended, at most ``grace`` seconds. Returns False if the
        caller's own loop has to end first, which then closes. ``again``: if this is a second call, do not wait for
        loops."""
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

    async def _end_loop(self, runner: object) -> None:
        """Note the end of a loop over this consumer, and finish closing if that waited for it. ``runner``: the loop's
        thread or task."""
        consumption = self._consumption
        consumption.iterations.end(runner)
        if consumption.closing:
            consumption.arrival.set()
        if consumption.unfinished:
            await consumption.waiting.away(consumption.close)
            if (then := self._then) is not None:
                self._then = None
                await then()

    def _return_late(self) -> None:
        """Give taken messages that were not handed out back to the broker, if they were kept for as long as messages
        may be buffered."""
        rows = self._rows
        if rows is not None and self._consumption.fetcher.is_late(rows.number) and self._iterating.acquire(False):
            try:
                if self._rows is rows:
                    self._give_back_rest()
            finally:
                self._iterating.release()

    async def _next_message(self, idle_timeout: float | None = None, receive: int = DEFAULT_BATCH) -> MessageT | None:
        """Wait for the next message and return it; None when iteration is over: stopped, or idle for ``idle_timeout``
        seconds. ``receive``: messages per receive."""
        consumption = self._consumption
        while True:
            with self._iterating:
                if consumption.stopped and consumption.qos != 0:
                    self._give_back_rest()
                    return None
                if (rows := self._rows) is not None:
                    row = self._row
                    if consumption.order is not None and rows.withdrawn(row):
                        self._rows = None
                        left = LeasedRows(rows.number, rows.batch.slice(row), consumption).drop_withdrawn()
                        rows, row = left if left.count else None, 0
                if rows is not None:
                    self._row = row + 1
                    self._rows = None if row + 1 == rows.count else rows
            if rows is not None:
                return self._message(rows, row)
            if not await self._next_batch(idle_timeout, receive):
                return None

    async def _next_batch(self, idle_timeout: float | None, receive: int) -> bool:
        """Wait for a batch that threads or tasks take messages from, one by one. Returns False when iteration is
        over."""
        rows = await self._next_rows(receive, idle_timeout, one_by_one=True)
        if rows is None or not rows.count:
            return rows is not None
        with self._iterating:
            stopped = self._consumption.stopped
            if taken := not stopped and self._rows is None:
                self._rows, self._row = rows, 0
        if taken:
            if rows.count > 1:
                self._consumption.arrival.set()  # the others that wait share it
            return True
        if stopped:
            self._consumption.give_back(rows.number, rows.batch)
        else:  # another thread or task was first
            self._consumption.fetcher.put_back(rows.number, rows.batch)
        return not stopped

    async def _next_rows(
        self, max_messages: int, idle_timeout: float | None, *, one_by_one: bool = False
    ) -> LeasedRows | None:
        """Wait for messages to hand out, and return up to ``max_messages``; None when iteration is over: stopped, or
        idle for ``idle_timeout`` seconds. With ``one_by_one`` an empty result if another thread or task has taken some,
        which are shared."""
        consumption, fetcher = self._consumption, self._consumption.fetcher
        deadline = None if idle_timeout is None else time.monotonic() + idle_timeout

        def is_shared() -> bool:
            return one_by_one and self._rows is not None

        def is_ready() -> bool:
            return fetcher.has_something() or consumption.stopped or is_shared()

        if not consumption.stopped:
            fetcher.start(max_messages, one_by_one)
        while not consumption.stopped:
            if (rows := await self._take(max_messages)) is not None:
                if consumption.stopped and consumption.qos != 0:  # with qos 0 they are acknowledged already
                    consumption.give_back(rows.number, rows.batch)
                    return None
                return rows
            left = None if deadline is None else deadline - time.monotonic()
            if not await consumption.arrival.wait(is_ready, left):
                return None
            if is_shared():
                return LeasedRows(0, NO_ROWS, consumption)
        return None

    async def _take(self, max_messages: int) -> LeasedRows | None:
        """Return up to ``max_messages`` that have arrived and may be handed out; None if there are none.

        Does not wait for messages. With qos 0 it acknowledges them first; with qos 2 it looks them up in the
        consumer's database and leaves out repeats. Raises the error of a failed receive or acknowledgement.
        """
        taken = self._consumption.fetcher.take()
        if taken is None:
            return None
        number, batch = taken
        if batch.num_rows > max_messages:
            self._consumption.fetcher.put_back(number, batch.slice(max_messages))
            batch = batch.slice(0, max_messages)
        return await self._screen(LeasedRows(number, batch, self._consumption))

    async def _screen(self, rows: LeasedRows) -> LeasedRows | None:
        """Return those of the received messages that may be handed out, None if there are none: with qos 0 acknowledged
        first, with qos 2 without those that were seen."""
        consumption, rows = self._consumption, rows.drop_withdrawn()
        if not rows.count:
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
                rows = rows.without(seen)
        return rows if rows.count else None

    def _seen(self, rows: LeasedRows) -> Any:
        """Return a mask of the messages whose effect the consumer's own database has already (qos=2): calls ``seen=``
        for each."""
        seen = self._consumption.seen
        assert seen is not None
        return np.array([seen(self._message(rows, row)) for row in range(rows.count)], np.bool_)


class ConsumerCalls(ConsumerBase[MessageT, BatchT]):
    """The calls of a consumer that wait."""

    async def messages(self, *, idle_timeout: float | None = None) -> AsyncIterator[MessageT]:
        """Yield messages one by one, until :meth:`stop`, or until none came for ``idle_timeout`` seconds."""
        runner = self._consumption.iterations.begin()
        try:
            while (message := await self._next_message(idle_timeout)) is not None:
                if not hooks.installed:
                    yield message
                    continue
                with hooks.around(hooks.Call("handle", message.topic, 1, (message,))):
                    yield message
        finally:
            await self._end_loop(runner)

    async def batches(
        self, max_messages: int = DEFAULT_BATCH, *, idle_timeout: float | None = None
    ) -> AsyncIterator[BatchT]:
        """Yield batches of up to ``max_messages``; ends as :meth:`messages`."""
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
            await self._end_loop(runner)

    async def receive(self, max_messages: int = 1, wait: float = 0.0) -> list[MessageT]:
        """Return up to ``max_messages``: those that have arrived, or else come within ``wait`` seconds; empty if none
        do. Iteration is faster."""
        consumption = self._consumption
        taken = await self._take(max_messages)
        if taken is None and wait > 0 and consumption.fetcher.is_receiving:  # what comes goes to the receives of a loop
            taken, wait = await self._next_rows(max_messages, wait), 0.0
            if taken is None and consumption.stopped:
                return []
        if taken is not None:
            return list(self._batch(taken))
        found: list[MessageT] = []
        for number, batch in await consumption.receive_once(max_messages, wait):
            if consumption.order is not None:
                consumption.order.add(number, batch)
            if (rows := await self._screen(LeasedRows(number, batch, consumption))) is not None:
                found.extend(self._batch(rows))
        return found

    async def flush(self, timeout: float | None = None) -> int:
        """Wait until all acknowledgements are durable or refused. Returns how many were refused so far.

        Raises Unknown(TIMED_OUT) if that takes longer than ``timeout`` seconds.
        """
        consumption = self._consumption
        deadline = time.monotonic() + (consumption.timeout if timeout is None else timeout)
        for lane in consumption.lanes:
            if not await consumption.waiting.away(lane.drain, max(deadline - time.monotonic(), 0.0)):
                raise error(Code.TIMED_OUT, "acknowledgements are still on their way")
        return self.refused

    async def close(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, let the loops over this consumer end, send the pending acknowledgements, then disconnect.

        Loops of other threads or tasks may take ``grace`` seconds. Called within a loop over this consumer, or in a
        signal handler that interrupted one, it returns at once and the end of that loop disconnects; so a message that
        is being handled can be acknowledged. A second call does not wait. Unacknowledged messages are redelivered when
        their lease expires.
        """
        await self._close(grace)


class AsyncConsumer(ConsumerCalls[AsyncReceived, AsyncReceivedBatch], AsyncCloses):
    """The awaitable form of :class:`Consumer`: ``async for message in consumer``. Several tasks may iterate it."""

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
