"""Prefetches messages for a consumer: long polls at every broker, with a few batches buffered."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from escrowmq.client.consuming.membership import Membership
from escrowmq.client.consuming.order import Order
from escrowmq.client.lanes.returning import call_when_there
from escrowmq.client.lanes.timer import Timer
from escrowmq.errors import AWAY, Code, EscrowError, Unknown, error
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import Exchange, Link
from escrowmq.wire.exchanges import ReceiveOptions

WAIT_MS = 5000
"""How long the broker holds an empty receive."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0
NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
"""What an exchange RECEIVE carries."""


class _Ready(NamedTuple):
    """Messages of one broker that came, and until when they may lie here."""

    number: int
    batch: pa.RecordBatch
    until: float


class Fetcher:
    """Keeps up to ``ahead`` receives per broker asked for or buffered. ``arrived`` is called on any thread.

    What lies here for ``keep`` seconds (None: for ever) goes to ``give_back``, before its lease ends and counts an
    attempt for messages that nobody was handed. A broker of which that was so is asked again when somebody takes.
    """

    def __init__(
        self,
        links: Sequence[Link],
        options: ReceiveOptions,
        ahead: int,
        timer: Timer,
        arrived: Callable[[], None],
        spawn: Callable[[Link, Callable[[], None]], None] = lambda _, call: call(),
        membership: Membership | None = None,
        order: Order | None = None,
        suspect: Callable[[int], None] = lambda _: None,
        give_back: Callable[[int, pa.RecordBatch], None] = lambda number, batch: None,
    ) -> None:
        self.keep: float | None = None
        self._give_back = give_back
        self._left: set[int] = set()  # brokers that are not asked until somebody takes
        self._links = links
        self._withdrawals = order
        self._membership = membership
        self._options: ReceiveOptions = {"wait_ms": WAIT_MS, **options}
        self._ahead = ahead
        self._timer = timer
        self._arrived = arrived
        self._spawn = spawn  # how a caller's thread asks: it must not block an event loop
        self._suspect = suspect  # called with a broker that could not be reached
        self._held = [False] * len(links)  # brokers at which the group is not yet are not asked
        self._lock = threading.Condition()  # notified when an answer came
        self._ready: deque[_Ready | EscrowError] = deque()
        self._taken = [math.inf] * len(links)  # until when what was taken last could have lain here
        self._looking = False  # the timer will call _return_late
        self._asked = 0  # receives on their way
        self._buffered = [0] * len(links)
        self._backoff = [Backoff(FIRST_BACKOFF, LAST_BACKOFF) for _ in links]
        self._asking = [False] * len(links)
        self._resting = [False] * len(links)
        self._rests = 0  # pauses, ever
        self._over = [0] * len(links)  # the last of them that is over
        # Answers are handed out in the order of their questions: a broker leases in that order, but large batches are
        # read and sent beside each other, and a consumer must not see a later message first (I20).
        self._order: list[deque[Future[pa.RecordBatch]]] = [deque() for _ in links]
        self._started = False
        self._closed = False
        self._fenced: EscrowError | None = None  # another process is the member now: nothing is asked any more

    def start(self, max_messages: int, one_by_one: bool = False) -> None:
        """Begin to receive, at most ``max_messages`` per batch from now on. ``one_by_one``: they are handed out that
        way."""
        self._options["max_messages"], self._options["one_by_one"] = max_messages, one_by_one
        if not self._started:
            self._started = True
            for number, link in enumerate(self._links):
                self._spawn(link, partial(self._ask, number))

    def hold(self, number: int) -> None:
        """Ask this broker nothing yet: the group is not there."""
        self._held[number] = True

    def admit(self, number: int) -> None:
        """Ask this broker from now on."""
        self._held[number] = False
        if self._started:
            self._ask(number)

    def refuse(self, problem: EscrowError) -> None:
        """Have :meth:`take` raise what a broker that came back refused."""
        with self._lock:
            self._ready.append(problem)
        self._arrived()

    def take(self) -> tuple[int, pa.RecordBatch] | None:
        """Return the next batch and its broker's number, None if there is none yet; raises what a receive came to."""
        with self._lock:
            if self._fenced is not None:
                raise error(self._fenced.code, self._fenced.message, self._fenced.hint)
            left, self._left = self._left, set()
            entry = self._ready.popleft() if self._ready else None
            if isinstance(entry, _Ready):
                self._buffered[entry.number] -= 1
                self._taken[entry.number] = entry.until
                left.add(entry.number)
        for number in left:
            self._spawn(self._links[number], partial(self._ask, number))
        if isinstance(entry, EscrowError):
            raise entry
        return entry and (entry.number, entry.batch)

    def has_something(self) -> bool:
        """Return whether :meth:`take` is of use: it would return, or raise, or have a broker asked again."""
        return bool(self._ready) or self._fenced is not None or bool(self._left)

    def put_back(self, number: int, batch: pa.RecordBatch) -> None:
        """Give the unread rest of a batch back, to be taken next."""
        with self._lock:
            self._ready.appendleft(_Ready(number, batch, self._taken[number]))
            self._buffered[number] += 1
            self._look_later()

    def _look_later(self) -> None:
        """See after what lies here when the first of it has lain for long enough. With the lock held."""
        times = [entry.until for entry in self._ready if isinstance(entry, _Ready)]
        if self.keep is not None and times and not self._looking:
            self._looking = True
            self._timer.after(max(min(times) - time.monotonic(), 0.0), self._return_late)

    def _return_late(self) -> None:
        """Give back what has lain here for too long."""
        now = time.monotonic()
        with self._lock:
            self._looking = False
            if self._closed:
                return
            late = [entry for entry in self._ready if isinstance(entry, _Ready) and entry.until <= now]
            self._ready = deque(x for x in self._ready if not isinstance(x, _Ready) or x.until > now)
            for entry in late:
                self._buffered[entry.number] -= 1
                self._left.add(entry.number)
            self._look_later()
        for entry in late:
            self._give_back(entry.number, entry.batch)
        if late:
            self._arrived()  # whoever waits for messages now is somebody who takes

    def stop(self) -> list[tuple[int, pa.RecordBatch]]:
        """Ask no more, and withdraw what was asked. Never waits. Returns what was received and not taken; what arrives
        later goes to ``give_back``."""
        with self._lock:
            first, self._closed = self._started and not self._closed, True
            polls = [[poll for poll in order if not poll.done()] for order in self._order]
            left = self._take_all()
            idle = [number for number, open_ in enumerate(polls) if first and not open_ and self._may_ask(number)]
            self._asked += len(idle)
        for poll in (poll for open_ in polls for poll in open_):
            poll.cancel()
        for number in idle:
            self._spawn(self._links[number], partial(self._return_kept, number))
        return left

    def _may_ask(self, number: int) -> bool:
        """Return whether a broker can be asked without waiting for it."""
        there = getattr(self._links[number], "there", True)
        return there and self._fenced is None and not (self._held[number] or self._resting[number])

    def _return_kept(self, number: int) -> None:
        """Ask for one message more, and that the broker releases what it has leased for this consumer and not sent.

        It does so by itself when the last receive is withdrawn; here none was under way.
        """
        options: ReceiveOptions = {**self._options, "max_messages": 1, "wait_ms": 0, "return_rest": True}
        if self._membership is not None:
            options = {**options, **self._membership.options(number)}
        future = self._links[number].exchange(Exchange.RECEIVE, NO_ROWS, options)
        with self._lock:
            self._order[number].append(future)
        future.add_done_callback(partial(self._on_receive, number))

    def close(self, timeout: float) -> list[tuple[int, pa.RecordBatch]]:
        """As :meth:`stop`; waits at most ``timeout`` seconds for what was asked."""
        left = self.stop()
        with self._lock:
            self._lock.wait_for(lambda: not self._asked, timeout)
            return left + self._take_all()

    def _take_all(self) -> list[tuple[int, pa.RecordBatch]]:
        """Take everything that lies here. With the lock held."""
        left = [(entry.number, entry.batch) for entry in self._ready if isinstance(entry, _Ready)]
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
                full = len(self._order[number]) + self._buffered[number] >= self._ahead or number in self._left
                resting = self._resting[number] or self._held[number]
                if self._closed or self._fenced is not None or full or resting:
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
            future.add_done_callback(partial(self._on_receive, number))
            if withdraw:
                future.cancel()

    def _on_receive(self, number: int, done: Future[pa.RecordBatch]) -> None:
        problem = Unknown(Code.CLOSED) if done.cancelled() else done.exception()
        with self._lock:
            if problem is None:
                self._backoff[number].worked()
            else:
                known = problem if isinstance(problem, EscrowError) else Unknown(Code.CLOSED, repr(problem))
                if self._membership is not None and known.code in AWAY:
                    self._membership.lose(number)
                self._rest(number, known)
            self._hand_out(number)
            late = self._take_all() if self._closed else []
        for broker, batch in late:
            self._give_back(broker, batch)
        with self._lock:
            self._asked -= 1
            self._lock.notify_all()
        if isinstance(problem, EscrowError) and problem.code in AWAY:
            self._suspect(number)
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
                    self._membership.on_messages(number, batch)
                if self._withdrawals is not None:
                    self._withdrawals.add(number, batch)
                until = math.inf if self.keep is None else time.monotonic() + self.keep
                self._ready.append(_Ready(number, batch, until))
                self._buffered[number] += 1
                self._look_later()

    def _rest(self, number: int, problem: EscrowError) -> None:
        """Ask again after a pause; the caller gets a refusal, and may continue. Fenced is for ever: what was received
        is another's now, so none of it is handed out."""
        if problem.code is Code.FENCED:
            self._fenced = problem
            return
        if problem.code not in AWAY and not self._closed:
            self._ready.append(problem)
        if not self._resting[number] and not self._closed:
            self._resting[number] = True
            self._rests += 1
            rested = partial(self._on_rested, number, self._rests)
            self._timer.after(self._backoff[number].failed(), rested)
            # the pause ends when there is a connection
            call_when_there(self._links[number], partial(self._timer.after, 0.0, rested))

    def _on_rested(self, number: int, rest: int) -> None:
        if self._over[number] >= rest:
            return  # the connection came first, or the end of the pause
        self._over[number] = rest
        if self._membership is not None and self._membership.has_lost(number):
            threading.Thread(target=self._resume, args=(number,), name="escrowmq-resume", daemon=True).start()
            return
        with self._lock:
            self._resting[number] = False
        if len(self._links) == 1:
            self._ask(number)
        else:  # connecting may take a moment, and the timer is for the other brokers, too
            threading.Thread(target=self._ask, args=(number,), name="escrowmq-ask", daemon=True).start()

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
