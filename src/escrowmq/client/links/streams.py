"""The streams of a :class:`~escrowmq.client.links.flight.FlightLink`: one DoExchange each, and the thread that reads it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from pyarrow import flight

from escrowmq import wire
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.wire import PROTOCOL_VERSION, REQUEST, Exchange, ExchangeOptions

STALL_SECONDS = 15.0
"""A request unanswered this long (past its own waiting time) makes the link give its stream up and connect anew."""
_BROKEN = (pa.ArrowException, OSError)
"""What Flight raises where a stream or a connection broke."""
CLOSE_SECONDS = 2.0
"""How long closing waits for the broker, and then once more after giving the stream up."""


def escrow_error(problem: BaseException) -> EscrowError:
    """The error that a Flight exception stands for: the broker's own if it carries one, else Unknown."""
    if isinstance(problem, EscrowError):
        return _perhaps_healing(problem)
    packed = getattr(problem, "extra_info", None)
    if packed:
        try:
            return _perhaps_healing(wire.unpack_error(wire.unpack_json(bytes(packed))))
        except EscrowError:
            pass
    reason = str(problem).split(". Detail:")[0].split(". gRPC client debug")[0]
    if isinstance(problem, flight.FlightTimedOutError):
        return Unknown(Code.TIMED_OUT, reason)
    return Unknown(Code.DISCONNECTED, reason or type(problem).__name__)


@contextmanager
def flight_errors() -> Iterator[None]:
    """Raises the error that a Flight exception stands for in its place."""
    try:
        yield
    except _BROKEN as problem:
        raise escrow_error(problem) from None


def failed_future(problem: EscrowError) -> Future[pa.RecordBatch]:
    """A future that has failed already."""
    future: Future[pa.RecordBatch] = Future()
    future.set_exception(problem)
    return future


class _Poll(Future[pa.RecordBatch]):
    """The future of a receive. Cancelling withdraws the receives of its stream: each is then answered, or fails."""

    def __init__(self, withdraw: Callable[[], None]) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        """Withdraw; False, because what the broker gave meanwhile must still arrive."""
        if not self.done():
            self._withdraw()
        return False


class Duplex(ABC):
    """One DoExchange: the writer, which one thread at a time uses and none after its end, and the thread that reads.

    gRPC aborts the process where two threads use one writer, or one uses it after its end.
    """

    def __init__(self, client: flight.FlightClient, command: dict[str, Any], schema: pa.Schema) -> None:
        packed = json.dumps({"protocol": PROTOCOL_VERSION, **command}).encode()
        self._writing = threading.Lock()
        self.withdrawn = False  # it takes no more requests
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(packed))
        self._writer.begin(schema)
        self._thread = threading.Thread(target=self._read, name=f"escrowmq-{command['exchange']}", daemon=True)
        self._thread.start()

    @abstractmethod
    def _came(self, chunk: flight.FlightStreamChunk) -> None:
        """Take in what the broker sent."""

    @abstractmethod
    def _ended(self, problem: EscrowError | None) -> None:
        """Nothing more will come; called before the writer's end is noted."""

    def _read(self) -> None:
        problem: EscrowError | None = None
        try:
            while True:
                self._came(self._reader.read_chunk())
        except StopIteration:
            pass
        except Exception as raised:
            problem = escrow_error(raised)
        self._ended(problem)
        with self._writing:
            self.withdrawn = True
            with suppress(*_BROKEN):  # the reader has the reason
                self._writer.close()  # or Arrow prints the end of the stream on standard error when the writer goes

    def cancel(self) -> None:
        """Give it up."""
        with suppress(*_BROKEN):  # it ended by itself
            self._reader.cancel()

    def withdraw(self) -> None:
        """Write no more: the broker answers what it has begun, takes waiting receives back, and ends the stream."""
        if self._writing.acquire(timeout=1.0):
            try:
                with suppress(*_BROKEN):  # it is gone already
                    if not self.withdrawn:
                        self.withdrawn = True
                        self._writer.done_writing()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Let the broker finish what it has begun, shortly, then end."""
        self.withdraw()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self.cancel()
                self._thread.join(CLOSE_SECONDS)


class Stream(Duplex):
    """A stream of one kind of exchange: requests, matched to answers by number. ``member``: whose receives it carries."""

    def __init__(
        self, client: flight.FlightClient, kind: Exchange, member: int | None, broken: Callable[[Stream], None]
    ) -> None:
        self.kind = kind
        self.member = member
        self._broken = broken
        self._pending: dict[int, tuple[Future[pa.RecordBatch], float]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # pending and dead
        self._dead: EscrowError | None = None
        super().__init__(client, {"exchange": str(kind)}, REQUEST[kind])

    def request(self, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """Send one request; the future of its answer."""
        future = _Poll(self.withdraw) if self.kind is Exchange.RECEIVE else Future[pa.RecordBatch]()
        wait_ms: Any = options.get("wait_ms", 0)
        expiry = time.monotonic() + wait_ms / 1000 + STALL_SECONDS
        with self._writing:
            if self.withdrawn and self._dead is None:
                return failed_future(Unknown(Code.DISCONNECTED, "the stream takes no more requests"))
            number = next(self._ids)
            with self._lock:
                if self._dead is not None:
                    return failed_future(Unknown(self._dead.code, self._dead.message))
                self._pending[number] = (future, expiry)
            try:
                metadata = wire.pack_metadata(number, options)
                if self.kind is Exchange.RECEIVE:
                    self._writer.write_metadata(metadata)
                else:
                    self._writer.write_with_metadata(batch, metadata)
            except _BROKEN:
                self.cancel()  # the reader has the reason, and fails whatever is pending
        return future

    def stalled(self, now: float) -> bool:
        """Whether an answer is overdue."""
        with self._lock:
            return any(expiry < now for _, expiry in self._pending.values())

    def _came(self, chunk: flight.FlightStreamChunk) -> None:
        number, content = wire.unpack_metadata(chunk.app_metadata.to_pybytes())
        with self._lock:
            entry = self._pending.pop(number, None)
        if entry is None:
            return
        if chunk.data is None:
            entry[0].set_exception(_perhaps_healing(wire.unpack_error(content.get("error", {}))))
        else:
            entry[0].set_result(chunk.data)

    def _ended(self, problem: EscrowError | None) -> None:
        problem = problem or Unknown(Code.DISCONNECTED, "the broker ended the exchange")
        if problem.code is Code.TIMED_OUT:
            problem = Unknown(Code.DISCONNECTED, problem.message)
        with self._lock:
            self._dead = problem
            left = [future for future, _ in self._pending.values()]
            self._pending.clear()
        for future in left:
            future.set_exception(problem)
        self._broken(self)


def _perhaps_healing(problem: EscrowError) -> EscrowError:
    """A served shard that stopped comes back with its restart: to the client that is a connection that broke."""
    return Unknown(Code.DISCONNECTED, problem.message, problem.hint) if problem.code is Code.SHARD_STOPPED else problem


class Checks(Duplex):
    """A live check-back subscription: one exchange on which only the broker speaks."""

    def __init__(self, client: flight.FlightClient, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> None:
        self._on_checks = on_checks
        self._over = threading.Event()
        self._closed = False
        self.problem: EscrowError | None = None
        super().__init__(client, {"exchange": "checks", "session": session}, pa.schema([]))

    @property
    def broken(self) -> bool:
        """Whether the carrier lost it."""
        return self._over.is_set() and not self._closed

    def close(self) -> None:
        """Leave the list of those to ask."""
        self._closed = True
        super().close()

    def _came(self, chunk: flight.FlightStreamChunk) -> None:
        if chunk.data is not None and chunk.data.num_rows:
            self._on_checks(chunk.data)

    def _ended(self, problem: EscrowError | None) -> None:
        self.problem = problem
        self._over.set()
