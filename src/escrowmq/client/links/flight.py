"""A :class:`~escrowmq.wire.Link` over Arrow Flight. The protocol is in ``docs/protocol.md``.

Each kind of exchange has one stream and one reader thread; requests are pipelined and matched to answers by id. When a
stream breaks, all its requests fail with Unknown(DISCONNECTED), oldest first, before a new stream can be opened; who
sends again is the lanes' affair. A stream that owes an answer for too long, or a read, is cancelled, so that half-open connections
and stopped brokers cannot hold anybody for ever. What a stopping or stopped broker answers to anything (SHARD_STOPPED) is
DISCONNECTED here, too.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
from pyarrow import flight

from escrowmq import wire
from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.streams import (
    Checks,
    Duplex,
    Read,
    Stream,
    close_all,
    failed_future,
    flight_errors,
    inside,
    leak,
)
from escrowmq.errors import Code, EscrowError, Unknown, unsent
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.forks import FORKED, tell_in_child
from escrowmq.wire import CheckStream, Exchange, ExchangeOptions, Json, ParcelsByExchange, ReadRequest

CONNECT_SECONDS = 5.0
EXCHANGE_SECONDS = 0.25
"""How long an exchange waits for a connection: it may be begun on a thread that others need."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client means a new connection, without gRPC's own long back-off
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


class FlightLink(ParcelsByExchange):
    """One broker at ``host:port``. Connects when it is first used, and again, with back-off, after it was lost.

    ``stays``: as one of several, it must always be the same shard. Another one at its address counts as no answer.
    """

    def __init__(self, host: str, port: int, *, stays: bool = False) -> None:
        self.host = host
        self.hello: Json | None = None
        """What the broker said of itself when the last connection was made; another object for each connection."""
        self._location = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = f"escrow://{self._location}"
        self._lock = threading.RLock()
        self._connection = threading.Condition(self._lock)  # notified when there is one, or a try came to nothing
        self._connecting = False
        self._stays = stays
        self._shard: int | None = None
        self._client: flight.FlightClient | None = None
        self._streams: dict[tuple[Exchange, int | None], Stream] = {}  # those that take requests
        self._open: set[Stream] = set()  # those that owe an answer, too
        self._watches: list[Checks] = []
        self._reads: weakref.WeakSet[Read] = weakref.WeakSet()
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF)
        self._last_problem: EscrowError | None = None
        self._timer = Timer("escrowmq-link")
        self._patrolling = False
        self._closed = False
        self._closed_because = "the connection is closed"
        _links.add(self)
        tell_in_child(self)

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
        deadline = time.monotonic() + timeout
        client = self._connected(timeout)
        try:
            return _act(client, name, request, max(deadline - time.monotonic(), 0.001))
        except EscrowError as problem:
            if problem.code is Code.DISCONNECTED:
                self._lost(client, problem)
            raise

    def greeting(self, timeout: float) -> Json:
        """``hello`` of this connection; connects first if need be, for up to ``timeout`` seconds. Raises Unknown."""
        self._connected(timeout)
        assert self.hello is not None
        return self.hello

    def doubt(self, problem: EscrowError) -> None:
        """The broker may be another by now: connect anew for the next use. What is under way is left alone."""
        with self._lock:
            if self._client is not None:
                self._lost(self._client, problem)

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        client = self._connected()
        with flight_errors():
            read = Read(client, request, lambda problem: self._lost(client, problem))
        with self._lock:
            self._reads.add(read)
            self._patrol_later()
        return pa.RecordBatchReader.from_batches(read.schema(), read.batches())

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
            self._connection.notify_all()
            open_: list[Duplex] = [*self._watches, *self._open]
            reads, client, self._client = list(self._reads), self._client, None
        for read in reads:
            read.cancel()
        close_all(open_)
        self._timer.close()
        if client is not None:
            client.close()

    def abandon(self) -> list[Duplex]:
        """Give everything up at once, on the calling thread; the streams whose threads are about to end."""
        locked = self._lock.acquire(timeout=1.0)  # then nobody is about to begin a stream
        self._closed = True
        left: list[Duplex] = [*list(self._watches), *list(self._open)]
        for stream in left:
            stream.cancel()
        for read in list(self._reads):
            read.cancel()
        if locked:
            self._lock.release()
        return left

    def forked(self) -> None:
        """In a forked child: closed, and what it holds is never let go."""
        self._lock = threading.RLock()
        self._connection, self._connecting = threading.Condition(self._lock), False
        self._closed, self._closed_because = True, FORKED
        streams: list[Duplex] = [*self._watches, *self._open]
        for stream in streams:
            stream.forked()
        for read in self._reads:
            read.forked()
        leak(self._client)
        self._watches, self._streams, self._open = [], {}, set()

    # Connecting

    def _connected(self, timeout: float = CONNECT_SECONDS) -> flight.FlightClient:
        """The connection; waits up to ``timeout`` seconds for it. Raises Unknown(DISCONNECTED), and then nothing was sent."""
        deadline = time.monotonic() + timeout
        with self._connection:
            tried = False
            while self._client is None:
                if self._closed:
                    raise Unknown(Code.CLOSED, self._closed_because)
                if not self._connecting:
                    if self._last_problem is not None and (tried or self._backoff.left()):
                        raise unsent(self._last_problem.message)
                    self._connecting = True
                    threading.Thread(target=self._connect, name="escrowmq-connect", daemon=True).start()
                left = deadline - time.monotonic()
                if left <= 0 or not self._connection.wait(left):
                    raise unsent(f"no broker answers at {self.address}: it is silent, or slow")
                tried = not self._connecting
            if self._closed:
                raise Unknown(Code.CLOSED, self._closed_because)
            return self._client

    def _connect(self) -> None:
        """Try once, on a thread of its own: a broker that accepts and says nothing holds up nobody but this."""
        client = flight.FlightClient(f"grpc+tcp://{self._location}", generic_options=_CHANNEL)
        problem: EscrowError | None = None
        hello: Json = {}
        try:
            hello = _act(client, "hello", {}, CONNECT_SECONDS)
            self._recognise(hello.get("shard"))
        except EscrowError as raised:
            problem = unsent(f"no broker answers at {self.address}: {raised.message}")
        with self._connection:
            self._connecting = False
            if problem is None and not self._closed:
                self._backoff.worked()
                self._client, self._last_problem, self.hello = client, None, hello
                client = None
            elif problem is not None:
                self._last_problem = problem
                self._backoff.failed()
            self._connection.notify_all()
        if client is not None:
            client.close()

    def _recognise(self, shard: int | None) -> None:
        if self._stays and self._shard is not None and shard != self._shard:
            was, now = (f"{number:08x}" if number is not None else "unknown" for number in (self._shard, shard))
            raise Unknown(Code.DISCONNECTED, f"it was shard {was} and now says {now}: is that another data folder?")
        self._shard = shard

    def _stream(self, kind: Exchange, member: int | None) -> Stream:
        stream = self._streams.get((kind, member))
        if stream is not None and not stream.withdrawn:
            return stream
        client = self._connected(EXCHANGE_SECONDS)
        with self._lock:
            if self._closed:
                raise Unknown(Code.CLOSED, self._closed_because)
            stream = self._streams.get((kind, member))
            if stream is None or stream.withdrawn:
                try:
                    with flight_errors():
                        stream = Stream(client, kind, member, self._stream_broke)
                except EscrowError as problem:
                    self._lost(client, problem)
                    raise
                self._streams[kind, member] = stream
                self._open.add(stream)
                self._patrol_later()
            return stream

    def _stream_broke(self, stream: Stream) -> None:
        with self._lock:
            self._open.discard(stream)
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

    def _patrol_later(self) -> None:
        if not self._patrolling:
            self._patrolling = True
            self._timer.after(1.0, self._patrol)

    def _patrol(self) -> None:
        """Give up what is owed an answer for too long."""
        with self._lock:
            streams, reads = list(self._open), list(self._reads)
            self._patrolling = False
            if (streams or reads) and not self._closed:
                self._patrol_later()
        now = time.monotonic()
        for stream in streams:
            if stream.stalled(now):
                stream.cancel()
        for read in reads:
            if read.stalled(now):
                read.more_time()
                threading.Thread(target=_probe, args=(read,), name="escrowmq-probe", daemon=True).start()


def _probe(read: Read) -> None:
    """The broker may have long to look for the next batch: give the read up only if nobody is there."""
    try:
        _act(read.client, "hello", {}, CONNECT_SECONDS)
    except EscrowError:
        read.cancel()


_links: weakref.WeakSet[FlightLink] = weakref.WeakSet()
EXIT_SECONDS = 6.0
"""How long the end of the process waits for threads that are in the hands of gRPC; an action to connect is over by then."""


@atexit.register
def _exit() -> None:
    """End what the program has left open: a thread that is still within gRPC when Python is taken down brings the process down."""
    deadline = time.monotonic() + EXIT_SECONDS
    for stream in [stream for link in list(_links) for stream in link.abandon()]:
        stream.ends_by(deadline)
    while inside and time.monotonic() < deadline:
        time.sleep(0.01)


def _act(client: flight.FlightClient, name: str, request: Mapping[str, object], timeout: float) -> Json:
    options = flight.FlightCallOptions(timeout=timeout)
    inside.add(threading.get_ident())
    try:
        with flight_errors():
            results = list(client.do_action(flight.Action(name, json.dumps(request).encode()), options))
    finally:
        inside.discard(threading.get_ident())
    return wire.unpack_json(results[0].body.to_pybytes()) if results else {}
