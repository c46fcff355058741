"""Lanes for threads and for event loops: how their callers wait, and on which thread batches leave."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.parcel import Row
from escrowmq.errors import Code, EscrowError, Unknown


class Waiter:
    """A blocked caller: the cheapest wake-up that Python has."""

    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.value: Any = None

    def wait(self, timeout: float) -> Any:
        """The result; raises it if it is an error.

        The lane itself gives it up after ``timeout``; waiting a little longer here only guards against a lane that was
        cut off in the middle of that.
        """
        if not self.lock.acquire(timeout=1.2 * timeout + 2.0):
            raise Unknown(Code.TIMED_OUT)
        value = self.value
        if isinstance(value, EscrowError):
            raise value
        return value


class ThreadLane(Lane):
    """Callers are threads: each waiter is a :class:`Waiter` (or None)."""

    def call(self, row: Row, size: int) -> Any:
        """Add a row and wait for its result."""
        waiter = Waiter()
        self.add(row, waiter, size)
        return waiter.wait(self._timeout)

    def start_batch(self, batch: pa.RecordBatch) -> Callable[[], Any]:
        """Send a whole batch; call what is returned to wait for (its answer, whether it was sent again)."""
        waiter = Waiter()
        self.add_batch(batch, waiter)
        return lambda: waiter.wait(self._timeout)

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        for waiter, value in zip(waiters, results, strict=True):
            if waiter is not None:
                waiter.value = value
                waiter.lock.release()


class Sender:
    """A thread that sends for the lanes of an event loop, so that a full connection never blocks the loop."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="escrowmq-sender", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Call ``call`` on the thread, in turn."""
        self._work.put(call)

    def close(self) -> None:
        """End the thread after what was put before."""
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()


class LoopLane(Lane):
    """Callers are tasks of one event loop: each waiter is an asyncio future (or None), one wake-up of the loop a parcel."""

    def __init__(
        self, *args: Any, loop: asyncio.AbstractEventLoop, loop_thread: int, sender: Sender, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._loop = loop
        self._loop_thread = loop_thread
        self._sender = sender

    def call(self, row: Row, size: int) -> asyncio.Future[Any]:
        """Add a row; the future of its result. Call on the loop's thread."""
        future = self._loop.create_future()
        self.add(row, future, size)
        return future

    def call_batch(self, batch: pa.RecordBatch) -> asyncio.Future[Any]:
        """Send a whole batch; the future of its answer."""
        future = self._loop.create_future()
        self.add_batch(batch, future)
        return future

    def _start_pump(self) -> None:
        # After the callbacks that the loop has ready, and after the tasks that an answer just woke: those that are about
        # to add a row ride along.
        try:
            if threading.get_ident() == self._loop_thread:
                self._loop.call_soon(self._sender.put, self._pump)
            else:
                self._loop.call_soon_threadsafe(self._loop.call_soon, self._sender.put, self._pump)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._sender.put(self._pump)

    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(_resolve, waiters, results)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more


def _resolve(waiters: list[asyncio.Future[Any] | None], results: list[Any]) -> None:
    for future, value in zip(waiters, results, strict=True):
        if future is None or future.done():
            continue
        if isinstance(value, EscrowError):
            future.set_exception(value)
        else:
            future.set_result(value)
