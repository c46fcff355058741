"""Prefetches messages for a consumer: long polls at every broker, with a few batches buffered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import pyarrow as pa

from escrowmq.client.consuming.membership import Membership
from escrowmq.client.lanes.timer import Timer
from escrowmq.errors import AWAY, Code, EscrowError, Unknown
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import Exchange, Link
from escrowmq.wire.exchanges import ReceiveOptions

WAIT_MS = 5000
"""How long the broker holds an empty receive."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0
NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
"""What an exchange RECEIVE carries."""


class Fetcher:
    """Keeps up to ``ahead`` receives per broker asked for or buffered. ``arrived`` is called on any thread."""

    def __init__(
        self,
        links: Sequence[Link],
        options: ReceiveOptions,
        ahead: int,
        timer: Timer,
        arrived: Callable[[], None],
        spawn: Callable[[Callable[[], None]], None] = lambda call: call(),
        membership: Membership | None = None,
    ) -> None:
        self._links = links
        self._membership = membership
        self._options: ReceiveOptions = {"wait_ms": WAIT_MS, **options}
        self._ahead = ahead
        self._timer = timer
        self._arrived = arrived
        self._spawn = spawn  # how a caller's thread asks: it must not block an event loop
        self._lock = threading.Condition()  # notified when an answer came
        self._ready: deque[tuple[int, pa.RecordBatch] | EscrowError] = deque()
        self._asked = 0  # receives on their way
        self._buffered = [0] * len(links)
        self._backoff = [Backoff(FIRST_BACKOFF, LAST_BACKOFF) for _ in links]
        self._asking = [False] * len(links)
        self._resting = [False] * len(links)
        # Answers are handed out in the order of their questions: a broker leases in that order, but large batches are
        # read and sent beside each other, and a consumer must not see a later message first (I20).
        self._order: list[deque[Future[pa.RecordBatch]]] = [deque() for _ in links]
        self._started = False
        self._closed = False

    def start(self, max_messages: int) -> None:
        """Begin to receive, at most ``max_messages`` per batch from now on."""
        self._options["max_messages"] = max_messages
        if not self._started:
            self._started = True
            for number in range(len(self._links)):
                self._spawn(partial(self._ask, number))

    def take(self) -> tuple[int, pa.RecordBatch] | None:
        """The next batch and its broker's number, None if there is none yet; raises what a receive came to."""
        with self._lock:
            if not self._ready:
                return None
            entry = self._ready.popleft()
            if isinstance(entry, EscrowError):
                raise entry
            self._buffered[entry[0]] -= 1
        self._spawn(partial(self._ask, entry[0]))
        return entry

    def has_something(self) -> bool:
        """Whether :meth:`take` would return or raise."""
        return bool(self._ready)

    def put_back(self, number: int, batch: pa.RecordBatch) -> None:
        """Give the unread rest of a batch back, to be taken next."""
        with self._lock:
            self._ready.appendleft((number, batch))
            self._buffered[number] += 1

    def close(self, timeout: float) -> list[tuple[int, pa.RecordBatch]]:
        """Ask no more, withdraw what was asked (at most ``timeout`` seconds); what was received and not taken."""
        with self._lock:
            self._closed = True
            polls = [poll for order in self._order for poll in order if not poll.done()]
        for poll in polls:
            poll.cancel()
        with self._lock:
            self._lock.wait_for(lambda: not self._asked, timeout)
            left = [entry for entry in self._ready if not isinstance(entry, EscrowError)]
            self._ready.clear()
            return left

    def _ask(self, number: int) -> None:
        """Fill up to ``ahead``. One thread per broker at a time; an answer that comes at once does not recurse."""
        with self._lock:
            if self._asking[number]:
                return
            self._asking[number] = True
        while True:
            with self._lock:
                full = len(self._order[number]) + self._buffered[number] >= self._ahead
                if self._closed or full or self._resting[number]:
                    self._asking[number] = False
                    return
                self._asked += 1
            options = self._options.copy()
            if self._membership is not None:
                options = {**options, **self._membership.options(number)}
            future = self._links[number].exchange(Exchange.RECEIVE, NO_ROWS, options)
            with self._lock:
                self._order[number].append(future)
                withdraw = self._closed
            future.add_done_callback(partial(self._came, number))
            if withdraw:
                future.cancel()

    def _came(self, number: int, done: Future[pa.RecordBatch]) -> None:
        problem = Unknown(Code.CLOSED) if done.cancelled() else done.exception()
        with self._lock:
            self._asked -= 1
            if problem is None:
                self._backoff[number].worked()
            else:
                known = problem if isinstance(problem, EscrowError) else Unknown(Code.CLOSED, repr(problem))
                if self._membership is not None and known.code in AWAY:
                    self._membership.lose(number)
                self._rest(number, known)
            self._hand_out(number)
            self._lock.notify_all()
        self._arrived()
        self._ask(number)

    def _hand_out(self, number: int) -> None:
        """Make ready what has come and was asked for before anything that has not."""
        order = self._order[number]
        while order and order[0].done():
            first = order.popleft()
            if first.cancelled() or first.exception() is not None:
                continue
            batch = first.result()
            if batch.num_rows:
                if self._membership is not None:
                    self._membership.came(number, batch)
                self._ready.append((number, batch))
                self._buffered[number] += 1

    def _rest(self, number: int, problem: EscrowError) -> None:
        """Ask again after a pause; the caller gets a refusal, and may go on."""
        if problem.code not in AWAY and not self._closed:
            self._ready.append(problem)
        if not self._resting[number] and not self._closed:
            self._resting[number] = True
            self._timer.after(self._backoff[number].failed(), partial(self._rested, number))

    def _rested(self, number: int) -> None:
        if self._membership is not None and self._membership.has_lost(number):
            threading.Thread(target=self._resume, args=(number,), name="escrowmq-resume", daemon=True).start()
            return
        with self._lock:
            self._resting[number] = False
        self._ask(number)

    def _resume(self, number: int) -> None:
        """Say at the broker what reached us, before anything more is asked of it."""
        assert self._membership is not None
        problem: EscrowError | None = None
        try:
            self._membership.join(number, resume=True)
        except EscrowError as refused:
            problem = refused
        with self._lock:
            self._resting[number] = False
            if problem is not None:
                self._rest(number, problem)
        self._arrived()
        self._ask(number)
