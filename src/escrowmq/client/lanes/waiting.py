"""How the callers of a client wait: what :class:`~escrowmq.client.lanes.threads.Threads` and
:class:`~escrowmq.client.lanes.loop.Loop` do differently.

All producers, consumers, readers and buses are written once, as coroutines over this seam. On threads every awaitable blocks
and is then done, so a coroutine ends in its first step (:mod:`escrowmq.client.lanes.blocking`); on an event loop it suspends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.request import Codec
from escrowmq.client.lanes.timer import Timer
from escrowmq.wire import Exchange, ExchangeOptions, Link

P = ParamSpec("P")
T = TypeVar("T")


class Signal(Protocol):
    """Wakes those who wait for a condition to become true."""

    def set(self) -> None:
        """Have all who wait look again. From any thread."""
        ...

    async def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``ready()``; False if it is not within ``timeout`` seconds (None: for ever)."""
        ...


class Waiting(Protocol):
    """Makes what callers wait for."""

    timer: Timer

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop on which coroutine functions of the user run."""
        ...

    def lane(
        self, link: Link, kind: Exchange, codec: Codec, options: Callable[[], ExchangeOptions], **more: Any
    ) -> Lane:
        """A coalescing lane; ``more`` as for :class:`Lane`."""
        ...

    def signal(self) -> Signal:
        """A new signal."""
        ...

    def lock(self) -> AbstractAsyncContextManager[Any]:
        """A lock around something that is thread-safe by itself: callers get it in the order in which they came."""
        ...

    def spawn(self, call: Callable[[], None]) -> None:
        """Call what may block on a full connection; on an event loop not on its thread."""
        ...

    async def away(self, act: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
        """What a blocking function returns."""
        ...

    async def gather(self, waits: Sequence[Awaitable[T]]) -> list[T]:
        """The results of several that are under way already."""
        ...

    async def result(self, future: Future[T], timeout: float) -> T:
        """The result of a future; raises TimeoutError after ``timeout`` seconds."""
        ...

    async def returned(self, value: Any) -> Any:
        """What a user's function returned; on an event loop that of a coroutine function is awaited."""
        ...

    def close(self) -> None:
        """End the threads of all this."""
        ...
