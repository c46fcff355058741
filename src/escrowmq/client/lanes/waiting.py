"""How callers of a client wait: as threads, or as tasks of an event loop.

All producers, consumers, readers and buses are written once, as coroutines over :class:`Threads` and :class:`Loop`,
which have the same methods. On threads every awaitable blocks and is then done, so a coroutine ends in its first step
(:mod:`escrowmq.client.lanes.blocking`); on an event loop it suspends.

- ``lane`` makes a coalescing lane whose ``waiter`` a caller awaits;
- ``away`` runs a function that blocks, ``spawn`` one that may block on a full connection and has no result;
- ``gather`` returns the results of what is under way already, or raises the first error; so does ``result`` of a
  future, with Unknown(TIMED_OUT), after which the future is cancelled;
- ``returned`` is the result of a user's function: on an event loop it may be a coroutine function;
- ``signal`` wakes all waiters of a condition, from any thread; ``lock`` is granted in the order of the callers.

Nothing blocks the loop, and an answer wakes it once for all of its rows. A link that never blocks
(:class:`escrowmq.wire.LoopLink`) is used on the loop itself, any other by a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec, Options
from escrowmq.client.lanes.timer import CLOSE_SECONDS, Timer
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.wire import Exchange, Link, LoopLink

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING = object()
"""The value of a waiter that has no result yet."""


class Waiter:
    """A blocked caller: the cheapest wake-up that Python has. Awaiting it blocks, at most a little more than
    ``timeout``.

    Of the callers that one answer wakes, each wakes the next. Woken all at once they would compete for the
    interpreter: twice the context switches, and half as much processor time again. Only a caller that is blocked
    already gets a next one to wake (``blocks``), and never the main thread, whose wait a signal may interrupt.
    """

    __slots__ = ("blocks", "lock", "main", "next", "timeout", "value")

    def __init__(self, timeout: float, main: int | None = None) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.timeout = timeout
        self.main = main  # the main thread
        self.value: Any = _NOTHING
        self.blocks = False
        self.next: Waiter | None = None

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()  # makes it a generator; it never suspends
        try:
            self.blocks = threading.get_ident() != self.main
            # The lane gives up after ``timeout``; this is longer, in case the lane itself is interrupted then.
            self.lock.acquire(timeout=1.2 * self.timeout + 2.0)
        finally:
            self.blocks = False
            if self.next is not None:
                self.next.lock.release()
        value = self.value
        if value is _NOTHING:
            raise Unknown(Code.TIMED_OUT)
        if isinstance(value, EscrowError):
            raise value
        return value


class ThreadLane(Lane):
    """A lane whose callers are threads: each waiter is a :class:`Waiter`, a callback, or None."""

    def __init__(self, *args: Any, timeout: float, **more: Any) -> None:
        super().__init__(*args, waiter=partial(Waiter, timeout, threading.main_thread().ident), timeout=timeout, **more)

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        first: Waiter | None = None
        for waiter, value in zip(reversed(waiters), reversed(results), strict=True):  # the first is woken first
            if type(waiter) is not Waiter:
                if waiter is not None:
                    waiter(value)
                continue
            waiter.value = value
            if waiter.blocks:
                waiter.next, first = first, waiter
            else:
                waiter.lock.release()
        if first is not None:
            first.lock.release()


class ThreadSignal:
    """Wakes threads that wait until ``ready()``, at most ``timeout`` seconds."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def set(self) -> None:
        with self._condition:
            self._condition.notify_all()

    async def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(ready, timeout)


class Threads:
    """How threads wait: everything is done on the caller's own thread."""

    loop = None

    def __init__(self) -> None:
        self.timer = Timer()

    def lane(self, link: Link, kind: Exchange, codec: Codec, options: Options, **more: Any) -> ThreadLane:
        return ThreadLane(link, kind, codec, options, self.timer, **more)

    def signal(self) -> ThreadSignal:
        return ThreadSignal()

    def lock(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()  # what it would guard is thread-safe

    def spawn(self, link: Link, call: Callable[[], object]) -> None:
        call()

    async def away(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        return act(*args, **given)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def gather(self, waits: Sequence[Awaitable[T]]) -> list[T]:
        return [await wait for wait in waits]

    async def result(self, future: Future[T], timeout: float) -> T:
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise Unknown(Code.TIMED_OUT) from None

    async def returned(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        self.timer.close()


class Sender:
    """A thread that sends for the lanes of an event loop, so that a full connection never blocks the loop."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="escrowmq-sender", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._work.put(call)

    def close(self) -> None:
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()


class LoopLane(Lane):
    """A lane whose callers are tasks: each waiter is an asyncio future, a callback, or None. The loop is woken at most
    once per request. ``sender`` sends; None: the loop itself, because the link never blocks."""

    def __init__(
        self, *args: Any, loop: asyncio.AbstractEventLoop, loop_thread: int, sender: Sender | None, **options: Any
    ) -> None:
        super().__init__(*args, waiter=partial(asyncio.Future, loop=loop), **options)
        self._loop, self._loop_thread = loop, loop_thread
        self._send: Callable[[], None] = self._pump if sender is None else partial(sender.put, self._pump)

    def _start_pump(self) -> None:
        # Behind the tasks that are ready or that an answer just woke: the rows that they add are sent together.
        try:
            if threading.get_ident() == self._loop_thread:
                self._loop.call_soon(self._send)
            else:
                self._loop.call_soon_threadsafe(self._loop.call_soon, self._send)
        except RuntimeError:  # the loop is closed
            self._send()

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        if threading.get_ident() == self._loop_thread and not self._loop.is_closed():
            _resolve(waiters, results)
        else:
            with suppress(RuntimeError):  # the loop is closed: no task waits
                self._loop.call_soon_threadsafe(_resolve, waiters, results)


def _resolve(waiters: list[Any], results: list[Any]) -> None:
    for waiter, value in zip(waiters, results, strict=True):
        if not isinstance(waiter, asyncio.Future):
            if waiter is not None:
                waiter(value)
        elif not waiter.done():
            if isinstance(value, EscrowError):
                waiter.set_exception(value)
            else:
                waiter.set_result(value)


class LoopSignal:
    """Wakes tasks that wait until ``ready()``, at most ``timeout`` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while not ready():
                    self._event.clear()
                    await self._event.wait()
        except TimeoutError:
            return ready()
        return True


class Loop:
    """How tasks wait: on the running event loop, to which everything that it makes belongs."""

    def __init__(self, links: Iterable[Link]) -> None:
        self.loop = asyncio.get_running_loop()
        self.timer = Timer()
        self._loop_thread = threading.get_ident()
        self._senders: dict[Link, Sender | None] = {}
        for link in links:
            self._senders[link] = None if isinstance(link, LoopLink) else Sender()
            if isinstance(link, LoopLink):
                link.attach(self.loop)

    def lane(self, link: Link, kind: Exchange, codec: Codec, options: Options, **more: Any) -> LoopLane:
        more |= {"loop": self.loop, "loop_thread": self._loop_thread, "sender": self._senders[link]}
        return LoopLane(link, kind, codec, options, self.timer, **more)

    def signal(self) -> LoopSignal:
        return LoopSignal(self.loop)

    def lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    def spawn(self, link: Link, call: Callable[[], object]) -> None:
        sender = self._senders[link]
        if sender is None:
            call()
        else:
            sender.put(call)

    async def away(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        return await asyncio.to_thread(act, *args, **given)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def gather(self, waits: Sequence[Awaitable[T]]) -> list[T]:
        return await asyncio.gather(*waits)

    async def result(self, future: Future[T], timeout: float) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError:
            raise Unknown(Code.TIMED_OUT) from None

    async def returned(self, value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    def close(self) -> None:
        self.timer.close()
        for sender in filter(None, self._senders.values()):
            sender.close()


Waiting = Threads | Loop
