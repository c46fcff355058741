"""The ways in which callers of a client wait: as threads, or as tasks of an event loop.

All producers, consumers, readers and buses are written once, as coroutines over :class:`Threads` and :class:`Loop`,
which have the same methods. On threads every awaitable blocks and is then done, so a coroutine ends in its first step
(:mod:`escrowmq.client.lanes.blocking`); on an event loop it suspends.

- ``lane`` makes a coalescing lane whose ``waiter`` a caller awaits;
- ``away`` runs a function that blocks, ``spawn`` one that may block on a full connection and has no result;
- ``gather`` and ``result`` wait for what is under way already;
- ``returned`` is what a user's function returned: on an event loop it may be a coroutine function;
- ``signal`` makes what wakes those who wait for a condition, ``lock`` a lock that is given in the order of the callers.

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
from escrowmq.client.lanes.request import Codec, Unawaited
from escrowmq.client.lanes.timer import CLOSE_SECONDS, Timer
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.wire import Exchange, ExchangeOptions, Link, LoopLink

P = ParamSpec("P")
T = TypeVar("T")


_NOTHING = object()
"""Where no result has come yet."""


class Waiter:
    """A blocked caller: the cheapest wake-up that Python has. Awaiting it blocks, at most a little more than
    ``timeout``.

    Of the callers that one answer frees, each wakes the next when it wakes itself. Were all of them woken at once, they
    would fall over each other for the interpreter: twice the context switches, and half as much processor time again.
    Only who is blocked already is given a next one to wake (``blocks``). The main thread never is: a signal may take it
    out of its wait.
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
            # The lane gives up after ``timeout``; the rest guards against a lane that was cut off in the middle of
            # that.
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
    """A lane whose callers are threads: each waiter is a :class:`Waiter` (or :class:`Unawaited`, or None)."""

    def __init__(self, *args: Any, timeout: float, **more: Any) -> None:
        super().__init__(*args, waiter=partial(Waiter, timeout, threading.main_thread().ident), timeout=timeout, **more)

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        first: Waiter | None = None
        for waiter, value in zip(reversed(waiters), reversed(results), strict=True):  # who came first is woken first
            if type(waiter) is not Waiter:
                if waiter is not None:
                    waiter.give(value)
                continue
            waiter.value = value
            if waiter.blocks:
                waiter.next, first = first, waiter
            else:
                waiter.lock.release()
        if first is not None:
            first.lock.release()


class ThreadSignal:
    """Wakes threads that wait for a condition to become true."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def set(self) -> None:
        """Have all who wait look again."""
        with self._condition:
            self._condition.notify_all()

    async def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Block until ``ready()``; False if it is not within ``timeout`` seconds."""
        with self._condition:
            return self._condition.wait_for(ready, timeout)


class Threads:
    """How threads wait: everything is done on the caller's own thread."""

    loop = None

    def __init__(self) -> None:
        self.timer = Timer()

    def lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], **more: Any
    ) -> ThreadLane:
        """Return a lane whose callers block."""
        return ThreadLane(link, kind, codec, options, self.timer, **more)

    def signal(self) -> ThreadSignal:
        """Return a new signal."""
        return ThreadSignal()

    def lock(self) -> AbstractAsyncContextManager[None]:
        """None is needed: what it would guard is thread-safe."""
        return nullcontext()

    def spawn(self, link: Link, call: Callable[[], None]) -> None:
        """Call what sends to this link."""
        call()

    async def away(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        """Call it."""
        return act(*args, **given)

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)

    async def gather(self, waits: Sequence[Awaitable[T]]) -> list[T]:
        """Return the results, one after the other."""
        return [await wait for wait in waits]

    async def result(self, future: Future[T], timeout: float) -> T:
        """Block until it is done. Raises Unknown(TIMED_OUT), and cancels it, when the time is over."""
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise Unknown(Code.TIMED_OUT) from None

    async def returned(self, value: Any) -> Any:
        """Return the value itself: there is nothing to await here."""
        return value

    def close(self) -> None:
        """End the timer's thread."""
        self.timer.close()


class Sender:
    """A thread that sends for the lanes of an event loop, so that a full connection never blocks the loop."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="escrowmq-sender", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Call ``call`` on the thread, after what was put before."""
        self._work.put(call)

    def close(self) -> None:
        """End the thread after what was put before."""
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()


class LoopLane(Lane):
    """A lane whose callers are tasks: each waiter is an asyncio future (or :class:`Unawaited`, or None), with at most
    one wake-up of the loop per request. ``sender`` sends; None: the loop itself, because the link never blocks."""

    def __init__(
        self, *args: Any, loop: asyncio.AbstractEventLoop, loop_thread: int, sender: Sender | None, **options: Any
    ) -> None:
        super().__init__(*args, waiter=partial(asyncio.Future, loop=loop), **options)
        self._loop, self._loop_thread = loop, loop_thread
        self._send: Callable[[], None] = self._pump if sender is None else partial(sender.put, self._pump)

    def _start_pump(self) -> None:
        # After the callbacks that the loop has ready, and after the tasks that an answer just woke: those that are
        # about to add a row ride along.
        try:
            if threading.get_ident() == self._loop_thread:
                self._loop.call_soon(self._send)
            else:
                self._loop.call_soon_threadsafe(self._loop.call_soon, self._send)
        except RuntimeError:  # the loop is closed: no task waits any more
            self._send()

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        if threading.get_ident() == self._loop_thread and not self._loop.is_closed():
            _resolve(waiters, results)
            return
        try:
            self._loop.call_soon_threadsafe(_resolve, waiters, results)
        except RuntimeError:
            pass  # the loop is closed: no task waits any more


def _resolve(waiters: list[asyncio.Future[Any] | Unawaited | None], results: list[Any]) -> None:
    for future, value in zip(waiters, results, strict=True):
        if future is None:
            continue
        if isinstance(future, Unawaited):
            future.give(value)
        elif not future.done():
            if isinstance(value, EscrowError):
                future.set_exception(value)
            else:
                future.set_result(value)


class LoopSignal:
    """Wakes tasks that wait for a condition to become true."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        """Have all who wait look again. From any thread."""
        with suppress(RuntimeError):  # the loop is closed: no task waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``ready()``; False if it is not within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not ready():
                    self._event.clear()
                    await self._event.wait()
        except TimeoutError:
            return ready()
        return True


class Loop:
    """How tasks wait: for the running event loop, to which all that it makes belongs."""

    def __init__(self, links: Iterable[Link]) -> None:
        self.loop = asyncio.get_running_loop()
        self.timer = Timer()
        self._loop_thread = threading.get_ident()
        self._senders: dict[Link, Sender | None] = {}
        for link in links:
            if isinstance(link, LoopLink):
                link.attach(self.loop)
                self._senders[link] = None
            else:
                self._senders[link] = Sender()

    def lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], **more: Any
    ) -> LoopLane:
        """Return a lane whose callers are tasks."""
        own: dict[str, Any] = {"loop": self.loop, "loop_thread": self._loop_thread, "sender": self._senders[link]}
        return LoopLane(link, kind, codec, options, self.timer, **own, **more)

    def signal(self) -> LoopSignal:
        """Return a new signal."""
        return LoopSignal(self.loop)

    def lock(self) -> asyncio.Lock:
        """Return a lock between tasks."""
        return asyncio.Lock()

    def spawn(self, link: Link, call: Callable[[], None]) -> None:
        """Call what sends to this link: where it may block, on a sending thread."""
        sender = self._senders[link]
        if sender is None:
            call()
        else:
            sender.put(call)

    async def away(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        """Call it on a thread."""
        return await asyncio.to_thread(act, *args, **given)

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        await asyncio.sleep(seconds)

    async def gather(self, waits: Sequence[Awaitable[T]]) -> list[T]:
        """Return the results of all; raises the first error."""
        return await asyncio.gather(*waits)

    async def result(self, future: Future[T], timeout: float) -> T:
        """Wait until it is done. Raises Unknown(TIMED_OUT), and cancels it, when the time is over."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError:
            raise Unknown(Code.TIMED_OUT) from None

    async def returned(self, value: Any) -> Any:
        """Return the value, or what it gives when it is awaited."""
        return await value if inspect.isawaitable(value) else value

    def close(self) -> None:
        """End the threads of the timer and the senders, after what they have begun."""
        self.timer.close()
        for sender in self._senders.values():
            if sender is not None:
                sender.close()


Waiting = Threads | Loop
