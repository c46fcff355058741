"""Callers that are threads: they block until what they wait for is there."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar

from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec
from escrowmq.client.lanes.timer import Timer
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.wire import Exchange, ExchangeOptions, Link

P = ParamSpec("P")
T = TypeVar("T")


class Waiter:
    """A blocked caller: the cheapest wake-up that Python has. Awaiting it blocks, at most a little more than ``timeout``."""

    __slots__ = ("lock", "timeout", "value")

    def __init__(self, timeout: float) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.timeout = timeout
        self.value: Any = None

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()  # makes it a generator; it never suspends
        # The lane gives up after ``timeout``; the rest guards against a lane that was cut off in the middle of that.
        if not self.lock.acquire(timeout=1.2 * self.timeout + 2.0):
            raise Unknown(Code.TIMED_OUT)
        value = self.value
        if isinstance(value, EscrowError):
            raise value
        return value


class ThreadLane(Lane):
    """A lane whose callers are threads: each waiter is a :class:`Waiter` (or None)."""

    def __init__(self, *args: Any, timeout: float, **more: Any) -> None:
        super().__init__(*args, waiter=partial(Waiter, timeout), timeout=timeout, **more)

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        for waiter, value in zip(waiters, results, strict=True):
            if waiter is not None:
                waiter.value = value
                waiter.lock.release()


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
    """How threads wait (:mod:`escrowmq.client.lanes.loop`): everything is done on the caller's own thread."""

    loop = None

    def __init__(self) -> None:
        self.timer = Timer()

    def lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], **more: Any
    ) -> ThreadLane:
        """A lane whose callers block."""
        return ThreadLane(link, kind, codec, options, self.timer, **more)

    def signal(self) -> ThreadSignal:
        """A new signal."""
        return ThreadSignal()

    def lock(self) -> AbstractAsyncContextManager[None]:
        """None is needed: what it would guard is thread-safe."""
        return nullcontext()

    def spawn(self, call: Callable[[], None]) -> None:
        """Call it."""
        call()

    async def away(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        """Call it."""
        return act(*args, **given)

    async def gather(self, waits: Sequence[Awaitable[T]]) -> list[T]:
        """The results, one after the other."""
        return [await wait for wait in waits]

    async def result(self, future: Future[T], timeout: float) -> T:
        """Block until it is done."""
        return future.result(timeout)

    async def returned(self, value: Any) -> Any:
        """The value itself: there is nothing to await here."""
        return value

    def close(self) -> None:
        """End the timer's thread."""
        self.timer.close()
