"""A :class:`~escrowmq.wire.Link` over Arrow Flight. The protocol is in ``docs/protocol.md``.

Each kind of exchange has one stream and one reader thread; requests are pipelined and matched to answers by id. When a
stream breaks, all its requests fail with Unknown(DISCONNECTED), oldest first, before a new stream can be opened; who
sends again is the lanes' affair. A stream that owes an answer for too long is cancelled, so that half-open connections
and stopped brokers cannot hold anybody for ever. What a stopping or stopped broker answers to anything (SHARD_STOPPED) is
DISCONNECTED here, too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
from pyarrow import flight

from escrowmq import wire
from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.streams import Checks, Stream, escrow_error, failed_future, flight_errors
from escrowmq.errors import Code, EscrowError, Unknown
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import CheckStream, Exchange, ExchangeOptions, Json, ReadRequest

CONNECT_SECONDS = 5.0
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client means a new connection, without gRPC's own long back-off
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


class FlightLink:
    """One broker at ``host:port``. Connects when it is first used, and again, with back-off, after it was lost."""

    def __init__(self, host: str, port: int) -> None:
        self._location = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = f"escrow://{self._location}"
        self._lock = threading.RLock()
        self._client: flight.FlightClient | None = None
        self._streams: dict[tuple[Exchange, int | None], Stream] = {}
        self._watches: list[Checks] = []
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF)
        self._last_problem: EscrowError | None = None
        self._timer = Timer("escrowmq-link")
        self._patrolling = False
        self._closed = False

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        member: Any = options.get("member")
        try:
            stream = self._stream(kind, member)
        except EscrowError as problem:
            return failed_future(problem)
        return stream.request(batch, options)

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """See :meth:`escrowmq.wire.Link.action`."""
        client = self._connected(timeout)
        try:
            return _act(client, name, request, timeout)
        except EscrowError as problem:
            if problem.code is Code.DISCONNECTED:
                self._lost(client, problem)
            raise

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        client = self._connected(CONNECT_SECONDS)
        with flight_errors():
            reader = client.do_get(flight.Ticket(json.dumps(request).encode()))
            schema = reader.schema
        return pa.RecordBatchReader.from_batches(schema, _chunks(reader))

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """See :meth:`escrowmq.wire.Link.watch`."""
        client = self._connected(CONNECT_SECONDS)
        with flight_errors():
            checks = Checks(client, session, on_checks)
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
        self._timer.close()
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
            if self._backoff.left() and self._last_problem is not None:
                raise Unknown(Code.DISCONNECTED, self._last_problem.message)
            client = flight.FlightClient(f"grpc+tcp://{self._location}", generic_options=_CHANNEL)
            try:
                _act(client, "hello", {}, min(timeout, CONNECT_SECONDS))
            except EscrowError as problem:
                client.close()
                reason = Unknown(Code.DISCONNECTED, f"no broker answers at {self.address}: {problem.message}")
                self._last_problem = reason
                self._backoff.failed()
                raise reason from None
            self._backoff.worked()
            self._client, self._last_problem = client, None
            return client

    def _stream(self, kind: Exchange, member: int | None) -> Stream:
        stream = self._streams.get((kind, member))
        if stream is not None and not stream.withdrawn:
            return stream
        with self._lock:
            stream = self._streams.get((kind, member))
            if stream is None or stream.withdrawn:
                client = self._connected()
                try:
                    with flight_errors():
                        stream = Stream(client, kind, member, self._stream_broke)
                except EscrowError as problem:
                    self._lost(client, problem)
                    raise
                self._streams[kind, member] = stream
                if not self._patrolling:
                    self._patrolling = True
                    self._timer.after(1.0, self._patrol)
            return stream

    def _stream_broke(self, stream: Stream) -> None:
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
            self._timer.after(1.0, self._patrol)


def _act(client: flight.FlightClient, name: str, request: Mapping[str, object], timeout: float) -> Json:
    options = flight.FlightCallOptions(timeout=timeout)
    with flight_errors():
        results = list(client.do_action(flight.Action(name, json.dumps(request).encode()), options))
    return wire.unpack_json(results[0].body.to_pybytes()) if results else {}


def _chunks(reader: flight.FlightStreamReader) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield reader.read_chunk().data
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as problem:
            raise escrow_error(problem) from None
