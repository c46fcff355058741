"""A :class:`~escrowmq.wire.Link` whose small requests take the lean carrier, and everything else Flight.

Parcels, receives and exchanges of small batches go over a plain socket (:mod:`.connection`); actions, reads, subscriptions and
large batches over the :class:`~.flight.FlightLink` behind it. Where the lean carrier cannot be reached (the broker has none, its
port is closed or swallowed by a firewall, somebody else answers there) everything takes Flight, and it is tried again now and
then. A user sees no difference but speed: the order of requests, errors, deadlines and closing are those of Flight.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.connection import NOTHING, SILENT_TICKS, TICK_SECONDS, LeanConnection, encoded
from escrowmq.client.links.flight import FlightLink
from escrowmq.client.links.places import place_of, reach
from escrowmq.client.links.streams import CLOSE_SECONDS, STALL_SECONDS, NotLeading
from escrowmq.client.links.ways import Carrier, Pending, Request, Way
from escrowmq.errors import Code, EscrowError, Misuse, Unknown, unsent
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.forks import FORKED, tell_in_child
from escrowmq.wire import PARCEL_BYTES, REQUEST, CheckStream, Exchange, ExchangeOptions, Json, Parcel, ReadRequest
from escrowmq.wire.parcels import Answer, Done

HOLD_SECONDS = 0.25
"""How long requests wait for the first try to reach the lean carrier; then they take Flight while it goes on."""
HELLO_SECONDS = 5.0
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 30.0
"""Seconds before the lean carrier is tried again. A new connection of Flight's, to a broker that is back, tries it at once."""
EXIT_SECONDS = 1.0

_log = logging.getLogger(__name__)


class LeanLink:
    """One broker, over both carriers. Owns ``flight``. Connects when it is first used.

    On an event loop call :meth:`attach` before the first request. Then ``parcel`` and ``exchange`` never block. While the lean
    carrier is there, the loop itself reads and writes, and ``done`` is called on the loop; what has to take Flight is sent by a
    thread of this link, and answered on a thread. All methods stay safe for other threads.
    """

    def __init__(self, flight: FlightLink) -> None:
        self.address = flight.address
        self._flight = flight
        flight.when_left = self._left
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()  # guards the ways, and which connection there is; a signal handler may close
        self._ways: dict[tuple[Exchange, object], Way] = {}
        self._lean: LeanConnection | None = None
        self._connections: set[LeanConnection] = set()  # those that owe an answer, too
        self._seeking = False
        self._holding = False  # requests wait for what comes of it
        self._tried: Json | None = None  # the greeting of the connection of Flight's whose lean carrier was tried
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF)
        self._timer = Timer("escrowmq-lean-timer")
        self._outlet = Timer("escrowmq-lean-flight")  # a thread that may block on Flight
        self._posted: deque[Request] = deque()  # what it sends
        self._ticking = False
        self._closed = False
        self._closed_because = "the connection is closed"
        _links.add(self)
        tell_in_child(self)

    @property
    def there(self) -> bool:
        """See :class:`escrowmq.wire.link.ReturningLink`."""
        return self._flight.there

    def when_there(self, call: Callable[[], None]) -> Callable[[], None]:
        """See :class:`escrowmq.wire.link.ReturningLink`."""
        return self._flight.when_there(call)

    @property
    def several(self) -> bool:
        """See :attr:`FlightLink.several`."""
        return self._flight.several

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on connections are read by this event loop, which need not run yet. Before the first request."""
        self._loop = loop

    @property
    def lean(self) -> bool:
        """Whether the lean carrier is connected at this moment."""
        connection = self._lean
        return connection is not None and connection.usable

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """See :meth:`escrowmq.wire.Link.parcel`."""
        self._submit(Request(parcel.kind, parcel, None, parcel.options, done))

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        future = Pending()
        request = Request(kind, None, batch, options, future.finish)
        if kind is Exchange.RECEIVE:
            future.withdraw = partial(self._withdraw, request)
        else:
            request.fits = pa.ipc.get_record_batch_size(batch) <= PARCEL_BYTES and batch.schema.equals(REQUEST[kind])
        self._submit(request)
        return future

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """See :meth:`escrowmq.wire.Link.action`."""
        return self._flight.action(name, request, timeout)

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """See :meth:`escrowmq.wire.Link.read`."""
        return self._flight.read(request)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """See :meth:`escrowmq.wire.Link.watch`."""
        return self._flight.watch(session, on_checks)

    def close(self) -> None:
        """End everything; what is unanswered fails with Unknown."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lean, connections = None, list(self._connections)
            held = [request for way in self._ways.values() for request in way.dropped()]
        for request in held:
            self._tell(request, self._refusal())
        deadline = time.monotonic() + CLOSE_SECONDS
        for connection in connections:
            connection.retire(self._refusal())
        self._flight.close()
        for connection in connections:
            connection.end(deadline)
        self._timer.close()
        self._outlet.close()
        while self._posted:  # the thread has ended before it sent them
            self._answered(self._posted.popleft(), self._refusal())

    def abandon(self) -> list[LeanConnection]:
        """Cut off what is open, on the calling thread; the connections that are about to end."""
        self._closed = True
        left = list(self._connections)
        for connection in left:
            connection.cut(self._refusal())
        return left

    def forked(self) -> None:
        """In a forked child: closed; the sockets are the parent's."""
        self._lock = threading.RLock()
        self._closed, self._closed_because = True, FORKED
        for connection in self._connections:
            connection.forked()
        self._lean, self._connections, self._ways = None, set(), {}
        self._posted.clear()

    def _refusal(self) -> Unknown:
        return Unknown(Code.CLOSED, self._closed_because)

    # Which carrier a request takes

    def _submit(self, request: Request) -> None:
        carrier = problem = None
        lean, starts = self._lean, False
        while carrier is None:
            if lean is not None and request.fits and request.frame is None:
                _make_frame(request, lean)
            with self._lock:
                if self._closed:
                    problem = self._refusal()
                    break
                lean = self._there()
                if lean is not None and request.fits and request.frame is None:
                    continue  # it has come this moment
                way = self._ways.get(request.key)
                if way is None:
                    way = self._ways[request.key] = Way()
                if not (way.held or way.pumping or (self._holding and request.fits)):
                    carrier = way.choose(request, lean)
                if carrier is None:
                    way.held.append(request)
                    return
                starts = self._take(way, request, carrier, lean)
        if problem is not None:
            self._tell(request, problem)
        elif starts:
            self._start(request)

    def _take(self, way: Way, request: Request, carrier: Carrier, lean: LeanConnection | None) -> bool:
        """It takes this carrier now; whether the calling thread is to start it. With the lock held."""
        request.carrier = carrier
        way.took(carrier, lean)
        if carrier is Carrier.LEAN:
            request.connection = lean
            return True
        if not (self._loop or self._posted or way.pumping or any(c.reading() for c in self._connections)):
            return True
        self._posted.append(request)  # Flight may block, or another stands before it that may
        self._outlet.after(0.0, self._post)
        return False

    def _start(self, request: Request) -> None:
        """Send it on the carrier that it has taken."""
        try:
            if request.carrier is Carrier.LEAN:
                self._send(request)
            else:
                self._fly(request)
        except EscrowError as problem:
            self._answered(request, problem)
        except BaseException as problem:
            self._answered(request, Unknown(Code.DISCONNECTED, f"interrupted: {problem!r}"))
            raise

    def _send(self, request: Request) -> None:
        wait_ms: Any = request.options.get("wait_ms", 0)
        request.expiry = time.monotonic() + wait_ms / 1000 + STALL_SECONDS
        request.connection.send(request)
        if request.withdrawn:
            request.connection.withdraw(request)
        if not self._ticking:
            self._tick_later()

    def _post(self) -> None:
        """On the thread for that: send the next that may block."""
        try:
            request = self._posted.popleft()
        except IndexError:
            return  # the link is closed
        self._start(request)

    def _fly(self, request: Request) -> None:
        try:
            if request.parcel is not None:
                self._flight.parcel(request.parcel, partial(self._answered, request))
                return
            future = self._flight.exchange(request.kind, request.batch, request.options)
        except (EscrowError, KeyboardInterrupt, SystemExit):
            raise
        except Exception as problem:
            bug = Misuse(Code.BAD_ARGUMENT, f"cannot send: {problem}")
            bug.__cause__ = problem
            raise bug from problem
        request.flown = future
        future.add_done_callback(partial(self._landed, request))
        if request.withdrawn:
            future.cancel()

    def _landed(self, request: Request, done: Future[pa.RecordBatch]) -> None:
        problem = Unknown(Code.CLOSED) if done.cancelled() else done.exception()
        if problem is None:
            self._answered(request, done.result())
        else:
            known = isinstance(problem, EscrowError)
            self._answered(request, problem if known else Unknown(Code.CLOSED, f"the link failed: {problem!r}"))

    def _answered(self, request: Request, answer: Answer | pa.RecordBatch | EscrowError) -> None:
        """What came of a request that had taken a carrier. Those behind it that were held may go, or are lost with it."""
        if request.over:
            return
        request.over = True
        failed = isinstance(answer, EscrowError)
        if isinstance(answer, NotLeading) and request.connection is not None:
            self._flight.refused(request.connection.greeting, answer)
        if failed:
            self._tell(request, answer)  # first: what is newer must not leave before its lane knows
        dropped: list[Request] = []
        pump = False
        with self._lock:
            way = self._ways.get(request.key)
            if way is not None:  # else of a forked child
                way.ended(request.carrier)
                if isinstance(answer, EscrowError) and answer.code is Code.DISCONNECTED:
                    dropped = way.dropped()
                pump = bool(way.held) and not way.pumping
                if request.kind is Exchange.RECEIVE and way.idle:
                    del self._ways[request.key]
        if not failed:  # last: who is woken wants the interpreter, and this thread is about to let go of it
            self._tell(request, answer)
        request.batch = request.frame = (
            None  # it and its future hold each other until cycles are looked for: not what it brought, too
        )
        for one in dropped:
            self._tell(one, unsent("a request before it was lost"))
        if way is not None and pump:
            self._pump(way)

    def _tell(self, request: Request, answer: Answer | pa.RecordBatch | EscrowError) -> None:
        try:
            request.done(answer)
        except Exception:
            _log.exception("the answer to a request could not be given")

    def _pump(self, way: Way) -> None:
        """Send what was held and may go; one thread at a time."""
        with self._lock:
            if way.pumping:
                return
            way.pumping = True
        while True:
            carrier, starts = None, False
            with self._lock:
                request = way.held[0] if way.held else None
                lean = self._there()
                framed = request is None or lean is None or not request.fits or request.frame is not None
                if request is not None and framed and not (self._holding and request.fits):
                    carrier = way.choose(request, lean)
                    if carrier is not None:
                        starts = self._take(way, way.held.popleft(), carrier, lean)
                if framed and carrier is None:
                    way.pumping = False
                    return
            if request is not None and starts:
                self._start(request)
            elif request is not None and lean is not None and carrier is None:
                _make_frame(request, lean)

    def _withdraw(self, request: Request) -> None:
        """A receive is taken back, wherever it is."""
        with self._lock:
            request.withdrawn = True
            way = self._ways.get(request.key)
            held = way is not None and request in way.held
            if held and way is not None:
                way.held.remove(request)
            connection, flown = request.connection, request.flown
        if held:
            self._tell(request, NOTHING)
        elif connection is not None:
            connection.withdraw(request)
        elif flown is not None:
            flown.cancel()

    # The lean connection

    def _there(self) -> LeanConnection | None:
        """The lean connection that takes requests. Without one it is sought, unless that has just failed. With the lock held."""
        if self._lean is not None and self._lean.usable:
            return self._lean
        if not self._seeking and not self._closed:
            rested = not self._backoff.left()
            news = self._flight.hello is not self._tried or (self._tried is None and rested)
            if news or rested:
                self._seeking, self._holding = True, news
                try:
                    threading.Thread(target=self._seek, name="escrowmq-lean-connect", daemon=True).start()
                except RuntimeError:  # no thread is to be had
                    self._seeking = self._holding = False
                    self._backoff.failed()
                if self._holding:
                    self._timer.after(HOLD_SECONDS, self._release)
        return None

    def _seek(self) -> None:
        """Try once to reach the lean carrier; a broker that accepts and says nothing holds up nobody but this thread."""
        connection: LeanConnection | None = None
        try:
            connection = self._reached()
        except EscrowError as problem:
            _log.debug("%s: %s", self.address, problem.message)
        except Exception:
            _log.exception("%s: the lean carrier could not be tried", self.address)
        with self._lock:
            self._seeking, closed = False, self._closed
            if connection is None:
                self._backoff.failed()
            elif not closed:
                self._lean = connection
                self._connections.add(connection)
        if connection is not None:
            if closed:
                connection.give_up(self._refusal())
            else:
                connection.begin()
        self._release()

    def _reached(self) -> LeanConnection:
        """A new connection. Raises EscrowError."""
        greeting = hello = self._flight.greeting(HELLO_SECONDS)
        if greeting is self._tried:  # it was tried with that: things may be otherwise now
            hello = self._flight.action("hello", {}, HELLO_SECONDS)
            if _run(hello) != _run(greeting):
                self._flight.doubt(Unknown(Code.DISCONNECTED, "the broker was restarted, or is another"))
                raise unsent("the broker was restarted, or is another")
        self._tried = greeting
        if (place := place_of(self._flight.host, hello)) is None:
            raise unsent("the broker has no lean carrier")
        patience = 1 if self.several else SILENT_TICKS
        told = (self._answered, self._ended, self._loop)
        return LeanConnection(*reach(place), *told, greeting=greeting, patience=patience)

    def _release(self) -> None:
        """What waited for the lean carrier goes now, one way or the other."""
        with self._lock:
            self._holding = False
            ways = [way for way in self._ways.values() if way.held]
        for way in ways:
            self._pump(way)

    def _ended(self, connection: LeanConnection) -> None:
        with self._lock:
            self._connections.discard(connection)
            if connection.answers:
                self._backoff.worked()
            self._backoff.failed()
            if self._lean is connection:
                self._lean = None
            closed = self._closed
        there = connection.greeting is self._flight.hello  # else it was of another, which has been left
        if not closed and there:  # the broker may have been restarted, or be another: gRPC would not notice
            self._flight.doubt(Unknown(Code.DISCONNECTED, "the lean carrier was lost"))

    def _left(self, problem: EscrowError) -> None:
        """Another broker leads: what this one was sent and owes is lost, or is refused by it."""
        with self._lock:
            self._lean, connections = None, list(self._connections)
        for connection in connections:
            if not isinstance(problem, Unknown) or problem.left:
                connection.cut(problem)
            else:
                connection.retire(problem)

    def _is_doubtful(self) -> bool:
        with self._lock:
            return any(connection.doubtful for connection in self._connections)

    def _tick_later(self) -> None:
        with self._lock:
            if self._ticking or self._closed:
                return
            self._ticking = True
        self._timer.after(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._ticking = False
            connections = list(self._connections)
        busy = [connection.tick() for connection in connections]  # each of them
        if self._is_doubtful():
            self._flight.look_around(self._is_doubtful)
        if any(busy):
            self._tick_later()


def _run(hello: Json) -> tuple[object, object]:
    """What tells one run of a broker from others."""
    return hello.get("shard"), hello.get("epoch")


def _make_frame(request: Request, lean: LeanConnection) -> None:
    """What the lean carrier cannot take, Flight is given, and then the broker or Arrow says what is wrong with it."""
    try:
        request.frame = encoded(request)
        request.fits = len(request.frame) <= lean.most
    except Exception:
        request.fits = False


_links: weakref.WeakSet[LeanLink] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """End the threads that read while Python is still whole."""
    deadline = time.monotonic() + EXIT_SECONDS
    for connection in [connection for link in list(_links) for connection in link.abandon()]:
        connection.ends_by(deadline)
