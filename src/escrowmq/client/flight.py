"""A :class:`~escrowmq.wire.Link` over Arrow Flight. The protocol's table stands at the top of ``broker/service.py``.

Each kind of exchange has one stream and one reader thread; requests are pipelined and matched to answers by id. When a
stream breaks, all its requests fail with Unknown(DISCONNECTED), oldest first, before a new stream can be opened; who
sends again is the lanes' affair. A stream that owes an answer for too long is cancelled, so that half-open connections
and stopped brokers cannot hold anybody for ever.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
from pyarrow import flight

from escrowmq import wire
from escrowmq.client.alarm import Alarm
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.wire import PROTOCOL_VERSION, REQUEST, CheckStream, Exchange

CONNECT_SECONDS = 5.0
STALL_SECONDS = 15.0
"""A request unanswered this long (past its own waiting time) makes the link give its stream up and connect anew."""
FIRST_BACKOFF = 0.02
LAST_BACKOFF = 2.0

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client means a new connection, without gRPC's own long back-off
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


def escrow_error(problem: BaseException) -> EscrowError:
    """The error that a Flight exception stands for: the broker's own if it carries one, else Unknown."""
    if isinstance(problem, EscrowError):
        return problem
    told = getattr(problem, "extra_info", None)
    if told:
        try:
            return wire.unpack_error(wire.unpack_json(bytes(told)))
        except EscrowError:
            pass
    reason = str(problem).split(". Detail:")[0].split(". gRPC client debug")[0]
    if isinstance(problem, flight.FlightTimedOutError):
        return Unknown(Code.TIMED_OUT, reason)
    return Unknown(Code.DISCONNECTED, reason or type(problem).__name__)


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


class _Stream:
    """One DoExchange and the thread that reads its answers. ``member``: whose receives it carries."""

    def __init__(
        self, client: flight.FlightClient, kind: Exchange, member: int | None, broken: Callable[[_Stream], None]
    ) -> None:
        self.kind = kind
        self.member = member
        self.withdrawn = False
        self._broken = broken
        self._pending: dict[int, tuple[Future[pa.RecordBatch], float]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # pending and dead
        self._writing = threading.Lock()  # the order of requests
        self._dead: EscrowError | None = None
        command = json.dumps({"protocol": PROTOCOL_VERSION, "exchange": str(kind)}).encode()
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(command))
        self._writer.begin(REQUEST[kind])
        self._thread = threading.Thread(target=self._read, name=f"escrowmq-{kind}", daemon=True)
        self._thread.start()

    def request(self, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        future = _Poll(self.withdraw) if self.kind is Exchange.RECEIVE else Future[pa.RecordBatch]()
        expiry = time.monotonic() + options.get("wait_ms", 0) / 1000 + STALL_SECONDS
        with self._writing:
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
            except (pa.ArrowException, OSError):
                self.cancel()  # the reader has the reason, and fails whatever is pending
        return future

    def _read(self) -> None:
        problem: EscrowError = Unknown(Code.DISCONNECTED, "the broker ended the exchange")
        try:
            while True:
                chunk = self._reader.read_chunk()
                number, content = wire.unpack_metadata(chunk.app_metadata.to_pybytes())
                with self._lock:
                    entry = self._pending.pop(number, None)
                if entry is None:
                    continue
                if chunk.data is None:
                    entry[0].set_exception(_perhaps_healing(wire.unpack_error(content.get("error", {}))))
                else:
                    entry[0].set_result(chunk.data)
        except StopIteration:
            pass
        except Exception as raised:
            problem = _perhaps_healing(escrow_error(raised))
            if problem.code is Code.TIMED_OUT:
                problem = Unknown(Code.DISCONNECTED, problem.message)
        with self._lock:
            self._dead = problem
            left = [future for future, _ in self._pending.values()]
            self._pending.clear()
        for future in left:
            future.set_exception(problem)
        _end(self._writer)
        self._broken(self)

    def stalled(self, now: float) -> bool:
        """Whether an answer is overdue."""
        with self._lock:
            return any(expiry < now for _, expiry in self._pending.values())

    def cancel(self) -> None:
        """Give the stream up; its requests fail."""
        try:
            self._reader.cancel()
        except (pa.ArrowException, OSError):
            pass  # it ended by itself

    def withdraw(self) -> None:
        """Write no more: the broker answers what it has begun, takes waiting receives back, and ends the stream."""
        if self._writing.acquire(timeout=1.0):
            try:
                if not self.withdrawn:
                    self.withdrawn = True
                    self._writer.done_writing()
            except (pa.ArrowException, OSError):
                pass  # it is gone already
            finally:
                self._writing.release()

    def close(self) -> None:
        """Let the broker finish what it has begun, shortly, then end."""
        self.withdraw()
        self._thread.join(2.0)
        if self._thread.is_alive():
            self.cancel()
            self._thread.join(2.0)


def _perhaps_healing(problem: EscrowError) -> EscrowError:
    """A stopped shard comes back with its restart: for whoever resends, that is a connection that broke."""
    return Unknown(Code.DISCONNECTED, problem.message, problem.hint) if problem.code is Code.SHARD_STOPPED else problem


def _end(writer: flight.FlightStreamWriter) -> None:
    """Take note of a stream's end, or Arrow prints it on standard error when the writer goes."""
    try:
        writer.close()
    except (pa.ArrowException, OSError):
        pass  # the reader has told why


class _Checks:
    """A live check-back subscription: one exchange on which only the broker speaks."""

    def __init__(self, client: flight.FlightClient, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> None:
        command = json.dumps({"protocol": PROTOCOL_VERSION, "exchange": "checks", "session": session}).encode()
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(command))
        self._writer.begin(pa.schema([]))
        self._on_checks = on_checks
        self._ended = threading.Event()
        self._closed = False
        self.problem: EscrowError | None = None
        self._thread = threading.Thread(target=self._read, name="escrowmq-checks", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                chunk = self._reader.read_chunk()
                if chunk.data is not None and chunk.data.num_rows:
                    self._on_checks(chunk.data)
        except StopIteration:
            pass
        except Exception as raised:
            self.problem = escrow_error(raised)
        finally:
            _end(self._writer)
            self._ended.set()

    @property
    def broken(self) -> bool:
        """Whether the carrier lost it."""
        return self._ended.is_set() and not self._closed

    def close(self) -> None:
        """Leave the list of those to ask."""
        self._closed = True
        try:
            self._writer.done_writing()
        except (pa.ArrowException, OSError):
            pass  # it is gone already
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
            if self._thread.is_alive():
                self._reader.cancel()
                self._thread.join(1.0)


class FlightLink:
    """One broker at ``host:port``. Connects when it is first used, and again, with back-off, after it was lost."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.RLock()
        self._client: flight.FlightClient | None = None
        self._streams: dict[tuple[Exchange, int | None], _Stream] = {}
        self._watches: list[_Checks] = []
        self._not_before = 0.0
        self._backoff = FIRST_BACKOFF
        self._last_problem: EscrowError | None = None
        self._alarm = Alarm("escrowmq-link")
        self._patrolling = False
        self._closed = False

    @property
    def address(self) -> str:
        """``escrow://host:port``."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"escrow://{host}:{self._port}"

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        try:
            stream = self._stream(kind, options.get("member"))
        except EscrowError as problem:
            return failed_future(problem)
        return stream.request(batch, options)

    def action(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """See :meth:`escrowmq.wire.Link.action`."""
        client = self._connected(timeout)
        try:
            return _act(client, name, request, timeout)
        except EscrowError as problem:
            if problem.code is Code.DISCONNECTED:
                self._lost(client, problem)
            raise

    def read(self, request: dict[str, Any]) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        client = self._connected(CONNECT_SECONDS)
        try:
            reader = client.do_get(flight.Ticket(json.dumps(request).encode()))
            schema = reader.schema
        except (pa.ArrowException, OSError) as problem:
            raise escrow_error(problem) from None
        return pa.RecordBatchReader.from_batches(schema, _chunks(reader))

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """See :meth:`escrowmq.wire.Link.watch`."""
        client = self._connected(CONNECT_SECONDS)
        try:
            checks = _Checks(client, session, on_checks)
        except (pa.ArrowException, OSError) as problem:
            raise escrow_error(problem) from None
        with self._lock:
            self._watches = [watch for watch in self._watches if not watch.broken]
            self._watches.append(checks)
        return checks

    def close(self) -> None:
        """End all streams; what is unanswered fails with Unknown."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams, watches, client = list(self._streams.values()), self._watches, self._client
            self._client = None
        self._alarm.close()
        for watch in watches:
            watch.close()
        for stream in streams:
            stream.close()
        if client is not None:
            client.close()

    # Connecting

    def _connected(self, timeout: float = CONNECT_SECONDS) -> flight.FlightClient:
        with self._lock:
            if self._closed:
                raise Unknown(Code.CLOSED, "the connection is closed")
            if self._client is not None:
                return self._client
            if time.monotonic() < self._not_before and self._last_problem is not None:
                raise Unknown(Code.DISCONNECTED, self._last_problem.message)
            host = f"[{self._host}]" if ":" in self._host else self._host
            client = flight.FlightClient(f"grpc+tcp://{host}:{self._port}", generic_options=_CHANNEL)
            try:
                _act(client, "hello", {}, min(timeout, CONNECT_SECONDS))
            except EscrowError as problem:
                client.close()
                reason = Unknown(Code.DISCONNECTED, f"no broker answers at {self.address}: {problem.message}")
                self._last_problem = reason
                self._not_before = time.monotonic() + self._backoff * (0.5 + random.random())
                self._backoff = min(2 * self._backoff, LAST_BACKOFF)
                raise reason from None
            self._client, self._backoff, self._last_problem = client, FIRST_BACKOFF, None
            return client

    def _stream(self, kind: Exchange, member: int | None) -> _Stream:
        stream = self._streams.get((kind, member))
        if stream is not None and not stream.withdrawn:
            return stream
        with self._lock:
            stream = self._streams.get((kind, member))
            if stream is None or stream.withdrawn:
                client = self._connected()
                try:
                    stream = _Stream(client, kind, member, self._stream_broke)
                except (pa.ArrowException, OSError) as problem:
                    reason = escrow_error(problem)
                    self._lost(client, reason)
                    raise reason from None
                self._streams[kind, member] = stream
                if not self._patrolling:
                    self._patrolling = True
                    self._alarm.after(1.0, self._patrol)
            return stream

    def _stream_broke(self, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get((stream.kind, stream.member)) is stream:
                del self._streams[stream.kind, stream.member]
            if not self._closed and not stream.withdrawn and self._client is not None:
                self._lost(self._client, Unknown(Code.DISCONNECTED))

    def _lost(self, client: flight.FlightClient, problem: EscrowError) -> None:
        """Connect anew for the next use; streams that are still open end by themselves."""
        with self._lock:
            if self._client is client:
                self._client = None
                self._last_problem = problem

    def _patrol(self) -> None:
        with self._lock:
            self._patrolling = bool(self._streams) and not self._closed
            streams = list(self._streams.values())
        now = time.monotonic()
        for stream in streams:
            if stream.stalled(now):
                stream.cancel()
        if self._patrolling:
            self._alarm.after(1.0, self._patrol)


def _act(client: flight.FlightClient, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    options = flight.FlightCallOptions(timeout=timeout)
    try:
        results = list(client.do_action(flight.Action(name, json.dumps(request).encode()), options))
    except (pa.ArrowException, OSError) as problem:
        raise escrow_error(problem) from None
    return wire.unpack_json(results[0].body.to_pybytes()) if results else {}


def _chunks(reader: flight.FlightStreamReader) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield reader.read_chunk().data
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as problem:
            raise escrow_error(problem) from None
