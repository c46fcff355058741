"""A :class:`~escrowmq.wire.Link` to a served broker: everything over one connection. The protocol is in
``docs/reference/protocol.md``.

Requests are pipelined and matched to answers by number. When the connection breaks, all its requests fail with
Unknown(DISCONNECTED), oldest first, before a new one takes any; lanes send again. SHARD_STOPPED and NOT_LEADER count as
DISCONNECTED.

A shard may have several brokers, of which one leads (:mod:`.seeking`). Callers do not see that: a new leader is like
the same broker after a restart. Only the welcome of a connection shows who leads.

Requests that find no connection are held while one is sought, for ``HOLD_SECONDS`` at most, and then fail as not sent.
They are also held while answers of an older connection are pending: requests of one kind take effect in their order.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.connection import SILENT_TICKS, TICK_SECONDS, Connection
from escrowmq.client.links.exchanges import (
    NOTHING,
    STALL_SECONDS,
    Action,
    Batches,
    NotLeading,
    Pending,
    Read,
    Request,
    Watch,
    failed_future,
    overdue_at,
)
from escrowmq.client.links.seeking import CONNECT_SECONDS, Met, Seeker, meet
from escrowmq.client.links.state import ProbeSchedule, Waiters
from escrowmq.errors import Code, Denied, EscrowError, Misuse, Unknown, error, unsent
from escrowmq.platform.forks import tell_in_child
from escrowmq.platform.numbers import fraction
from escrowmq.wire import REQUEST, BatchStream, CheckStream, Exchange, ExchangeOptions, Json, Parcel, ReadRequest
from escrowmq.wire.addresses import Address
from escrowmq.wire.credential import Credential
from escrowmq.wire.link import BrokerState, Phase
from escrowmq.wire.parcels import Done

HOLD_SECONDS = 0.25
"""How long a request waits for a connection (s)."""
CLOSE_SECONDS = 2.0
"""How long closing waits for pending requests (s)."""
PROBE_PAUSES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5)
"""Pauses (s) between probes of the other brokers while one of several is silent: another may lead soon."""
SERIES_PAUSE = 5.0
"""Pause (s, half to one and a half times) before the next series of probes."""
WATCH_PROBE_SECONDS = 15.0
"""How often a subscription without pending answers probes the other brokers of the shard (s)."""
EXIT_SECONDS = 1.0
_log = logging.getLogger(__name__)
_CLOSED = "the connection is closed"


class ServedLink:
    """A link to the leader of one shard, at one of ``addresses`` or at an address that a broker names. It connects at
    the first use, and again, with back-off, after a lost connection.

    ``follow``: also use addresses that brokers name. ``stays``: the shard must not change; a broker of another shard
    counts as no answer. ``tls``: TLS settings; None: without TLS. ``credential``: the token for greetings.

    On an event loop call :meth:`attach` before the first request. Then ``parcel`` and ``exchange`` never block, and the
    loop reads, writes and delivers answers. All methods remain thread-safe. A forked child connects again.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        follow: bool = True,
        stays: bool = False,
        tls: ssl.SSLContext | None = None,
        credential: Credential | None = None,
    ) -> None:
        scheme = "escrow+unix" if not addresses[0].port else "escrow" if tls is None else "escrows"
        self.address = f"{scheme}://{'|'.join(address.location for address in addresses)}"
        self._seeker = Seeker(
            addresses, lambda address: meet(address, tls, credential), follow=follow, stays=stays, scheme=scheme
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._waiters = Waiters()
        self._begin_anew()
        _links.add(self)
        tell_in_child(self)

    def _begin_anew(self) -> None:
        self.state = BrokerState(since=time.monotonic(), several=len(self._seeker.known) > 1)
        self._lock = threading.RLock()  # a signal handler may close
        self._changed = threading.Condition(self._lock)  # connected, or an attempt failed
        self._connection: Connection | None = None  # accepts requests
        self._open: set[Connection] = set()  # also those that only have pending answers
        self._held: deque[Request] = deque()
        self._indirect = False  # new requests are held, too
        self._pumping = False
        self._connecting = False
        self._attempt_scheduled = False  # the timer will call _look
        self._last_problem: EscrowError | None = None
        self._probes = ProbeSchedule(self.state.several)
        self._ticking = False
        self._probing_others = False
        self._next_probe_at = self._next_series_at = 0.0
        self._timer = Timer("escrowmq-link")
        self._outlet = Timer("escrowmq-checks")  # the thread that takes checks, so that the reader continues reading

    def on_fork(self) -> None:
        """Reset in a forked child: connections and pending requests are the parent's."""
        for connection in self._open:
            connection.on_fork()
        self._seeker.on_fork()
        self._loop = None
        self._waiters = Waiters()
        self._begin_anew()

    # Calls

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make this event loop, which need not run yet, read all connections. Call it before the first request."""
        self._loop = loop

    def parcel(self, parcel: Parcel, done: Done) -> None:
        """See :meth:`escrowmq.wire.Link.parcel`."""
        self._submit(Request(parcel.kind, parcel, None, parcel.options, done, self._on_answer))

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Future[pa.RecordBatch]:
        """See :meth:`escrowmq.wire.Link.exchange`."""
        if kind is not Exchange.RECEIVE and not batch.schema.equals(REQUEST[kind]):
            return failed_future(error(Code.BAD_BATCH, f"a batch of {kind} has other columns: {batch.schema}"))
        future = Pending()
        request = Request(kind, None, batch, options, future.finish, self._on_answer)
        if kind is Exchange.RECEIVE:
            future.withdraw = partial(self._withdraw, request)
        self._submit(request)
        return future

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> Json:
        """See :meth:`escrowmq.wire.Link.action`."""
        deadline = time.monotonic() + timeout
        connection = self._wait_connected(timeout)
        action = Action(name, request)
        connection.send(action)
        self._tick_later()
        try:
            return action.answer.result(max(deadline - time.monotonic(), 0.001))
        except TimeoutError:
            raise Unknown(Code.TIMED_OUT, f"{self.address} has not answered {name} in time") from None

    def read(self, request: ReadRequest) -> BatchStream:
        """See :meth:`escrowmq.wire.Link.read`."""
        connection = self._wait_connected()
        read = Read(request, connection)
        connection.send(read)
        self._tick_later()
        batches = Batches(read)
        return BatchStream(batches.schema, batches)

    def watch(self, session: int, on_checks: Callable[[pa.RecordBatch], None]) -> CheckStream:
        """See :meth:`escrowmq.wire.Link.watch`."""
        connection = self._wait_connected()
        outlet = self._outlet
        watch = Watch(session, lambda batch: outlet.after(0.0, partial(on_checks, batch)), connection)
        connection.send(watch)
        self._next_probe_at = time.monotonic() + WATCH_PROBE_SECONDS
        self._tick_later()
        watch.wait_begun(STALL_SECONDS)
        return watch

    def close(self) -> None:
        """Close all connections, after waiting up to ``CLOSE_SECONDS`` for the answers to requests that were sent. All
        other requests fail with Unknown."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connection, connections = None, list(self._open)
            held, self._held = self._held, deque()
            self.state.enter(Phase.AWAY, time.monotonic(), _CLOSED)
            self._changed.notify_all()
        for request in held:
            self._on_answer(request, Unknown(Code.CLOSED, _CLOSED))
        self._seeker.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for connection in connections:
            connection.retire(Unknown(Code.CLOSED, _CLOSED))
        for connection in connections:
            connection.end(deadline)
        self._timer.close()
        self._outlet.close()
        self._waiters.notify()

    def abandon(self) -> list[Connection]:
        """Shut all connections down, without waiting, because the process ends. Returns the connections."""
        self._closed = True
        left = list(self._open)
        for connection in left:
            connection.cut(Unknown(Code.CLOSED, _CLOSED))
        return left

    # State

    def when_there(self, call: Callable[[], None]) -> Callable[[], None]:
        """See :class:`escrowmq.wire.link.ReturningLink`."""
        forget = self._waiters.add(call)
        if self._connection is not None or self._closed:
            self._waiters.notify()
        else:
            self._connect_later()
        return forget

    # Requests

    def _submit(self, request: Request) -> None:
        connection = self._connection
        if connection is None or self._indirect or not connection.usable:
            if not self._hold(request):
                return
            connection = self._connection
        self._start(request, connection)

    def _hold(self, request: Request) -> bool:
        """Hold a request until a connection accepts it, or answer it with an error. Returns whether it can be sent now
        instead."""
        problem: EscrowError
        with self._lock:
            connection = self._connection
            if self._closed:
                problem = Unknown(Code.CLOSED, _CLOSED)
            elif self._may_send_directly():
                return True
            elif self._open or self._connecting or self._is_attempt_due():
                self._indirect = True
                request.expiry = time.monotonic() + HOLD_SECONDS
                if not self._held:
                    self._timer.after(HOLD_SECONDS, self._expire)
                self._held.append(request)
                if connection is None and not self._connecting:
                    if self._is_attempt_due():
                        self._try_connect()
                    else:
                        self._connect_later()
                return False
            else:
                problem = self._refusal()
        self._on_answer(request, problem)
        return False

    def _may_send_directly(self) -> bool:
        """Return whether no earlier request must be sent first. Requires the lock."""
        connection = self._connection
        return (
            connection is not None
            and connection.usable
            and not self._held
            and not self._pumping
            and all(one is connection or one.is_drained for one in self._open)
        )

    def _start(self, request: Request, connection: Connection | None) -> None:
        """Send a request over a connection; None: it was lost. If that fails, the error is its answer."""
        problem: EscrowError
        try:
            if connection is None:
                raise unsent("the connection was lost")
            request.connection = connection
            request.expiry = overdue_at(request.options)
            connection.send(request)
            if request.withdrawn:
                connection.cancel(request.number)
            if not self._ticking:
                self._tick_later()
            return
        except EscrowError as raised:
            problem = raised
        except Exception as raised:
            problem = Misuse(Code.BAD_ARGUMENT, f"cannot send: {raised}")
        except BaseException as raised:
            self._on_answer(request, Unknown(Code.DISCONNECTED, f"interrupted: {raised!r}"))
            raise
        self._on_answer(request, problem)

    def _pump(self) -> None:
        """Send held requests; one thread at a time."""
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                connection = self._connection
                ready = connection is not None and connection.usable
                ready = ready and all(one is connection or one.is_drained for one in self._open)
                if not ready or not self._held:
                    self._pumping = False
                    self._indirect = bool(self._held) or not ready
                    return
                request = self._held.popleft()
            self._start(request, connection)

    def _expire(self) -> None:
        """Fail requests that were held for too long without a connection, except those that wait for answers to older
        ones."""
        now = time.monotonic()
        late: list[Request] = []
        with self._lock:
            waits_for_older = any(not one.is_drained for one in self._open)
            while self._held and self._held[0].expiry <= now and self._connection is None and not waits_for_older:
                late.append(self._held.popleft())
            if self._held:
                self._timer.after(HOLD_SECONDS, self._expire)
        for request in late:
            self._on_answer(request, unsent(f"no broker answers at {self.address}: it is silent, or slow"))

    def _on_answer(self, request: Request, answer: Any) -> None:
        """Pass the answer or error of a request to its caller; only the first one counts."""
        if request.over:
            return
        request.over = True
        try:
            request.done(answer)
        except Exception:
            _log.exception("the answer to a request could not be delivered")
        request.batch = None  # request and future form a cycle: do not keep the batch in it

    def _withdraw(self, request: Request) -> None:
        """Withdraw a receive: answer it with no messages if it is held; cancel it at the broker if it was sent."""
        with self._lock:
            request.withdrawn = True
            held = request in self._held
            if held:
                self._held.remove(request)
            connection = request.connection
        if held:
            self._on_answer(request, NOTHING)
        elif connection is not None and request.number:
            connection.cancel(request.number)

    # Connecting

    def _wait_connected(self, timeout: float = CONNECT_SECONDS) -> Connection:
        """Return a connection that accepts requests, connecting if there is none; wait up to ``timeout`` seconds.
        Raises Unknown(DISCONNECTED); nothing was sent."""
        deadline = time.monotonic() + timeout
        with self._changed:
            tried = False
            while self._connection is None or not self._connection.usable:
                if self._closed:
                    raise Unknown(Code.CLOSED, _CLOSED)
                if self._connection is None and not self._connecting:
                    if self._last_problem is not None and (tried or not self._is_attempt_due()):
                        raise self._refusal()
                    self._start_connecting()
                left, connecting = deadline - time.monotonic(), self._connecting
                if left <= 0 or not self._changed.wait(left):
                    raise unsent(f"no broker answers at {self.address}: it is silent, or slow")
                tried = connecting and not self._connecting
            if self._closed:
                raise Unknown(Code.CLOSED, _CLOSED)
            return self._connection

    def _is_attempt_due(self) -> bool:
        return self._last_problem is None or not self._probes.seconds_left(time.monotonic())

    def _start_connecting(self) -> None:
        """Start a thread that connects once. Requires the lock. Raises RuntimeError if no thread can be started."""
        self._connecting = True
        self.state.enter(Phase.PROBING, time.monotonic(), self.state.reason)
        try:
            threading.Thread(target=self._connect, name="escrowmq-connect", daemon=True).start()
        except BaseException:
            self._connecting = False
            self._probes.add_failure(time.monotonic(), fraction())
            raise

    def _try_connect(self) -> None:
        try:
            self._start_connecting()
        except RuntimeError as problem:
            self._last_problem = unsent(f"no thread is to be had: {problem}")

    def _connect_later(self) -> None:
        """Schedule the next attempt to connect, if a request or a caller waits for a connection."""
        with self._lock:
            wanted = self._waiters or self._held
            if (
                self._connection is None
                and wanted
                and not (self._connecting or self._attempt_scheduled or self._closed)
            ):
                self._attempt_scheduled = True
                self._timer.after(self._probes.seconds_left(time.monotonic()), self._connect_if_due)

    def _connect_if_due(self) -> None:
        with self._lock:
            self._attempt_scheduled = False
            wanted = self._connection is None and not (self._connecting or self._closed)
            if wanted and (self._waiters or self._held) and self._probes.seconds_left(time.monotonic()) <= 0:
                return self._try_connect()
        self._connect_later()

    def _refusal(self) -> EscrowError:
        problem = self._last_problem
        if isinstance(problem, Misuse | Denied):
            return error(problem.code, problem.message, problem.hint)
        return unsent(problem.message if problem is not None else "the connection was lost")

    def _connect(self) -> None:
        """Search for the leader once and use its connection for the held requests; fail these if no broker leads. Runs
        on a thread of its own, because a silent broker delays it."""
        problem: EscrowError | None = None
        met: Met | None = None
        try:
            met = self._seeker.seek()
        except (Misuse, Denied) as raised:
            problem = raised
        except EscrowError as raised:
            problem = unsent(f"no broker answers at {self.address}: {raised.message}")
        connection: Connection | None = None
        failed: list[Request] = []
        with self._changed:
            self._connecting = False
            now = time.monotonic()
            self.state.several = self._probes.several = len(self._seeker.known) > 1
            if met is not None and not self._closed:
                self._probes.on_connected(now)
                patience = 1 if self.state.several else SILENT_TICKS
                connection = Connection(met, self, self._loop, patience=patience)
                self._connection, self._last_problem = connection, None
                self._open.add(connection)
                self.state.enter(Phase.UP, now)
            elif problem is not None:
                self._last_problem = problem
                self._probes.add_failure(now, fraction(), self._seeker.requested_pause)
                self.state.enter(Phase.AWAY, now, problem.message)
                self.state.next_probe = self._probes.due
                if all(one.is_drained for one in self._open):
                    failed, self._held = list(self._held), deque()
            self._changed.notify_all()
        if connection is not None:
            connection.begin()
            self._pump()
            self._waiters.notify()
        elif met is not None:
            met.close()
        for request in failed:
            self._on_answer(request, self._refusal())
        if problem is not None:
            self._connect_later()

    def on_ended(self, connection: Connection) -> None:
        """Remove a connection that has ended, after its pending requests have failed."""
        with self._lock:
            self._open.discard(connection)
            if self._connection is connection:
                self._lose(Unknown(Code.DISCONNECTED, "the connection was lost"))
            dropped: list[Request] = []
            if connection.lost_requests:
                dropped, self._held = list(self._held), deque()
        for request in dropped:  # after the lost ones: all are sent again in order
            self._on_answer(request, unsent("a request before it was lost"))
        self._pump()
        self._connect_later()

    def _lose(self, problem: EscrowError, *, useless: bool = False) -> None:
        """Record that there is no connection to use, because of ``problem``. ``useless``: its broker does not lead.
        Requires the lock."""
        now = time.monotonic()
        self._connection = None
        self._indirect = True
        self._last_problem = problem
        self._probes.on_disconnected(now, fraction(), useless=useless)
        self.state.enter(Phase.AWAY, now, problem.message)
        self.state.next_probe = self._probes.due
        self._changed.notify_all()

    def on_gone(self, connection: Connection) -> None:
        """Hold new requests: the connection's broker is stopping, and accepts no more."""
        with self._lock:
            if self._connection is connection:
                self._indirect = True
                self.state.enter(Phase.DRAINING, time.monotonic(), "the broker is stopping")
        self._tick_later()

    def on_drained(self, connection: Connection) -> None:
        """Connect again: this connection accepts no more, and has no pending answers."""
        with self._lock:
            if self._connection is connection:
                self._lose(Unknown(Code.DISCONNECTED, "the broker is stopping"))
        self._pump()
        self._connect_later()

    def on_not_leading(self, connection: Connection, problem: NotLeading) -> None:
        """Search for the leader: this broker does not lead, and its pending requests are lost or rejected."""
        with self._lock:
            if self._connection is not connection:
                return
            leaves = not problem.left or self.state.several  # one that stopped, and is the only one, comes back
            self._lose(problem, useless=leaves)
            self._seeker.refused(connection.met.address, problem.leader)
        if leaves and problem.left:
            connection.cut(problem)
        else:
            connection.retire(Unknown(Code.DISCONNECTED, problem.message))
        self._connect_later()

    # Seeing whether it is there, and leads

    def _tick_later(self) -> None:
        with self._lock:
            if self._ticking or self._closed:
                return
            self._ticking = True
        self._timer.after(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._ticking = False
            connections = list(self._open)
        busy = [connection.tick() for connection in connections]  # each of them
        if self._is_doubtful():
            self._probe_others(self._is_doubtful)
        elif time.monotonic() >= self._next_probe_at and any(connection.watches for connection in connections):
            self._probe_others(lambda: False)
        if any(busy):
            self._tick_later()

    def _is_doubtful(self) -> bool:
        with self._lock:
            return any(connection.doubtful for connection in self._open)

    def _probe_others(self, is_silent: Callable[[], bool]) -> None:
        """Probe the shard's other brokers on a thread while ``is_silent`` returns true, at least once; if another one
        leads, leave this one."""
        now = time.monotonic()
        with self._lock:
            connection = self._connection
            if (
                self._probing_others
                or self._closed
                or connection is None
                or not self.state.several
                or now < self._next_series_at
            ):
                return
            self._probing_others = True
            self._next_probe_at = now + WATCH_PROBE_SECONDS * (0.5 + fraction())
        try:
            args = (connection, is_silent)
            threading.Thread(target=self._probe_others_on_thread, args=args, name="escrowmq-look", daemon=True).start()
        except RuntimeError:  # no thread is to be had
            self._probing_others = False

    def _probe_others_on_thread(self, connection: Connection, is_silent: Callable[[], bool]) -> None:
        met = connection.met
        try:
            newer = self._seeker.newer(met)
            for pause in PROBE_PAUSES:
                if newer or self._connection is not connection or not is_silent():
                    break
                time.sleep(max(pause, self._seeker.requested_pause) * (0.5 + fraction()))
                newer = self._seeker.newer(met)
            else:
                self._next_series_at = time.monotonic() + SERIES_PAUSE * (0.5 + fraction())
        finally:
            self._probing_others = False
        if newer:
            text = f"{met.address.url} is silent, and another broker of its shard leads"
            self.on_not_leading(connection, NotLeading(Code.DISCONNECTED, text))


_links: weakref.WeakSet[ServedLink] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """Shut all connections down at the exit of the interpreter, so that the reading threads end while Python is still
    whole."""
    deadline = time.monotonic() + EXIT_SECONDS
    for connection in [connection for link in list(_links) for connection in link.abandon()]:
        connection.ends_by(deadline)
