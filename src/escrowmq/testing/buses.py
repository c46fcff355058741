"""A bus to a broker in memory: the real engine and log, with a clock that a test moves.

Every call is answered, and every receive that it serves, before it returns. :meth:`MemoryBroker.advance` moves time
from one due event to the next, so check-backs, delays, retries and expired leases happen in their order, before it
returns. Waits of a caller (``receive(wait=...)``, ``idle_timeout``) are in real seconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakSet

import pyarrow as pa

from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import EmbeddedLink, open_engine
from escrowmq.broker.failures import answer
from escrowmq.client.aio import AsyncBus, BusBase
from escrowmq.client.bus import Bus
from escrowmq.client.lanes.timer import Timer
from escrowmq.client.producing.producer import ProducerBase
from escrowmq.client.reading.reader import ReadMessage
from escrowmq.errors import Code, EscrowError, Rejected, Unknown, error
from escrowmq.platform.clock import now_us
from escrowmq.platform.times import to_us
from escrowmq.schemas import DELIVERY, empty
from escrowmq.settings import BrokerSettings
from escrowmq.testing.clock import SimulatedClock
from escrowmq.testing.disks import MemoryDisk
from escrowmq.wire import ACK_VIEW_NAME, Exchange, ExchangeOptions, Json, Parcel
from escrowmq.wire.actions.topics import WAIT
from escrowmq.wire.parcels import Answer, Done, batch_of

PATIENCE = 60.0
"""Real seconds that :meth:`MemoryBroker.advance` waits for a checker to answer."""
_SEGMENT_BYTES = 1 << 20
_STEP = 0.05  # poll interval (real seconds) of a wait whose end may not be reported
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Observer(Protocol):
    """The process whose calls a link carries; see :mod:`escrowmq.testing.crashing`."""

    def before_call(self, kind: Exchange, batch: pa.RecordBatch, options: Mapping[str, Any]) -> None:
        """Note an exchange or parcel that is about to take effect. An EscrowError becomes its answer."""

    def before_action(self, name: str) -> None:
        """Note an action that is about to run."""


class _Held:
    """A receive that waits for messages."""

    def __init__(self, options: ExchangeOptions) -> None:
        self.options: Any = {**options, "wait_ms": 0}
        self.line = self.options["group"], self.options["member"]
        self.answer: Future[pa.RecordBatch] = Future()
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Return whether the caller is to set the answer: it is the first, and the receive is not cancelled."""
        return self._claim.acquire(blocking=False) and self.answer.set_running_or_notify_cancel()


class MemoryBroker:
    """A broker in memory for any number of buses of this process. Thread-safe."""

    def __init__(self, **settings: Any) -> None:
        self.time = SimulatedClock(now_us())
        chosen = BrokerSettings.of({"segment_bytes": _SEGMENT_BYTES, **settings})
        self.engine = open_engine(Path("memory"), chosen, lambda _: MemoryDisk(), self.time)
        self.engine.start()
        self.calls = Calls(self.engine)
        self.buses: WeakSet[BusBase[Any, Any, Any]] = WeakSet()
        self._timer = Timer("escrowmq-memory-bus")
        self._changed = threading.Condition()
        self._changes = 0
        self._serving = False
        self._held: list[_Held] = []
        self._moving = threading.Lock()

    def close(self) -> None:
        """Stop the engine. The buses are closed before."""
        self._timer.close()
        self.calls.give_back()
        self.engine.stop()
        self.calls.close()

    # Receives

    def hold(self, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Answer a receive now, or when there are messages, or empty after its ``wait_ms`` in real time. The receives
        of a member are answered in their order (I20)."""
        held, wait_ms = _Held(options), int(options.get("wait_ms", 0))  # type: ignore[call-overload]
        if wait_ms <= 0:
            if not self._try(held):
                self._give_up(held)
        elif any(other.line == held.line for other in self._held.copy()) or not self._try(held):
            self._held.append(held)
            self._timer.after(wait_ms / 1000, partial(self._give_up, held))
            self.serve()  # something may have come meanwhile
        return held.answer

    def _try(self, held: _Held) -> bool:
        """Answer a receive if there are messages for it, or an error. Returns whether it is done."""
        if held.answer.done():
            return True
        received = self.calls.exchange(Exchange.RECEIVE, None, held.options)
        problem = received.exception()
        if problem is None and not received.result().num_rows:
            return False
        if not held.claim():
            if problem is None:
                self.calls.give_back_unseen(held.options["group"], received.result())
        elif problem is None:
            held.answer.set_result(received.result())
        else:
            held.answer.set_exception(problem)
        return True

    def _give_up(self, held: _Held) -> None:
        with suppress(ValueError):  # it was answered
            self._held.remove(held)
        if held.claim():
            held.answer.set_result(empty(DELIVERY))

    def serve(self) -> None:
        """Give waiting receives what a call or the clock has made available. One thread at a time serves; it sees what
        others change meanwhile."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
            if self._serving:
                return
            self._serving = True
        while True:
            seen = self._changes
            try:
                empty_lines = set()
                for held in self._held.copy():
                    if held.line in empty_lines:
                        continue
                    if not self._try(held):
                        empty_lines.add(held.line)
                        continue
                    with suppress(ValueError):  # it was given up
                        self._held.remove(held)
            except BaseException:
                self._serving = False
                raise
            with self._changed:
                if seen == self._changes:
                    self._serving = False
                    return

    def wait_for_messages(self, look: Callable[[int], Json], wait_ms: int) -> Json:
        """Repeat ``look(0)`` after each change until it finds queues, at most ``wait_ms`` milliseconds of real time."""
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            seen = self._changes
            found = look(0)
            if found["queues"] or (left := deadline - time.monotonic()) <= 0:
                return found
            with self._changed:
                self._changed.wait_for(lambda: seen != self._changes, left)  # noqa: B023

    # Time

    def advance(self, seconds: float) -> None:
        """Move broker time by ``seconds``, from one due event to the next. Returns when all that is due has happened,
        answers of checkers included.

        Raises Unknown(TIMED_OUT) if a checker does not answer within :data:`PATIENCE` real seconds.
        """
        target_us = self.time.now_us() + to_us(seconds)
        if seconds < 0:
            raise ValueError("broker time never steps back")
        with self._moving:
            while True:
                self._await_listeners()
                self._settle()
                step_us = min(max(self._due_us(), self.time.now_us()), target_us) - self.time.now_us()
                if step_us <= 0 and self.time.now_us() >= target_us:
                    return
                self.time.advance(us=max(step_us, 1))
                self.engine.poke()

    def _due_us(self) -> int:
        """Return the next time at which something is due, upkeep aside."""
        return min(self.engine.shard.ledger.wake_us, self.engine.listeners.wake_us)

    def _await_listeners(self) -> None:
        """Wait until every producer with a checker listens: one that was just made has not connected yet."""
        for bus in list(self.buses):
            for part in list(bus._parts):
                if isinstance(part, ProducerBase):
                    production = part._production
                    with suppress(EscrowError):  # fenced: another one answers
                        while production.answers_checks and not production.listening(_STEP):
                            pass

    def _settle(self) -> None:
        """Let everything happen that is due now."""
        deadline = time.monotonic() + PATIENCE
        while True:
            seen = self._changes
            self.engine.look(lambda: None).result()
            unanswered = self.engine.listeners.unanswered
            if not unanswered and self._due_us() > self.time.now_us():
                self.serve()
                return
            if time.monotonic() > deadline:
                text = f"after {PATIENCE:g} s something is still due, and {unanswered} checks are unanswered"
                raise Unknown(Code.TIMED_OUT, text, "does a checker wait for this test?")
            if unanswered:
                with self._changed:
                    self._changed.wait_for(lambda: seen != self._changes, _STEP)  # noqa: B023


class MemoryLink(EmbeddedLink):
    """One bus's link to a :class:`MemoryBroker`. Each call is answered before it returns."""

    def __init__(self, broker: MemoryBroker, observer: Observer | None = None) -> None:
        super().__init__(Path("memory"), broker.calls, broker.serve)
        self.address = "memory:"
        self._broker = broker
        self._observer = observer

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        if self._observer is not None:
            try:
                self._observer.before_call(kind, batch, options)
            except EscrowError as problem:
                return answer(Future(), problem)
        if self._closed:
            return answer(Future(), error(Code.CLOSED, self._closed))
        if kind == Exchange.RECEIVE:
            received = self._broker.hold(options)
            with self._lock:
                self._receives.add(received)
            return received
        future = super().exchange(kind, batch, options)
        future.exception()  # waits
        self._broker.serve()
        return future

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """See :meth:`escrowmq.wire.Link.parcel`."""
        if self._observer is not None:
            try:
                self._observer.before_call(parcel.kind, batch_of(parcel), parcel.options)
            except EscrowError as problem:
                done(problem)
                return
        answers: SimpleQueue[Answer | EscrowError] = SimpleQueue()
        super().parcel(parcel, answers.put)
        result = answers.get()
        self._broker.serve()
        done(result)

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """See :meth:`escrowmq.wire.Link.action`."""
        if self._observer is not None:
            self._observer.before_action(name)
        self._check_open()
        if name == WAIT.name:
            look: Callable[[int], Json] = lambda wait_ms: super(MemoryLink, self).action(  # noqa: E731
                name, {**request, "wait_ms": wait_ms}, timeout
            )
            return self._broker.wait_for_messages(look, int(request.get("wait_ms", 0)))  # type: ignore[call-overload]
        result = super().action(name, request, timeout)
        self._broker.serve()
        return result


class MemoryLoopLink(MemoryLink):
    """The same for an event loop, which calls it directly: no call waits for another process."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: calls are answered before they return."""


class Clock:
    """The broker time of a memory bus: it stands still until :meth:`advance`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    def now(self) -> datetime:
        """Return the broker time, in UTC."""
        return _EPOCH + timedelta(microseconds=self._broker.time.now_us())

    def advance(self, seconds: float) -> None:
        """Move broker time by ``seconds``. When this returns, all check-backs, delays, retries and expired leases that
        are due have happened, in their order. Raises as :meth:`MemoryBroker.advance`."""
        self._broker.advance(seconds)


class AsyncClock:
    """As :class:`Clock`, to await."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self.now = Clock(broker).now

    async def advance(self, seconds: float) -> None:
        """See :meth:`Clock.advance`. Checkers of this event loop run meanwhile."""
        await asyncio.to_thread(self._broker.advance, seconds)


class MemoryBus(Bus):
    """A :class:`~escrowmq.Bus` to a broker in memory, made by :func:`memory_bus`; with its clock, and what became of
    the messages."""

    def __init__(self, broker: MemoryBroker, observer: Observer | None = None) -> None:
        super().__init__([MemoryLink(broker, observer)])
        self.clock = Clock(broker)
        broker.buses.add(self)

    def sent(self, topic: str) -> list[ReadMessage]:
        """Return all messages of a topic that consumers may see, in the order in which they were stored. Half messages
        of undecided transactions and delayed messages are not among them."""
        return _sent(self, topic)

    def acknowledged(self, group: str) -> list[ReadMessage]:
        """Return the messages that a consumer group has acknowledged, in that order."""
        return _acknowledged(self, group)

    def dead_letters(self, group: str) -> list[ReadMessage]:
        """Return the dead letters of a consumer group, oldest first. ``admin.dead_letters(group)`` has their causes."""
        return _read(self, f"%dead-letters.{group}")


class AsyncMemoryBus(AsyncBus):
    """An :class:`~escrowmq.AsyncBus` to a broker in memory, made by :func:`amemory_bus`."""

    def __init__(self, broker: MemoryBroker, observer: Observer | None = None) -> None:
        super().__init__([MemoryLoopLink(broker, observer)])
        self.clock = AsyncClock(broker)
        self._blocking = partial(MemoryBus, broker)
        broker.buses.add(self)

    async def sent(self, topic: str) -> list[ReadMessage]:
        """See :meth:`MemoryBus.sent`."""
        return await self._ask(_sent, topic)

    async def acknowledged(self, group: str) -> list[ReadMessage]:
        """See :meth:`MemoryBus.acknowledged`."""
        return await self._ask(_acknowledged, group)

    async def dead_letters(self, group: str) -> list[ReadMessage]:
        """See :meth:`MemoryBus.dead_letters`."""
        return await self._ask(_read, f"%dead-letters.{group}")

    async def _ask(self, question: Callable[[Bus, str], list[ReadMessage]], name: str) -> list[ReadMessage]:
        def ask() -> list[ReadMessage]:
            with self._blocking() as bus:
                return question(bus, name)

        return await asyncio.to_thread(ask)


@contextmanager
def memory_bus(**settings: Any) -> Iterator[MemoryBus]:
    """Context manager: a bus to a broker in memory that lives as long as the block. ``settings`` as for
    :func:`escrowmq.connect` (``lease_seconds=5``, ...)."""
    broker = MemoryBroker(**settings)
    try:
        with MemoryBus(broker) as bus:
            yield bus
    finally:
        broker.close()


@asynccontextmanager
async def amemory_bus(**settings: Any) -> AsyncIterator[AsyncMemoryBus]:
    """Async context manager: as :func:`memory_bus`, for asyncio. ``await bus.clock.advance(60)``."""
    broker = MemoryBroker(**settings)
    try:
        async with AsyncMemoryBus(broker) as bus:
            yield bus
    finally:
        await asyncio.to_thread(broker.close)


def _read(bus: Bus, source: str, of_group: str | None = None) -> list[ReadMessage]:
    try:
        with bus.reader(source, of_group=of_group) as reader:
            return [message for batch in reader.batches(idle_timeout=0) for message in batch]
    except Rejected as problem:
        if problem.code in (Code.UNKNOWN_TOPIC, Code.UNKNOWN_GROUP):
            return []
        raise


def _sent(bus: Bus, topic: str) -> list[ReadMessage]:
    return sorted(_read(bus, topic), key=lambda message: message.position)


def _acknowledged(bus: Bus, group: str) -> list[ReadMessage]:
    runs: Sequence[dict[str, str]] = [row.properties for row in _read(bus, ACK_VIEW_NAME, group)]
    topics = {run["topic"]: _read(bus, run["topic"]) for run in runs}
    places = {(m.topic, m.queue, m.offset): m for messages in topics.values() for m in messages}
    found = []
    for run in runs:
        start = int(run["start"])
        offsets = range(start, start + int(run["count"]))
        found += [places[place] for at in offsets if (place := (run["topic"], int(run["queue"]), at)) in places]
    return found
