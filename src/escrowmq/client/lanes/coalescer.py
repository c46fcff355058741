"""A lane: combines the rows, and the small batches, of concurrent callers of one client into shared batches.

Theory of operation. A lane carries rows of one kind of exchange over one link.

1. A row is added to the open request. If nothing is in flight the request leaves at once; otherwise it waits, and rows
   that arrive meanwhile are sent with it. A second, third and fourth request may leave before the first is answered,
   but only with ``WORTH_OVERLAPPING`` rows or more, and with at least as many as are in flight: a request costs about
   as much as some hundred rows, so small requests wait and grow, big ones overlap. A caller's whole batch joins the
   batches that wait before it, up to the size of a request of rows. A request of few rows travels as a parcel
   (:mod:`escrowmq.wire.parcels`), others and batches as a batch.
2. Requests leave in the order in which they were filled; one thread at a time sends (``_pumping``).
3. A request that the connection may have lost waits until every other request in flight was answered or lost too; then
   all of them are sent again, in order and unchanged (the same rows or bytes, the same ids), before anything newer.
4. So does a request that the broker refuses because it has forgotten the session (it applied nothing of it), after the
   session was renewed. While requests of one session are in flight, none leaves under another, which could overtake.
5. If the broker is one of several and counts as away, rows that surely never left are returned with BROKER_AWAY, if
   they may go elsewhere (``moves``). Rows that may have left stay here, because they must not be in two places; with
   ``repeats`` they are returned with Unknown after three more tries.
6. A request's deadline counts from its sealing. Then its callers get Unknown(TIMED_OUT), and a late answer is ignored.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.client.lanes.filling import MAX_BYTES, MAX_ROWS, Filling
from escrowmq.client.lanes.request import Attended, Codec, Options, Request, copies
from escrowmq.client.lanes.returning import call_when_there
from escrowmq.client.lanes.timer import Timer
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, Unknown
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.forks import FORKED, tell_in_child
from escrowmq.wire import Exchange, ExchangeOptions, Link
from escrowmq.wire.parcels import Answer, Row

MAX_IN_FLIGHT = 4
WORTH_OVERLAPPING = 64
MAX_WAITING_ROWS = 1 << 18
"""Rows that may wait in one lane before Overloaded(QUEUE_FULL): bounds the memory of a client whose broker is away."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0
"""Seconds before lost requests are sent again."""
TRIES = 3
"""Resends of a request that may have left before it may go to another broker, if its producer has chosen that."""
OVERDUE_SECONDS = 1.0
"""With several brokers: probe a broker if a request is unanswered this long."""


class Lane(Filling, ABC):
    """One coalescing lane. Thread-safe. ``waiter()`` makes the awaitable of a caller's result."""

    def __init__(
        self,
        link: Link,
        kind: Exchange,
        codec: Codec,
        options: Options,
        timer: Timer,
        *,
        waiter: Callable[[], Any],
        timeout: float,
        max_waiting: int = MAX_WAITING_ROWS,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        renew: Callable[[int], None] | None = None,
        attended: Attended | None = None,
        moves: Callable[[Row | None], bool] = lambda _: True,
        repeats: Callable[[Row | None], bool] = lambda _: False,
        wanders: Callable[[Row | None], bool] = lambda _: False,
    ) -> None:
        super().__init__(timeout, max_rows, max_bytes)
        self._link, self._kind, self._codec, self._options = link, kind, codec, options
        self._timer = timer
        self.waiter = waiter
        self._max_waiting = max_waiting
        self._renew = renew  # the session of this number
        self._attended, self._moves, self._repeats, self._wanders = attended, moves, repeats, wanders
        self.overdue = False  # an answer of one of several brokers is late
        self._forgotten = 0  # the number of the session to be renewed before anything is sent
        self._renewing = False
        self._sending = threading.RLock()  # no request leaves between the loss of the connection and ``broken``
        self._reset()
        self._pumping = False
        self._draining = 0  # callers that wait until nothing is left
        self.broken = False  # the connection was lost, and requests wait to be sent again
        self._worth = 1.0  # rows that must wait before a request may leave; infinite while none may
        self._backoff = Backoff(FIRST_BACKOFF, LAST_BACKOFF)
        self._awaits_link = False
        self._sweeping = False
        self._closed = False
        self._closed_because = "the producer or consumer is closed"
        tell_in_child(self)

    def on_fork(self) -> None:
        """Close and empty the lane in a forked child, because the rows that were added are the parent's."""
        self._sending = threading.RLock()
        self._closed, self._closed_because = True, FORKED
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight: list[Request] = []
        self._empty()

    # Calls

    def call(self, row: Row, size: int) -> Awaitable[Any]:
        waiter: Awaitable[Any] = self.waiter()
        self.add(row, waiter, size)
        return waiter

    def call_batch(self, batch: pa.RecordBatch) -> Awaitable[tuple[pa.RecordBatch, bool]]:
        """Send a whole batch. Returns an awaitable of its answer, and whether it was sent again (then it may have been
        applied before)."""
        waiter: Awaitable[Any] = self.waiter()
        self.add_batch(batch, waiter)
        return waiter

    def add(self, row: Row, waiter: Any, size: int) -> None:
        """Put a row (of about ``size`` bytes) into the open request; its result goes to ``waiter`` unless that is None.
        A function as ``waiter`` is called with the value or the EscrowError, on any thread; it must not block.

        Raises Overloaded(QUEUE_FULL) when too many rows wait, Unknown(CLOSED) after :meth:`close`.
        """
        with self._lock:
            if self._closed:
                raise Unknown(Code.CLOSED, self._closed_because)
            rows = self._open
            if self.waiting >= self._max_waiting:
                raise Overloaded(Code.QUEUE_FULL)
            rows.append(row)
            self.waiting += 1
            self._open_waiters.append(waiter)
            self._open_bytes += size
            if len(rows) >= self._max_rows or self._open_bytes >= self._max_bytes:
                self._seal()
            if self._pumping or self.waiting < self._worth:
                if not self._sweeping:
                    self._sweep_later()
                return
            self._pumping = True
        self._start_pump()

    def add_batch(self, batch: pa.RecordBatch, waiter: Any) -> None:
        """Queue a whole batch to be sent in order with the rows; ``waiter`` gets its answer, and whether it was sent
        again. Raises as :meth:`add`."""
        with self._lock:
            if self._closed:
                raise Unknown(Code.CLOSED, self._closed_because)
            if self.waiting and self.waiting + batch.num_rows > self._max_waiting:
                raise Overloaded(Code.QUEUE_FULL)
            self._seal_batch(batch, waiter)
            self._sweep_later()
        self._go_on()

    def drain(self, timeout: float) -> bool:
        """Wait until all rows of the lane, later ones too, are answered or given up. Returns False if that takes longer
        than ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):  # a signal handler may have interrupted the thread that holds it
            return False
        self._draining += 1
        try:
            return self._idle.wait_for(self._is_empty, max(deadline - time.monotonic(), 0.0))
        finally:
            self._draining -= 1
            self._lock.release()

    def close(self) -> None:
        self._closed = True
        if not self._lock.acquire(timeout=self._timeout):  # as in drain(); the sweep then answers the rest
            return
        try:
            self._seal()
            left = [*self._in_flight, *self._sealed]
            self._in_flight.clear()
            self._weigh()
            self._sealed.clear()
            self.waiting = 0
            left = [request for request in left if _settle(request)]
            self._idle.notify_all()
        finally:
            self._lock.release()
        for request in left:
            self._deliver(request.waiters, copies(Unknown(Code.CLOSED), request))

    def _start_pump(self) -> None:
        self._pump()

    @abstractmethod
    def _deliver(self, waiters: list[Any], results: list[Any]) -> None:
        """Give each waiter that is not None its result, without blocking."""

    # Sending

    def _is_empty(self) -> bool:
        return not self._open and not self._sealed and not self._in_flight

    def _weigh(self) -> None:
        """Set how many rows must wait before the next request may leave: 1 if none is in flight, infinite while none
        may leave. Called when ``_in_flight`` or ``broken`` changes."""
        in_flight = len(self._in_flight)
        if self.broken or in_flight >= MAX_IN_FLIGHT:
            self._worth = math.inf
        else:
            self._worth = max(sum(map(len, self._in_flight)), WORTH_OVERLAPPING) if in_flight else 1

    def _take(self) -> Request | None:
        """Remove the next waiting request, which is in flight then, and return it; None when there is none or it has to
        wait."""
        if self.waiting < self._worth:
            return None
        if not self._sealed:
            self._seal()
        request = self._sealed.popleft()
        self.waiting -= len(request)
        self._in_flight.append(request)
        self._weigh()
        self._sweep_later()
        return request

    def _pump(self) -> None:
        """Send until no request may leave. Only the holder of ``_pumping`` may call this."""
        while True:
            with self._lock:
                request = self._take()
                if request is None:
                    self._pumping = False
                    return
            self._dispatch(request)

    def _dispatch(self, request: Request, again: ExchangeOptions | None = None) -> None:
        """Send a request over the link; a failure to send is handled as its answer. ``again``: the options of all
        requests that are sent again together; None: the lane's options now."""
        future: Future[pa.RecordBatch] | None = None
        try:
            batch = None if request.is_parcel else request.encode(self._codec)
            with self._sending:
                options: Any = self._options() if again is None else again
                request.session = options.get("session", 0)
                overtakes = any(other.session != request.session for other in tuple(self._in_flight))
                if again is None and (self.broken or overtakes):  # lost requests go first
                    self._on_failure(request, Unknown(Code.DISCONNECTED))
                    return
                request.sent += 1
                on_answer = partial(self._on_answer, request, request.resends)
                if batch is None:
                    self._link.parcel(request.pack(self._codec, self._kind, options), on_answer)
                else:
                    future = self._link.exchange(self._kind, batch, options)
        except EscrowError as problem:
            self._on_failure(request, problem)
        except (KeyboardInterrupt, SystemExit):  # of this caller; the request may hold rows of others
            self._on_failure(request, Unknown(Code.DISCONNECTED, "interrupted"))
            self._pumping = False
            raise
        except Exception as problem:
            bug = Misuse(Code.BAD_ARGUMENT, f"cannot send: {problem}")
            bug.__cause__ = problem
            self._on_failure(request, bug)
        if future is not None:
            future.add_done_callback(lambda done: on_answer(done.exception() or done.result()))

    # Answers

    def _on_answer(self, request: Request, attempt: int, answer: Answer | pa.RecordBatch | BaseException) -> None:
        if request.settled or request.resends != attempt:
            return
        if self._renew is not None and _first_code(answer) == Code.UNKNOWN_SESSION:  # that of all rows
            self._forget(request)
        elif isinstance(answer, EscrowError):
            self._on_failure(request, answer)
        elif isinstance(answer, BaseException):
            self._on_failure(request, Unknown(Code.CLOSED, f"the link failed: {answer!r}"))
        else:
            read = request.decode if isinstance(answer, pa.RecordBatch) else request.receive
            self._finish(request, read(self._codec, answer))

    def _forget(self, request: Request) -> None:
        self._forgotten = request.session
        self._on_failure(request, Unknown(Code.DISCONNECTED, "the broker has forgotten the session"))

    def _on_failure(self, request: Request, problem: EscrowError) -> None:
        if isinstance(problem, Unknown) and not problem.left:
            request.sent -= 1
        if problem.code is not Code.DISCONNECTED or self._closed:
            self._finish(request, copies(problem, request))
            return
        if time.monotonic() >= request.deadline:
            self._finish(request, copies(self._overdue(request, problem), request))
            return
        with self._sending, self._lock:
            request.lost = problem
            self.broken = True
            self._weigh()
            self._sweep_later()
            self._resend_later()
        if self._attended is not None:
            self._attended.suspect()

    def _finish(self, request: Request, results: list[Any]) -> None:
        with self._lock:
            if not _settle(request):
                return
            self.overdue = False
            self._leave_flight(request)
            more = self.waiting >= self._worth and not self._pumping  # a row that is added later starts the pump itself
        self._deliver(request.waiters, results)
        if more or self._draining:
            self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            if self._is_empty():
                self._idle.notify_all()
            if self._pumping or self.waiting < self._worth:
                return
            self._pumping = True
        self._start_pump()

    def _leave_flight(self, request: Request) -> None:
        if request in self._in_flight:
            self._in_flight.remove(request)
            self._weigh()
        if self.broken:
            self._resend_later()
        else:
            self._backoff.worked()

    # Sending again

    def _resend_later(self) -> None:
        """Once every request in flight is lost, send them again after a back-off with jitter."""
        if all(request.lost is not None for request in self._in_flight):
            self._timer.after(self._backoff.failed() if self._in_flight else 0.0, self._resend)
            if self._in_flight and not self._awaits_link:  # the pause ends when there is a connection
                self._awaits_link = True
                if call_when_there(self._link, self._on_link) is None:
                    self._awaits_link = False

    def _on_link(self) -> None:
        self._awaits_link = False
        self._timer.after(0.0, self._resend)

    def _resend(self) -> None:
        with self._lock:
            if self._renewing:
                return  # which ends with another call
            if self._pumping or any(request.lost is None for request in self._in_flight):
                if self._pumping and self.broken:
                    self._timer.after(FIRST_BACKOFF, self._resend)
                return
            if self._forgotten:
                self._renewing = True  # on its own thread, because it may take long and all lanes share the timer
                threading.Thread(target=self._renew_session, name="escrowmq-renew", daemon=True).start()
                return
            again = list(self._in_flight)
            for request in again:
                request.lost = None
                request.resends += 1
            self._pumping = True
            self.broken = False
            self._weigh()
        if self._attended is None:
            self._send_again(again)
        else:  # connecting may take long, and the lanes of the other brokers share the timer
            threading.Thread(target=self._send_again, args=(again,), name="escrowmq-resend", daemon=True).start()

    def _send_again(self, again: list[Request]) -> None:
        options = self._options()
        for request in again:
            if not request.settled:
                self._dispatch(request, options)
        self._pump()

    def _renew_session(self) -> None:
        """Renew the producer session that the broker has forgotten, then send the requests again. If renewing is
        refused, they fail with that error."""
        try:
            if self._renew is not None:
                self._renew(self._forgotten)
        except EscrowError as problem:
            for request in tuple(self._in_flight):
                self._finish(request, copies(problem, request))
        with self._lock:
            self._forgotten, self._renewing = 0, False
        self._resend()

    # Deadlines

    def _sweep_later(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            longest = 1.0 if self._attended is None else 0.1
            self._timer.after(min(max(self._timeout / 20, 0.005), longest), self._sweep)

    def _sweep(self) -> None:
        """Fail the requests that are past their deadline, or whose broker is away; seal pending rows, so that their
        deadline counts from now. Runs periodically while there are any."""
        now, attended = time.monotonic(), self._attended
        with self._lock:
            self._sweeping = False
            self._seal()
            late = [p for p in (*self._in_flight, *self._sealed) if now >= p.deadline and _settle(p)]
            for request in late:
                self._remove(request, request)
            given_up = [] if attended is None else self._attend(attended, now)
            if not self._is_empty():
                self._sweep_later()
        for request in late:
            self._deliver(request.waiters, copies(self._overdue(request, request.lost), request))
        for request in given_up:
            assert attended is not None
            problem = attended.refusal()
            if request.sent:
                problem = Unknown(Code.DISCONNECTED, problem.message)
            self._deliver(request.waiters, copies(problem, request))
        if late or given_up:
            self._go_on()

    def _overdue(self, request: Request, lost: EscrowError | None) -> EscrowError:
        """Return the error for the callers of a request that is past its deadline. ``lost``: why it has no answer, if
        that is known."""
        if self._attended is not None and not request.sent:
            return self._attended.refusal()
        text = f"no broker answers at {self._link.address} in time"
        if lost is not None:
            text = lost.message if self._link.address in lost.message else f"{text}: {lost.message}"
        return Unknown(Code.TIMED_OUT, text)

    def _attend(self, attended: Attended, now: float) -> list[Request]:
        """Probe the broker, one of several, if an answer is late. Returns the requests (or parts) that are removed from
        the lane because it is away."""
        sent = [request for request in self._in_flight if request.lost is None]
        self.overdue = any(now - (request.deadline - self._timeout) > OVERDUE_SECONDS for request in sent)
        if self.overdue:
            attended.suspect()
        if not attended.quiet:
            return []
        moves = self._moves if attended.away else self._wanders
        taken: list[Request] = []
        for request in [*self._in_flight, *self._sealed]:
            if request in sent or (request.sent > 0 and request.resends < TRIES):
                continue
            part = request.take_back(self._repeats if request.sent else moves)
            if part is not None:
                part.sent = request.sent
                if _settle(part):
                    taken.append(part)
                    self._remove(request, part)
        return taken

    def _remove(self, request: Request, part: Request) -> None:
        """Remove ``request`` from the lane if ``part`` is all of it, else only the count of the rows in ``part``."""
        if request in self._sealed:
            self.waiting -= len(part)
            if part is request:
                self._sealed.remove(request)
        elif part is request:
            self._leave_flight(request)


def _settle(request: Request) -> bool:
    """Mark a request as settled, so that nobody else gives its callers results. Returns whether it was not yet."""
    first, request.settled = not request.settled, True
    return first


def _first_code(answer: Answer | pa.RecordBatch | BaseException) -> int | None:
    """Return the code of an error, or of the first row of an answer; None if it has none."""
    if isinstance(answer, BaseException):
        return answer.code if isinstance(answer, EscrowError) else None
    if isinstance(answer, pa.RecordBatch):
        return answer.column(0)[0].as_py() if answer.num_rows else None
    first = answer[0] if answer else None
    return first[0] if isinstance(first, tuple) else first
