"""Work beside the requests of connections: actions, reads and watches, on a bounded number of threads.

A read sends batches while it has credit, a watch sends checks when they are due. Neither occupies a thread while it
waits for credit, for its client to read, or for checks: the event that ends the wait calls :meth:`Stream.wake`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.failures import broker_failed, for_client
from escrowmq.broker.reads.chunks import BYTES
from escrowmq.broker.serving.connection import Connection
from escrowmq.broker.serving.room import Held, Room
from escrowmq.broker.writer.checkback import Listener
from escrowmq.errors import Code, EscrowError, error
from escrowmq.schemas import CHECKS
from escrowmq.wire import BatchStream, Json, frames
from escrowmq.wire.actions import brokers
from escrowmq.wire.frames import Pieces

ACTIONS = 32
"""Concurrent actions of all connections,"""
ACTIONS_OF_ONE = 8
"""and of one; further ones wait, so that one connection does not delay the others."""
READS = 16
"""Concurrent reads."""
WATCHES = 4
"""Watches that start or read checks from the log concurrently: both may wait for the disk."""
QUESTIONS = 2
"""Threads for queries about the broker itself, which wait behind nothing else."""
FIRST_READ_BYTES, READ_BYTES = BYTES, 2 * BYTES
"""Memory reserved for the first batches of a read, and the maximum for later ones (twice the previous batch)."""
UNSENT_BYTES = 2 << 20
"""Queued bytes of one read or watch above which it produces no further batch."""

_NO_CHECKS = pa.RecordBatch.from_pylist([], schema=CHECKS)
_ABOUT_THE_BROKER = frozenset({brokers.HELLO.name, brokers.HEALTH.name, brokers.STATS.name})

logger = logging.getLogger(__name__)


class Workers:
    """Runs actions, reads and watches on the threads of a server. Work submitted after :meth:`close` is dropped."""

    def __init__(self) -> None:
        self._actions = ThreadPoolExecutor(ACTIONS, "escrowmq-action")
        self._reads = ThreadPoolExecutor(READS, "escrowmq-read")
        self._watches = ThreadPoolExecutor(WATCHES, "escrowmq-watch")
        self._questions = ThreadPoolExecutor(QUESTIONS, "escrowmq-question")
        self._lock = threading.Lock()
        self._running: dict[Held, int] = {}
        self._waiting: dict[Held, deque[Callable[[], None]]] = {}

    def act(self, held: Held, call: Callable[[], None], name: str) -> None:
        """Run an action of a connection on a thread. Of one connection ``ACTIONS_OF_ONE`` run at the same time; further
        ones wait. Queries about the broker itself have threads of their own."""
        if name in _ABOUT_THE_BROKER:
            self._submit(self._questions, call)
            return
        with self._lock:
            running = self._running.get(held, 0)
            if running >= ACTIONS_OF_ONE:
                self._waiting.setdefault(held, deque()).append(call)
                return
            self._running[held] = running + 1
        self._submit(self._actions, lambda: self._act(held, call))

    def _act(self, held: Held, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("an action could not be answered: %s", held.peer)
        with self._lock:
            waiting = self._waiting.get(held)
            following = waiting.popleft() if waiting else None
            if not waiting:
                self._waiting.pop(held, None)
            if following is None:
                self._running[held] -= 1
                if not self._running[held]:
                    del self._running[held]
        if following is not None:  # after waiting actions of others
            self._submit(self._actions, lambda: self._act(held, following))

    def run_watch(self, call: Callable[[], None]) -> None:
        """Run ``call``, a step of a watch, on a thread for watches."""
        self._submit(self._watches, call)

    def run_read(self, call: Callable[[], None]) -> None:
        """Run ``call``, a step of a read, on a thread for reads."""
        self._submit(self._reads, call)

    @staticmethod
    def _submit(pool: ThreadPoolExecutor, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the server has stopped
            pool.submit(call)

    def close(self) -> None:
        """Start nothing more; running work continues, and waiting work is dropped."""
        for pool in (self._actions, self._reads, self._watches, self._questions):
            pool.shutdown(wait=False, cancel_futures=True)


class Place(NamedTuple):
    """The context of a stream: the number of its request, its source and its connection. ``end`` is called once, when
    the connection has the last frame."""

    number: int
    calls: Dispatcher
    room: Room
    connection: Connection
    workers: Workers
    end: Callable[[], None]


class Stream(ABC):
    """Base of long-running answers. ``run`` runs it on a thread of the workers."""

    def __init__(self, place: Place, run: Callable[[Callable[[], None]], None]) -> None:
        self._number, self._calls, self._room, self._connection, _, self._end = place
        self._held = self._connection.held
        self._run_on_worker = run
        self._lock = threading.Lock()
        self._running = self._again = False
        self._over = False
        self._cancelled = self._broken_off = False
        self._unsent = 0

    def wake(self) -> None:
        """Continue the stream on a thread of the workers, because there may be something to send. From any thread."""
        with self._lock:
            if self._over or self._running:
                self._again = True
                return
            self._running = True
        self._run_on_worker(self._work)

    def cancel(self) -> None:
        """End the stream at the client's request: DONE is the last frame, unless it has ended. From any thread."""
        self._cancelled = True
        self.wake()

    def break_off(self) -> None:
        """End the stream early: an error is the last frame, so that it does not look complete. From any thread."""
        self._broken_off = True
        self.cancel()

    def _work(self) -> None:
        while True:
            self._again = False
            last = self._step()
            with self._lock:
                self._over = last is not None
                if self._over or not self._again:
                    self._running = False
                    break
        if last is not None:
            self._close()
            self._room.change(self._held, frames.size_of(last))
            self._give([last])
            self._end()

    def _step(self) -> Pieces | None:
        """Send what can be sent now. Returns the last frame (DONE or an error) if the stream has ended, else None."""
        try:
            if self._broken_off:
                raise error(Code.SHARD_STOPPED, "the broker is stopping, or its client is leaving")
            ended = self._cancelled or self._go_on()
        except Exception as problem:
            return [frames.refused(self._number, for_client(broker_failed("a stream", problem)))]
        return [frames.done(self._number)] if ended else None

    @abstractmethod
    def _go_on(self) -> bool:
        """Send what can be sent now. Returns whether the stream has no more to send. Raises EscrowError for the last
        frame."""

    @abstractmethod
    def _close(self) -> None:
        """Close what the stream reads from."""

    def _may_send(self) -> bool:
        return self._unsent < UNSENT_BYTES and not self._cancelled

    def _give(self, answer: list[Pieces]) -> None:
        """Send frames whose bytes are counted in the room already."""
        size = sum(map(frames.size_of, answer))
        with self._lock:
            self._unsent += size
        if gone := self._connection.send(answer, freed=self._on_freed, large=True):
            self._count_freed(gone)

    def _on_freed(self, size: int) -> None:
        """Subtract bytes of frames that were sent or dropped; continue the stream if it may send again."""
        if self._count_freed(size):
            self.wake()

    def _count_freed(self, size: int) -> bool:
        """Subtract bytes of frames that were sent or dropped, here and in the room. Returns whether the stream may send
        again after being full."""
        with self._lock:
            was_full, self._unsent = self._unsent >= UNSENT_BYTES, self._unsent - size
            may_go_on = was_full and self._unsent < UNSENT_BYTES
        self._room.change(self._held, -size)
        return may_go_on


class Read(Stream):
    """Sends a read: SCHEMA, batches while there is credit, DONE or ERROR."""

    def __init__(self, place: Place, request: Json, credit: int) -> None:
        super().__init__(place, place.workers.run_read)
        self._request = request
        self._credit = credit
        self._reader: BatchStream | None = None
        self._expected = FIRST_READ_BYTES

    def add_credit(self, size: int) -> None:
        """Let the read send ``size`` bytes more, as many as the client has consumed. From any thread."""
        with self._lock:
            self._credit += size
        self.wake()

    def _go_on(self) -> bool:
        if self._reader is None:
            self._reader = self._calls.read(self._request)
            schema: Pieces = [frames.schema_answer(self._number, self._reader.schema)]
            self._room.change(self._held, frames.size_of(schema))
            self._give([schema])
        while self._credit > 0 and self._may_send():
            self._room.take(self._held, self._expected, reads=True)
            given = 0
            try:
                batch = next(self._reader, None)
                if batch is None:
                    return True
                parts = frames.part_answer(self._number, batch)
                given = sum(map(frames.size_of, parts))
            finally:
                self._room.change(self._held, given - self._expected)
            self._expected = min(max(2 * batch.nbytes, FIRST_READ_BYTES), READ_BYTES)
            with self._lock:
                self._credit -= sum(frames.size_of(part[1:]) for part in parts)  # bodies alone
            self._give(parts)
        return False

    def _close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with suppress(pa.ArrowException, OSError, EscrowError):  # it ended by an error
                reader.close()


class Watch(Stream):
    """Sends the checks of a session when they are due; first an empty batch, because from now on it will."""

    def __init__(self, place: Place, session: int) -> None:
        super().__init__(place, place.workers.run_watch)
        self._session = session
        self._listener: Listener | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())

    def _go_on(self) -> bool:
        listener = self._listener
        if listener is None:
            self._listener = listener = self._calls.watch(self._session)
            listener.on_news = self.wake
            self._batches = iter([_NO_CHECKS])
        while self._may_send():
            batch = next(self._batches, None)
            if batch is not None:
                parts = frames.checks(self._number, batch)
                self._room.change(self._held, sum(map(frames.size_of, parts)))
                self._give(parts)
            elif (due := listener.take_now()) is not None:
                self._batches = listener.batches_of(due)
            elif listener.closed:
                if listener.problem is not None:
                    raise listener.problem
                return True
            else:
                break
        return False

    def _close(self) -> None:
        if self._listener is not None:
            self._calls.leave(self._listener)
