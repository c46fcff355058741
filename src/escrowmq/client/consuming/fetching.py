"""Receives messages ahead of their use, with a few batches buffered."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from escrowmq.client.consuming.membership import Membership
from escrowmq.client.consuming.order import Order
from escrowmq.client.lanes.returning import call_when_there
from escrowmq.client.lanes.timer import Timer
from escrowmq.client.links.presence import Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import AWAY, Code, EscrowError, Unknown, error
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import Exchange, Link
from escrowmq.wire.exchanges import ReceiveOptions
from escrowmq.wire.link import state_of

WAIT_MS = 5000
"""How long the broker holds an empty receive."""
FIRST_BACKOFF, LAST_BACKOFF = 0.02, 2.0
NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
"""The batch of every exchange RECEIVE."""


class _Ready(NamedTuple):
    """Messages of one broker, and until when they may be buffered."""

    number: int
    batch: pa.RecordBatch
    until: float


class Fetcher:
    """Keeps up to ``ahead`` receives per broker in flight or buffered. ``arrived`` is called on any thread.

    Messages that are buffered for ``keep`` seconds (None: no limit) go to ``give_back``, before their lease expires and
    counts an attempt although nobody handled them. Their broker is idle until the next :meth:`take`.
    """

    is_receiving = False
    """True from the first loop until the stop: receives are sent ahead of their use."""

    def __init__(
        self,
        links: Sequence[Link],
        options: ReceiveOptions,
        ahead: int,
        timer: Timer,
        arrived: Callable[[], None],
        spawn: Callable[[Link, Callable[[], object]], object] = lambda _, call: call(),
        membership: Membership | None = None,
        order: Order | None = None,
        suspect: Callable[[int], None] = lambda _: None,
        give_back: Callable[[int, pa.RecordBatch], None] = lambda number, batch: None,
        held: Container[int] = (),
    ) -> None:
        self.keep: float | None = None
        self._links, self._ahead, self._timer, self._arrived = links, ahead, timer, arrived
        self._options: ReceiveOptions = {"wait_ms": WAIT_MS, **options}
        self._spawn = spawn  # sends from a caller's thread, which may be an event loop's
        self._membership, self._withdrawals = membership, order
        self._suspect = suspect  # called with a broker that could not be reached
        self._give_back = give_back
        self._lock = threading.Condition()  # notified at each answer
        self._ready: deque[_Ready | EscrowError] = deque()
        self._expiring = False  # the timer will call _return_late
        self._pending = 0  # receives in flight
        self._idle: set[int] = set()  # brokers that get no receive until the next take
        self._held = held  # brokers that get no receive, because the group does not exist there yet
        self._taken = [math.inf] * len(links)  # the ``until`` of the last batch that was taken
        self._buffered = [0] * len(links)
        self.answered = time.monotonic()
        """Time (monotonic seconds) of the last answer to a receive, or at which the fetcher was made."""
        self._backoff = [Backoff(FIRST_BACKOFF, LAST_BACKOFF) for _ in links]
        self._requesting = [False] * len(links)
        self._paused = [False] * len(links)
        self._pauses = 0  # pauses so far
        self._over = [0] * len(links)  # the number of the last pause that is over
        # Answers are handed out in the order of their receives: a broker leases in that order, but large batches are
        # read and sent in parallel, and a consumer must not get a later message first (I20).
        self._order: list[deque[Future[pa.RecordBatch]]] = [deque() for _ in links]
        self._started = False
        self._closed = False
        self._fenced: EscrowError | None = None  # another process is the member now

    def start(self, max_messages: int, one_by_one: bool = False) -> None:
        """Begin to receive, at most ``max_messages`` per batch from now on. ``one_by_one``: the caller handles messages
        singly, so the broker delivers a message at its last attempt alone. A later call only changes these two."""
        self._options["max_messages"], self._options["one_by_one"] = max_messages, one_by_one
        if not self._started:
            self._started = self.is_receiving = True
            for number, link in enumerate(self._links):
                self._spawn(link, partial(self._request, number))

    def admit(self, number: int) -> None:
        """Begin to receive from a broker at which the group exists now, if receiving has begun."""
        if self._started:
            self._request(number)

    def refuse(self, problem: EscrowError) -> None:
        """Make a later :meth:`take` raise ``problem``, the refusal of a broker that came back."""
        with self._lock:
            self._ready.append(problem)
        self._arrived()

    def take(self) -> tuple[int, pa.RecordBatch] | None:
        """Remove and return the next buffered batch with its broker's number, and send further receives. Returns None
        if there is none yet; raises the error of a receive. Never waits."""
        with self._lock:
            if self._fenced is not None:
                raise error(self._fenced.code, self._fenced.message, self._fenced.hint)
            idle, self._idle = self._idle, set()
            entry = self._ready.popleft() if self._ready else None
            if isinstance(entry, _Ready):
                self._buffered[entry.number] -= 1
                self._taken[entry.number] = entry.until
                idle.add(entry.number)
        for number in idle:
            self._spawn(self._links[number], partial(self._request, number))
        if isinstance(entry, EscrowError):
            raise entry
        return entry and (entry.number, entry.batch)

    def has_something(self) -> bool:
        """Return whether :meth:`take` would return, raise or send a receive."""
        return bool(self._ready) or self._fenced is not None or bool(self._idle)

    def is_late(self, number: int) -> bool:
        """Return whether the batch that was taken last from broker ``number`` is older than messages may be
        buffered."""
        return time.monotonic() >= self._taken[number]

    def put_back(self, number: int, batch: pa.RecordBatch) -> None:
        """Return the rest of a taken batch to the buffer, to be taken next."""
        with self._lock:
            self._ready.appendleft(_Ready(number, batch, self._taken[number]))
            self._buffered[number] += 1
            self._expire_later()

    def _expire_later(self) -> None:
        """Set the timer for the first buffered batch that expires. With the lock held."""
        times = [entry.until for entry in self._ready if isinstance(entry, _Ready)]
        if self.keep is not None and times and not self._expiring:
            self._expiring = True
            self._timer.after(max(min(times) - time.monotonic(), 0.0), self._return_late)

    def _return_late(self) -> None:
        """Give the messages that were buffered for too long back to their brokers."""
        now = time.monotonic()
        with self._lock:
            self._expiring = False
            if self._closed:
                return
            late = [entry for entry in self._ready if isinstance(entry, _Ready) and entry.until <= now]
            self._ready = deque(x for x in self._ready if not isinstance(x, _Ready) or x.until > now)
            for entry in late:
                self._buffered[entry.number] -= 1
                self._idle.add(entry.number)
            self._expire_later()
        for entry in late:
            self._give_back(entry.number, entry.batch)
        if late:
            self._arrived()  # a caller that waits now will take

    def stop(self) -> list[tuple[int, pa.RecordBatch]]:
        """Cancel the receives in flight and send no more. Never waits. Returns the messages that were not taken; later
        ones go to ``give_back``."""
        with self._lock:
            first, self._closed, self.is_receiving = self._started and not self._closed, True, False
            polls = [[poll for poll in order if not poll.done()] for order in self._order]
            left = self._take_all()
            idle = [number for number, open_ in enumerate(polls) if first and not open_ and self._can_request(number)]
            self._pending += len(idle)
        for poll in (poll for open_ in polls for poll in open_):
            poll.cancel()
        for number in idle:
            # One more receive makes the broker release the messages that it has leased and not sent. It does so by
            # itself when the last receive is cancelled; here none was in flight.
            options = {"max_messages": 1, "wait_ms": 0, "return_rest": True}
            self._spawn(self._links[number], partial(self._receive, number, options))
        return left

    def _can_request(self, number: int) -> bool:
        there = state_of(self._links[number]).is_there
        return there and self._fenced is None and not (number in self._held or self._paused[number])

    def close(self, timeout: float) -> list[tuple[int, pa.RecordBatch]]:
        """As :meth:`stop`; waits at most ``timeout`` seconds for the receives in flight."""
        left = self.stop()
        with self._lock:
            self._lock.wait_for(lambda: not self._pending, timeout)
            return left + self._take_all()

    def _take_all(self) -> list[tuple[int, pa.RecordBatch]]:
        """Remove and return all buffered messages: broker numbers and batches. With the lock held."""
        left = [(entry.number, entry.batch) for entry in self._ready if isinstance(entry, _Ready)]
        self._ready.clear()
        return left

    def _request(self, number: int) -> None:
        """Send receives to broker ``number`` until ``ahead`` are in flight or buffered. One thread per broker at a
        time; an answer that comes at once does not recurse."""
        with self._lock:
            if self._requesting[number]:
                return
            self._requesting[number] = True
        while True:
            with self._lock:
                full = len(self._order[number]) + self._buffered[number] >= self._ahead or number in self._idle
                paused = self._paused[number] or number in self._held
                if self._closed or self._fenced is not None or full or paused:
                    self._requesting[number] = False
                    return
                self._pending += 1
            future = self._receive(number)
            if self._closed:
                future.cancel()

    def _receive(self, number: int, more: Mapping[str, Any] | None = None) -> Future[pa.RecordBatch]:
        options: Any = {**self._options, **(more or {})}
        if self._membership is not None:
            options |= self._membership.options(number)
        future = self._links[number].exchange(Exchange.RECEIVE, NO_ROWS, options)
        with self._lock:
            self._order[number].append(future)
        future.add_done_callback(partial(self._on_receive, number))
        return future

    def _on_receive(self, number: int, done: Future[pa.RecordBatch]) -> None:
        problem = Unknown(Code.CLOSED) if done.cancelled() else done.exception()
        with self._lock:
            if problem is None:
                self._backoff[number].worked()
                self.answered = time.monotonic()
            else:
                known = problem if isinstance(problem, EscrowError) else Unknown(Code.CLOSED, repr(problem))
                if self._membership is not None and known.code in AWAY:
                    self._membership.lose(number)
                self._pause(number, known)
            self._hand_out(number)
            late = self._take_all() if self._closed else []
        for broker, batch in late:
            self._give_back(broker, batch)
        with self._lock:
            self._pending -= 1
            self._lock.notify_all()
        if isinstance(problem, EscrowError) and problem.code in AWAY:
            self._suspect(number)
        self._arrived()
        self._request(number)

    def _hand_out(self, number: int) -> None:
        """Buffer the answers of broker ``number`` that arrived, in the order of their receives: one that waits for an
        earlier receive's answer stays."""
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
                self._expire_later()

    def _pause(self, number: int, problem: EscrowError) -> None:
        """Pause the receives of broker ``number`` after one failed; :meth:`take` raises a refusal once. A fenced
        consumer stops for good: its messages belong to another process now, so none of them is handed out."""
        if problem.code is Code.FENCED:
            self._fenced = problem
            return
        if problem.code not in AWAY and not self._closed:
            self._ready.append(problem)
        if not self._paused[number] and not self._closed:
            self._paused[number] = True
            self._pauses += 1
            on_end = partial(self._on_pause_end, number, self._pauses)
            self._timer.after(self._backoff[number].failed(), on_end)
            # the pause ends when there is a connection
            call_when_there(self._links[number], partial(self._timer.after, 0.0, on_end))

    def _on_pause_end(self, number: int, pause: int) -> None:
        if self._over[number] >= pause:
            return  # the connection and the end of the pause both call this
        self._over[number] = pause
        if self._membership is not None and self._membership.has_lost(number):
            threading.Thread(target=self._resume, args=(number,), name="escrowmq-resume", daemon=True).start()
            return
        with self._lock:
            self._paused[number] = False
        if len(self._links) == 1:
            self._request(number)
        else:  # connecting may take long, and the other brokers share the timer
            threading.Thread(target=self._request, args=(number,), name="escrowmq-ask", daemon=True).start()

    def _resume(self, number: int) -> None:
        """Join broker ``number`` again as a named member, with the leases that arrived, before the next receive."""
        assert self._membership is not None
        problem: EscrowError | None = None
        try:
            self._membership.join(number, resume=True)
        except EscrowError as refused:
            problem = refused
        with self._lock:
            self._paused[number] = False
            if problem is not None:
                self._pause(number, problem)
        self._arrived()
        self._request(number)


def missing_brokers(router: Router, reasons: Mapping[int, str]) -> list[Missing]:
    """Return the brokers that are away, and those that ``reasons`` names by number, each with the reason."""
    away = {one["broker"]: one for one in router.presence.missing()}
    for number, reason in reasons.items():
        address = router.links[number].address
        away.setdefault(address, {"broker": address, "reason": reason})
    return [away[link.address] for link in router.links if link.address in away]
