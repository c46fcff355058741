"""A :class:`~escrowmq.wire.Link` over Arrow Flight. The protocol is in ``docs/protocol.md``.

Each kind of exchange has one stream and one reader thread; requests are pipelined and matched to answers by id. When a
stream breaks, all its requests fail with Unknown(DISCONNECTED), oldest first, before a new stream can be opened; who
sends again is the lanes' affair. A stream that owes an answer for too long, or a read, is cancelled, so that half-open connections
and stopped brokers cannot hold anybody for ever. What a stopping or stopped broker answers to anything (SHARD_STOPPED) is
DISCONNECTED here, too, and so is the answer of one that does not lead (NOT_LEADER).

A shard may have several brokers, of which one leads (:mod:`.seeking`). Above the link nothing is to be seen of that: another
that leads is what the same broker is after a restart.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pyarrow as pa
from pyarrow import flight

from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.addresses import Address
from escrowmq.client.links.looks import Looks, Waiters
from escrowmq.client.links.meeting import CONNECT_SECONDS, Met, act, meet, probe
from escrowmq.client.links.seeking import Seeker
from escrowmq.client.links.streams import (
    STALL_SECONDS,
    Checks,
    Duplex,
    NotLeading,
    Read,
    Stream,
    close_all,
    failed_future,
    flight_errors,
    inside,
    leak,
)
from escrowmq.errors import Code, EscrowError, Misuse, Unknown, unsent
from escrowmq.platform.forks import FORKED, tell_in_child
from escrowmq.platform.numbers import fraction
from escrowmq.wire import CheckStream, Exchange, ExchangeOptions, Json, ParcelsByExchange, ReadRequest

EXCHANGE_SECONDS = 0.25
"""How long an exchange waits for a connection: it may be begun on a thread that others need."""
DOUBT_SECONDS = 1.0
"""What is unanswered this long (past its own waiting time) makes the link ask the other brokers of the shard who leads,"""
DOUBT_PAUSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5)
"""again after these pauses while it stays so, because one soon leads if it is dead,"""
DOUBT_REST = 5.0
"""and anew after so many seconds (half to one and a half times): the broker is slow, or a network is."""
LOOK_SECONDS = 15.0
"""How often a subscription, to which a broker owes nothing, has the other brokers of the shard asked."""


class FlightLink(ParcelsByExchange):
    """The broker that leads one shard, at one of ``addresses`` or where one of them says. Connects when it is first used, and again, with
    back-off, after it was lost.

    ``follow``: also to addresses that brokers name. ``stays``: as one of several, it must always be the same shard. Another one
    at its address counts as no answer.
    """

    def __init__(self, addresses: Sequence[Address], *, follow: bool = True, stays: bool = False) -> None:
        self.hello: Json | None = None
        """What the broker said of itself when the last connection was made; another object for each connection."""
        self.host = addresses[0].host
        """Of the last connection."""
        self.address = f"escrow://{'|'.join(address.location for address in addresses)}"
        self.when_left: Callable[[EscrowError], None] = lambda problem: None
        """Called when the broker is left though the connection stands: another leads."""
        self._lock = threading.RLock()
        self._connection = threading.Condition(self._lock)  # notified when there is one, or a try came to nothing
        self._connecting = False
        self._seeker = Seeker(addresses, meet, follow=follow, stays=stays)
        self._met: Met | None = None
        self._client: flight.FlightClient | None = None
        self._streams: dict[tuple[Exchange, int | None], Stream] = {}  # those that take requests
        self._open: set[Stream] = set()  # those that owe an answer, too
        self._watches: list[Checks] = []
        self._reads: weakref.WeakSet[Read] = weakref.WeakSet()
        self._looks = Looks(self.several)
        self._waiters = Waiters()
        self._due_look = False  # the timer will call _look
        self._last_problem: EscrowError | None = None
        self._timer = Timer("escrowmq-link")
        self._patrolling = False
        self._looking = False
        self._look_at = self._doubt_at = 0.0
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
        with self._losing(client):
            return act(client, name, request, max(deadline - time.monotonic(), 0.001))

    def greeting(self, timeout: float) -> Json:
        """``hello`` of this connection; connects first if need be, for up to ``timeout`` seconds. Raises Unknown."""
        self._connected(timeout)
        assert self.hello is not None
        return self.hello

    @property
    def there(self) -> bool:
        """See :class:`escrowmq.wire.link.ReturningLink`."""
        return self._client is not None

    def when_there(self, call: Callable[[], None]) -> Callable[[], None]:
        """See :class:`escrowmq.wire.link.ReturningLink`."""
        forget = self._waiters.add(call)
        if self._client is not None or self._closed:
            self._waiters.tell()
        else:
            self._look_later()
        return forget

    @property
    def several(self) -> bool:
        """Whether the shard has several brokers, as far as is known: another one leads some seconds after one is lost."""
        return len(self._seeker.known) > 1

    def doubt(self, problem: EscrowError) -> None:
        """The broker may be another by now: connect anew for the next use. What is under way is left alone."""
        with self._lock:
            if self._client is not None:
                self._lost(self._client, problem)

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        client = self._connected()
        with self._losing(client):
            read = Read(client, request, partial(self._lost, client))
        with self._lock:
            self._reads.add(read)
            self._patrol_later()
        return pa.RecordBatchReader.from_batches(read.schema(), read.batches())

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """See :meth:`escrowmq.wire.Link.watch`."""
        client = self._connected(CONNECT_SECONDS)
        with self._losing(client):
            checks = Checks(client, session, on_checks, partial(self._lost, client))
        with self._lock:
            self._watches = [watch for watch in self._watches if not watch.broken]
            self._watches.append(checks)
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._patrol_later()
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
        self._seeker.close()
        for read in reads:
            read.cancel()
        close_all(open_)
        self._timer.close()
        if client is not None:
            client.close()
        self._waiters.tell()

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
        self._seeker.forked()
        streams: list[Duplex] = [*self._watches, *self._open]
        for stream in streams:
            stream.forked()
        for read in self._reads:
            read.forked()
        leak(self._client)
        self._watches, self._streams, self._open = [], {}, set()
        self._waiters = Waiters()

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
                    if self._last_problem is not None and (tried or self._looks.left(time.monotonic())):
                        raise self._refusal(self._last_problem)
                    self._begin_look()
                left = deadline - time.monotonic()
                if left <= 0 or not self._connection.wait(left):
                    raise unsent(f"no broker answers at {self.address}: it is silent, or slow")
                tried = not self._connecting
            if self._closed:
                raise Unknown(Code.CLOSED, self._closed_because)
            return self._client

    def _begin_look(self) -> None:
        """With the lock held."""
        self._connecting = True
        try:
            threading.Thread(target=self._connect, name="escrowmq-connect", daemon=True).start()
        except BaseException:  # no thread is to be had
            self._connecting = False
            self._looks.failed(time.monotonic(), fraction())
            raise

    def _look_later(self) -> None:
        """Look for a connection when it is due, if somebody waits for it."""
        with self._lock:
            if self._client is None and self._waiters and not (self._connecting or self._due_look or self._closed):
                self._due_look = True
                self._timer.after(self._looks.left(time.monotonic()), self._look)

    def _look(self) -> None:
        with self._lock:
            self._due_look = False
            wanted = self._client is None and self._waiters and not (self._connecting or self._closed)
            if wanted and self._looks.left(time.monotonic()) <= 0:
                try:
                    return self._begin_look()
                except RuntimeError as problem:
                    self._last_problem = unsent(f"no thread is to be had: {problem}")
        self._look_later()

    def _refusal(self, problem: EscrowError) -> EscrowError:
        if isinstance(problem, Misuse):
            return Misuse(problem.code, problem.message, problem.hint)
        return unsent(problem.message)

    def _connect(self) -> None:
        """Try once, on a thread of its own: a broker that accepts and says nothing holds up nobody but this."""
        problem: EscrowError | None = None
        met: Met | None = None
        try:
            met = cast(Met, self._seeker.seek())
        except Misuse as raised:
            problem = raised
        except EscrowError as raised:
            problem = unsent(f"no broker answers at {self.address}: {raised.message}")
        with self._connection:
            self._connecting = False
            if met is not None and not self._closed:
                self._looks.found(time.monotonic())
                self._client, self._last_problem, self.hello = met.client, None, met.hello
                self._met, self.host = met, met.address.host
                self._looks.several = self.several
                met = None
            elif problem is not None:
                self._last_problem = problem
                self._looks.failed(time.monotonic(), fraction(), self._seeker.told)
            self._connection.notify_all()
        if met is not None:
            met.close()
        elif problem is None:
            self._waiters.tell()
        else:
            self._look_later()

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
                        stream = Stream(client, kind, member, self._stream_broke, partial(self._lost, client))
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

    @contextmanager
    def _losing(self, client: flight.FlightClient) -> Iterator[None]:
        """Around a use of the connection: raises EscrowError, and connects anew for the next use if it broke."""
        try:
            with flight_errors():
                yield
        except EscrowError as problem:
            if problem.code is Code.DISCONNECTED:
                self._lost(client, problem)
            raise

    def _lost(self, client: flight.FlightClient, problem: EscrowError) -> None:
        """Connect anew for the next use; streams that are still open end by themselves, or, where another broker leads, are ended."""
        with self._lock:
            if self._client is not client:
                return
            self._client = None
            self._last_problem = problem
            self._looks.lost(time.monotonic())
            leaves = False
            if (
                isinstance(problem, NotLeading) and not self._closed
            ):  # one that stopped, and is the only one, comes back
                leaves = not problem.left or len(self._seeker.known) > 1
                if self._met is not None:
                    self._seeker.refused(self._met.address, problem.leader)
            if leaves:
                self._looks.failed(time.monotonic(), fraction())
                streams, self._streams = list(self._streams.values()), {}
                watches = list(self._watches)
        self._look_later()
        if leaves:
            for stream in streams:
                stream.withdraw()
            for watch in watches:
                watch.cancel()
            self.when_left(problem)

    def refused(self, hello: Json | None, problem: EscrowError) -> None:
        """A broker answered elsewhere that it does not lead; ``hello`` is of the connection to which that belongs."""
        with self._lock:
            client = self._client if hello is self.hello else None
        if client is not None:
            self._lost(client, problem)

    # Seeing whether it is there, and leads

    def _patrol_later(self) -> None:
        if not self._patrolling:
            self._patrolling = True
            self._timer.after(1.0, self._patrol)

    def _patrol(self) -> None:
        """Give up what is owed an answer for too long."""
        now = time.monotonic()
        with self._lock:
            streams, reads = list(self._open), list(self._reads)
            self._watches = watches = [watch for watch in self._watches if not watch.over]
            self._patrolling = False
            if (streams or reads or watches) and not self._closed:
                self._patrol_later()
            looks = bool(watches) and now >= self._look_at
        for stream in streams:
            if stream.stalled(now):
                stream.cancel()
        for read in reads:
            if read.stalled(now):
                read.more_time()
                threading.Thread(target=probe, args=(read,), name="escrowmq-probe", daemon=True).start()
        if self._owes():
            self.look_around(self._owes)
        elif looks:
            self.look_around(lambda: False)

    def _owes(self) -> bool:
        """Whether an answer has not come for so long that the broker is doubted."""
        soon = time.monotonic() + STALL_SECONDS - DOUBT_SECONDS
        with self._lock:
            owed: list[Stream | Read] = [*self._open, *self._reads]
        return any(one.stalled(soon) for one in owed)

    def look_around(self, silent: Callable[[], bool]) -> None:
        """See, on a thread, whether another broker of the shard leads by now; again for a while, as long as this one is ``silent``. Then what it owes
        fails as lost."""
        now = time.monotonic()
        with self._lock:
            if self._looking or self._closed or self._client is None or not self.several or now < self._doubt_at:
                return
            self._looking = True
            self._look_at = now + LOOK_SECONDS * (0.5 + fraction())
        try:
            args = (self._met, silent)
            threading.Thread(target=self._look_around, args=args, name="escrowmq-look", daemon=True).start()
        except RuntimeError:  # no thread is to be had
            self._looking = False

    def _look_around(self, met: Met, silent: Callable[[], bool]) -> None:
        try:
            newer = self._seeker.newer(met)
            for pause in DOUBT_PAUSES:
                if newer or self._client is not met.client or not silent():
                    break
                time.sleep(max(pause, self._seeker.told) * (0.5 + fraction()))
                newer = self._seeker.newer(met)
            else:
                self._doubt_at = time.monotonic() + DOUBT_REST * (0.5 + fraction())
        finally:
            self._looking = False
        if newer:
            problem = NotLeading(
                Code.DISCONNECTED, f"{met.address.url} is silent, and another broker of its shard leads"
            )
            with self._lock:
                streams, reads = list(self._open), list(self._reads)
            self._lost(met.client, problem)
            for stream in streams:
                if stream.client is met.client:
                    stream.cancel()
            for read in reads:
                if read.client is met.client:
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
