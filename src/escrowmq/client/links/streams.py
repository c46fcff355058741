"""The streams of a :class:`~escrowmq.client.links.flight.FlightLink`: one DoExchange each, and the thread that reads it."""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from pyarrow import flight

from escrowmq import wire
from escrowmq.errors import Code, EscrowError, Unknown, unsent
from escrowmq.wire import PROTOCOL_VERSION, REQUEST, Exchange, ExchangeOptions, ReadRequest

STALL_SECONDS = 15.0
"""A request unanswered this long (past its own waiting time) makes the link give its stream up and connect anew."""
_BROKEN = (pa.ArrowException, OSError)
"""What Flight raises where a stream or a connection broke."""
CLOSE_SECONDS = 2.0
"""How long closing waits for the broker, and then once more after giving the stream up."""


def escrow_error(problem: BaseException) -> EscrowError:
    """The error that a Flight exception stands for: the broker's own if it carries one, else Unknown."""
    if isinstance(problem, EscrowError):
        return perhaps_healing(problem)
    packed = getattr(problem, "extra_info", None)
    if packed:
        try:
            return perhaps_healing(wire.unpack_error(wire.unpack_json(bytes(packed))))
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


class NotLeading(Unknown):
    """DISCONNECTED from a broker that answers, and does not lead its shard any more, or has stopped: to be sent to the one that leads."""

    leader: str | None = None
    """Who does, as it says."""


def failed_future(problem: EscrowError) -> Future[pa.RecordBatch]:
    """A future that has failed already."""
    future: Future[pa.RecordBatch] = Future()
    future.set_exception(problem)
    return future


inside: set[int] = set()
"""The threads that wait for the answer to an action or for a batch of a read."""


def leak(thing: object) -> None:
    """Never let a Flight object go: in a forked child its end would wait for the threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


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
    """One DoExchange: the writer, which one thread at a time uses, and the thread that reads, which alone ends it.

    gRPC aborts the process where a stream is half-closed twice at once, and Arrow half-closes by itself, without a lock, on the
    thread that reads the end of a stream. So nobody else may: ``done_writing`` is never called. Who wants to write no more
    writes a last chunk that says so (:data:`~escrowmq.wire.LAST`), upon which the broker ends the exchange; a broker
    that does not is cut off by ``cancel``, which any thread may call at any time. A write beside the half-close is harmless.
    """

    def __init__(self, client: flight.FlightClient, command: dict[str, Any], schema: pa.Schema) -> None:
        packed = json.dumps({"protocol": PROTOCOL_VERSION, **command}).encode()
        self.client = client
        self._writing = threading.Lock()
        self.withdrawn = False  # it takes no more requests
        self._over = False  # nothing may be written any more
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(packed))
        self._thread = threading.Thread(target=self._read, name=f"escrowmq-{command['exchange']}", daemon=True)
        try:
            self._writer.begin(schema)
            self._thread.start()
        except BaseException:
            self.cancel()  # or the writer would wait for the broker's end when it goes
            raise

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
            self.cancel()  # what could not be taken in is no end: nothing is waited for any more
        self._ended(problem)
        with self._writing:
            self.withdrawn = self._over = True
            with suppress(*_BROKEN):  # the reader has the reason
                self._writer.close()  # or Arrow prints the end of the stream on standard error when the writer goes

    def cancel(self) -> None:
        """Give it up."""
        with suppress(*_BROKEN):  # it ended by itself
            self._reader.cancel()

    def forked(self) -> None:
        """See :func:`leak`."""
        leak(self._writer)
        leak(self._reader)

    def withdraw(self) -> None:
        """Write no more: the broker answers what it has begun, takes waiting receives back, and ends the stream.

        Returns at once, because a full connection or a writer at work would hold the caller up.
        """
        if not self.withdrawn:
            self.withdrawn = True
            threading.Thread(target=self._say_end, name="escrowmq-withdraw", daemon=True).start()

    def _say_end(self) -> None:
        with self._writing, suppress(*_BROKEN):  # it is gone already
            if not self._over:
                self._over = True
                self._writer.write_metadata(wire.pack_metadata(0, wire.LAST))

    def close(self) -> None:
        """Let the broker finish what it has begun, shortly, then end. At most twice ``CLOSE_SECONDS``."""
        close_all([self])

    def ends_by(self, deadline: float) -> bool:
        """Wait until nothing more is read; whether that came before ``deadline`` (monotonic seconds)."""
        if self._thread is threading.current_thread():
            return True
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()


def close_all(streams: Sequence[Duplex]) -> None:
    """Let the broker finish what it has begun on these streams, shortly, then end them; all beside each other."""
    for stream in streams:
        stream.withdraw()
    deadline = time.monotonic() + CLOSE_SECONDS
    left = [stream for stream in streams if not stream.ends_by(deadline)]
    for stream in left:
        stream.cancel()
    deadline = time.monotonic() + CLOSE_SECONDS
    for stream in left:
        stream.ends_by(deadline)


class Stream(Duplex):
    """A stream of one kind of exchange: requests, matched to answers by number. ``member``: whose receives it carries."""

    def __init__(
        self,
        client: flight.FlightClient,
        kind: Exchange,
        member: int | None,
        broken: Callable[[Stream], None],
        refused: Callable[[EscrowError], None] = lambda problem: None,
    ) -> None:
        self.kind = kind
        self.member = member
        self._broken = broken
        self._refused = refused
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
                return failed_future(unsent("the stream takes no more requests"))
            number = next(self._ids)
            with self._lock:
                if self._dead is not None:
                    problem = Unknown(self._dead.code, self._dead.message)
                    problem.left = False
                    return failed_future(problem)
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
            problem = perhaps_healing(wire.unpack_error(content.get("error", {})))
            if isinstance(problem, NotLeading):
                self._refused(problem)  # first: what is sent again must not come here
            entry[0].set_exception(problem)
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


def perhaps_healing(problem: EscrowError) -> EscrowError:
    """A served shard that stopped comes back with its restart, or is led by another broker: to the client that is a connection that
    broke."""
    if problem.code not in (Code.SHARD_STOPPED, Code.NOT_LEADER):
        return problem
    lost = NotLeading(Code.DISCONNECTED, problem.message, problem.hint)
    if problem.code is Code.NOT_LEADER:  # surely not applied
        lost.left, lost.leader = False, problem.hint
    return lost


class Checks(Duplex):
    """A live check-back subscription: one exchange on which only the broker speaks."""

    def __init__(
        self,
        client: flight.FlightClient,
        session: int,
        on_checks: Callable[[pa.RecordBatch], None],
        lost: Callable[[EscrowError], None] = lambda problem: None,
    ) -> None:
        self._on_checks = on_checks
        self._told = lost
        self._lost = threading.Event()
        self._closed = False
        self.problem: EscrowError | None = None
        super().__init__(client, {"exchange": "checks", "session": session}, pa.schema([]))

    @property
    def broken(self) -> bool:
        """Whether the carrier lost it."""
        return self._lost.is_set() and not self._closed

    @property
    def over(self) -> bool:
        """Whether nothing more comes, for whatever reason."""
        return self._lost.is_set()

    def withdraw(self) -> None:
        """Leave the list of those to ask."""
        self._closed = True
        super().withdraw()

    def _came(self, chunk: flight.FlightStreamChunk) -> None:
        if chunk.data is None:
            self._refused(wire.unpack_metadata(chunk.app_metadata.to_pybytes())[1])
        elif chunk.data.num_rows:
            self._on_checks(chunk.data)

    def _refused(self, content: wire.Json) -> None:
        """The broker asks no more, and says why."""
        if "error" in content:
            self.problem = perhaps_healing(wire.unpack_error(content["error"]))
            self._tell()
            self._lost.set()

    def _ended(self, problem: EscrowError | None) -> None:
        self.problem = self.problem or problem
        self._tell()
        self._lost.set()

    def _tell(self) -> None:
        if self.problem is not None and self.problem.code is Code.DISCONNECTED and not self._closed:
            self._told(self.problem)


class Read:
    """One DoGet: its batches as they are asked for. ``lost`` is called when the connection broke. Raises what Flight does."""

    def __init__(self, client: flight.FlightClient, request: ReadRequest, lost: Callable[[EscrowError], None]) -> None:
        self.client = client
        self._lost = lost
        self._expiry: float | None = None  # none while nobody waits for a batch
        self._reader = client.do_get(flight.Ticket(json.dumps(request).encode()))

    def schema(self) -> pa.Schema:
        """The schema of the batches; waits for the broker. Raises EscrowError."""
        with self._waiting():
            return self._reader.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """To the end. Raises EscrowError. Who stops before gives the rest up."""
        try:
            while True:
                with self._waiting():
                    chunk = self._reader.read_chunk()
                yield chunk.data
        except StopIteration:
            return
        finally:
            self.cancel()

    def stalled(self, now: float) -> bool:
        """Whether the next batch is overdue."""
        expiry = self._expiry
        return expiry is not None and expiry < now

    def more_time(self) -> None:
        """It is not overdue before another ``STALL_SECONDS``."""
        self._expiry = time.monotonic() + STALL_SECONDS

    def cancel(self) -> None:
        """Give it up. From any thread."""
        with suppress(*_BROKEN):  # it ended by itself
            self._reader.cancel()

    def forked(self) -> None:
        """See :func:`leak`."""
        leak(self._reader)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.more_time()
        inside.add(threading.get_ident())
        try:
            yield
        except _BROKEN as raised:
            problem = escrow_error(raised)
            if problem.code is Code.DISCONNECTED:
                self._lost(problem)
            raise problem from None
        finally:
            inside.discard(threading.get_ident())
            self._expiry = None
