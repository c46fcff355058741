"""Runs the handlers of an app: plain functions on threads with a blocking bus, coroutine functions as tasks of an event
loop with an asynchronous one. Of the two buses one is the user's; the other is made over the same connections."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.client.lanes.blocking import finished
from escrowmq.errors import Code, Misuse
from escrowmq.handlers.handler import Handler
from escrowmq.handlers.working import Report, Work

SILENT_SECONDS = 30.0
"""Time (s) without an answer to a receive after which waiting handlers are unhealthy: six times that of a receive."""

OnEnd = Callable[[BaseException], None]


async def make_work(handler: Handler, bus: Any, report: Report | None, on_end: OnEnd, is_loop: bool) -> Work:
    """Subscribe a handler, with one consumer, or one for each worker if it is ordered. Raises as ``bus.consumer``."""
    choices = handler.choices
    options = {"tags": choices.tags, "ordered": choices.ordered, **choices.consumer}
    consumers: list[Any] = []
    try:
        for _ in range(choices.concurrency if choices.ordered else 1):
            made = bus.consumer(choices.group, list(choices.topics), **options)
            consumers.append(await made if is_loop else made)
    except BaseException:
        for consumer in consumers:
            await consumer._close(0.0)
        raise
    return Work(handler, consumers, report, on_end)


class OnThreads:
    """The workers of plain functions. Blocks."""

    def __init__(self, bus: Bus, report: Report | None, on_end: OnEnd) -> None:
        self._bus, self._report, self._on_end = bus, report, on_end
        self.works: list[Work] = []

    def start(self, handlers: Sequence[Handler]) -> None:
        """Start a thread for each worker."""
        for handler in handlers:
            self.works.append(finished(make_work(handler, self._bus, self._report, self._on_end, False)))
        for work in self.works:
            for worker in work.workers:
                run = lambda work=work, worker=worker: finished(work.run(worker))  # noqa: E731
                threading.Thread(target=run, name=f"escrowmq-{work.handler.name}", daemon=True).start()

    def stop(self) -> None:
        """Receive nothing more."""
        for work in self.works:
            work.stop()

    def close(self, grace: float) -> None:
        """Stop, and wait at most ``grace`` seconds for the handlers that run. A thread that needs longer cannot be
        interrupted: its messages come again after their lease."""
        self.stop()
        deadline = time.monotonic() + grace
        for work in self.works:
            for consumer in work.consumers:
                consumer.close(max(deadline - time.monotonic(), 0.0))
            work.close()


class OnLoop:
    """The workers of coroutine functions, on the running event loop."""

    def __init__(self, bus: AsyncBus, report: Report | None, on_end: OnEnd) -> None:
        self._bus, self._report, self._on_end = bus, report, on_end
        self.works: list[Work] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, handlers: Sequence[Handler]) -> None:
        """Start a task for each worker."""
        for handler in handlers:
            self.works.append(await make_work(handler, self._bus, self._report, self._on_end, True))
        for work in self.works:
            for worker in work.workers:
                self._tasks.append(asyncio.create_task(work.run(worker), name=f"escrowmq-{work.handler.name}"))

    def stop(self) -> None:
        """Receive nothing more; from any thread."""
        for work in self.works:
            work.stop()

    async def close(self, grace: float) -> None:
        """Stop, and cancel the handlers that still run after ``grace`` seconds; their messages are retried."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for work in self.works:
            for consumer in work.consumers:
                await consumer._close()
            work.close()


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="escrowmq-handlers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine there and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the loop and its tasks."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.close()


class Running:
    """The running handlers of an app, made by :meth:`App.running`: ``with`` over a Bus, ``async with`` over an
    AsyncBus. Leaving the block stops them: handlers that run may end within ``grace`` seconds."""

    def __init__(self, handlers: Sequence[Handler], bus: Bus | AsyncBus, grace: float, report: Report | None) -> None:
        self._bus, self._grace, self._report = bus, grace, report
        self._plain = [handler for handler in handlers if not handler.awaits]
        self._awaiting = [handler for handler in handlers if handler.awaits]
        self._ended = threading.Event()
        self._problem: BaseException | None = None
        self._is_stopping = False
        self._threads: OnThreads | None = None
        self._loop: OnLoop | None = None
        self._stack = ExitStack()  # of the blocking form

    # Blocking

    def __enter__(self) -> Running:
        if not isinstance(self._bus, Bus):
            raise Misuse(Code.BAD_ARGUMENT, "the bus of aconnect() is to be awaited", "async with app.running(bus)")
        with ExitStack() as stack:
            if self._awaiting:
                thread = LoopThread()
                stack.callback(thread.close)
                stack.callback(lambda: thread.run(self._end_loop(own=True)))
                thread.run(self._start_loop(own=True))
            if self._plain:
                stack.callback(lambda: self._end_threads(own=False))
                self._start_threads(self._bus)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._stack.close()

    # To await

    async def __aenter__(self) -> Running:
        if not isinstance(self._bus, AsyncBus):
            raise Misuse(Code.BAD_ARGUMENT, "the bus of connect() blocks", "with app.running(bus), or use aconnect()")
        try:
            await self._start_loop(own=False)
            if self._plain:
                await asyncio.to_thread(self._start_threads, None)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        ends = [self._end_loop(own=False), asyncio.to_thread(self._end_threads, own=True)]
        await asyncio.gather(*ends)

    # Both

    def stop(self) -> None:
        """Receive nothing more, and wake :meth:`wait`. Never waits; from any thread or signal handler."""
        self._is_stopping = True
        for part in (self._threads, self._loop):
            if part is not None:
                part.stop()
        self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until :meth:`stop` or the end of a worker, at most ``timeout`` seconds; return whether that happened.

        Raises the error that ended a worker: Fenced, or CLOSED if the bus was closed.
        """
        happened = self._ended.wait(timeout)
        if self._problem is not None:
            raise self._problem
        return happened

    def health(self) -> dict[str, str]:
        """Return ``status``, ``"ok"`` or ``"stopped"``, and a ``reason``.

        It is stopped if a worker ended, or if one waits for messages and no broker has answered for
        ``SILENT_SECONDS``: then nothing is received, however alive the process is.
        """
        if self._problem is not None:
            return {"status": "stopped", "reason": str(self._problem)}
        works = [work for part in (self._threads, self._loop) if part is not None for work in part.works]
        for work in works if not self._is_stopping else ():
            silent = time.monotonic() - max(each._consumption.fetcher.answered for each in work.consumers)
            if work.is_idle and silent > SILENT_SECONDS:
                reason = f"{work.handler.name}: no broker has answered for {silent:.0f} s"
                return {"status": "stopped", "reason": reason}
        return {"status": "ok"}

    def _on_end(self, problem: BaseException) -> None:
        if not self._is_stopping:
            self._problem = problem
            self._ended.set()

    def _start_threads(self, bus: Bus | None) -> None:
        self._threads_bus = bus or Bus(self._bus.router.links, owns_links=False)
        self._threads = OnThreads(self._threads_bus, self._report, self._on_end)
        self._threads.start(self._plain)

    def _end_threads(self, *, own: bool) -> None:
        if self._threads is not None:
            self._threads.close(self._grace)
            if own:
                self._threads_bus.close()

    async def _start_loop(self, *, own: bool) -> None:
        self._loop_bus = AsyncBus(self._bus.router.links, owns_links=False) if own else self._bus
        self._loop = OnLoop(self._loop_bus, self._report, self._on_end)  # type: ignore[arg-type]
        await self._loop.start(self._awaiting)

    async def _end_loop(self, *, own: bool) -> None:
        if self._loop is not None:
            await self._loop.close(self._grace)
            if own:
                await self._loop_bus.close()  # type: ignore[misc]
