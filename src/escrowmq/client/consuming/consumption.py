"""The shared implementation of blocking and asyncio consumers: subscription, prefetch, acknowledgements."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq import hooks
from escrowmq.client.consuming.delivery import Rows
from escrowmq.client.consuming.fetching import NO_ROWS, Fetcher, missing_brokers
from escrowmq.client.consuming.membership import Membership
from escrowmq.client.consuming.options import ConsumerOptions, delay_us, subscribe
from escrowmq.client.consuming.order import Order
from escrowmq.client.consuming.settling import SettlingCodec, lease_runs, settling_batch
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.lanes.waiting import Waiting
from escrowmq.client.links.exchanges import failed_future
from escrowmq.client.links.presence import AWAY_SECONDS, Missing
from escrowmq.client.links.router import Router
from escrowmq.errors import AWAY, Code, EscrowError, Unknown, error
from escrowmq.model import Act
from escrowmq.platform.forks import tell_in_child
from escrowmq.platform.numbers import own_number
from escrowmq.wire import Exchange
from escrowmq.wire.actions import groups
from escrowmq.wire.exchanges import ReceiveOptions

_log = logging.getLogger(__name__)

KEPT = 2 / 3
"""The part of a lease for which messages may be buffered; then they are given back."""
RETURNED = (Act.NACK, Act.REJECT, Act.RELEASE)
"""Operations after which the broker releases the later messages of the key in an ordered lease."""
WITHDRAW_SECONDS = 2.0
"""How long closing waits for the broker to cancel receives."""


class Consumption:
    """The shared state of a :class:`Consumer` or :class:`AsyncConsumer`."""

    order: Order | None

    def __init__(self, router: Router, waiting: Waiting, request: groups.Subscribe, given: ConsumerOptions) -> None:
        self._request = request
        self.group = group = request["group"]
        lease, timeout = given.lease, given.timeout
        self._set_up(router, waiting, given)
        lease_ms = None if lease is None else max(round(lease * 1000), 1)
        size = given.max_bytes
        self._options = ReceiveOptions(group=group, member=own_number(), max_bytes=size, lease_ms=lease_ms)
        links, attendances, timer = router.links, router.attendances, waiting.timer
        self.order = order = Order(lease) if request.get("ordered") else None
        self._withdrawn = 0  # settlements that were refused here
        name = given.instance
        self._membership = None if name is None else Membership(links, group, name, timeout, attendances)
        self._not_joined: dict[int, str] = {}  # brokers at which the group could not be joined yet, and why
        own: Any = (self._membership, order, self._suspect, self.give_back, self._not_joined)
        self.fetcher = Fetcher(links, self._options, given.prefetch, timer, self.arrival.set, waiting.spawn, *own)
        self._lease: float | None = None
        self.max_attempts: int | None = None  # None: not known, from an older broker
        self._codecs: list[SettlingCodec] = []
        for number, (link, attended) in enumerate(zip(links, attendances, strict=True)):
            codec = SettlingCodec(None if order is None else partial(order.lose, number))
            self._codecs.append(codec)
            more: Any = {"attended": attended, "moves": lambda _: False}  # it belongs to the broker of its lease
            lane = waiting.lane(link, Exchange.SETTLE, codec, lambda: {"group": group}, timeout=timeout, **more)
            self.lanes.append(lane)

    def _set_up(self, router: Router, waiting: Waiting, given: ConsumerOptions) -> None:
        """Set the attributes of every consumer, of a group or of a system view."""
        self.router, self.waiting = router, waiting
        self.qos, self.seen, self.timeout = given.qos, given.seen, given.timeout
        self.arrival = waiting.signal()
        self.order = None
        self.lanes: list[Lane] = []
        self.iterations = Iterations()
        self.stopped = False  # nothing more is received or handed out
        self.closing = False  # close() of a consumer was called
        self.hurried = False  # closing waits for no loop
        self.unfinished = False  # the loop that runs finishes closing when it ends
        self._closed = False
        self._close_lock = threading.RLock()  # a signal handler may close while this thread closes
        tell_in_child(self)

    def on_fork(self) -> None:
        self.stopped = self.closing = self._closed = True

    def subscribe(self) -> None:
        """Create or join the group at every reachable broker, and at the others as soon as they are reachable.

        Raises SUBSCRIPTION_MISMATCH, Unknown(TIMED_OUT) or Overloaded(BROKER_AWAY) if none is reachable, and so on.
        """
        self._deadline = time.monotonic() + self.timeout
        answers = self.router.every(self._join, self.timeout)
        there = {number for number, _ in answers.found}
        for number in range(len(self.router)):
            if number not in there:
                self._not_joined[number] = "it did not answer when this consumer was made"
                self.router.presence.when_back(number, partial(self._join_late, number))

    def missing(self) -> list[Missing]:
        return missing_brokers(self.router, self._not_joined.copy())

    def _join(self, number: int) -> None:
        answer = subscribe(self.router.links[number], self._request, self._deadline, self.router.attendances[number])
        self.max_attempts = answer.get("max_attempts")
        if self._membership is None:
            self._set_lease(answer.get("lease_seconds"))
        else:
            self._membership.join(number, resume=False)

    def _join_late(self, number: int) -> None:
        """Join the group at a broker that has become reachable, and receive from it. A refusal is raised by the next
        call that takes messages."""
        if self.stopped:
            return
        self._deadline = time.monotonic() + self.timeout
        try:
            self._join(number)
        except EscrowError as problem:
            self._not_joined[number] = str(problem)
            if problem.code in AWAY:
                self.router.presence.when_back(number, partial(self._join_late, number))
            elif not self.stopped and problem.code is not Code.CLOSED:
                self.fetcher.refuse(problem)
            return
        del self._not_joined[number]
        _log.info("consumer group %s receives from %s, too", self.group, self.router.links[number].address)
        self.fetcher.admit(number)

    def _suspect(self, number: int) -> None:
        if (attended := self.router.attendances[number]) is not None:
            attended.suspect()

    def _set_lease(self, theirs: float | None) -> None:
        """Set how long leases last: as this consumer requests, else the shortest of the brokers' settings. ``theirs``:
        one broker's setting (s)."""
        given = self._options["lease_ms"]
        known = [seconds for seconds in (self._lease, theirs if given is None else given / 1000) if seconds is not None]
        self._lease = min(known, default=None)
        if self.order is not None:
            self.order.lease = self._lease
        self.fetcher.keep = None if self._lease is None else self._lease * KEPT

    @property
    def lease(self) -> float | None:
        """The duration of a lease in seconds; None if leases do not end by time."""
        return self._lease

    @property
    def refused(self) -> int:
        return sum(codec.refused for codec in self._codecs) + self._withdrawn

    def act(self, rows: Rows, row: int, act: Act, delay_us: int, cause: str | None, waiter: Any = None) -> None:
        """Settle one message (acknowledge, give back, reject, release or extend), in a request with those of others.
        ``waiter`` gets the result; None: only the consumer's counter of refusals."""
        if hooks.installed and act != Act.EXTEND:
            one = hooks.Call("settle", rows.list("topic")[row], columns=rows.batch.slice(row, 1), outcome=act)
            with hooks.around(one):
                self._act(rows, row, act, delay_us, cause, waiter)
        else:
            self._act(rows, row, act, delay_us, cause, waiter)

    def _act(self, rows: Rows, row: int, act: Act, delay_us: int, cause: str | None, waiter: Any) -> None:
        handle = rows.handle(row)
        if self._membership is not None and act != Act.EXTEND:
            self._membership.settle(rows.number, handle[0])
        if (order := self.order) is not None and waiter is None:
            if order.changes and rows.withdrawn(row):
                self._withdrawn += 1
                return
            if act in RETURNED:
                order.fail(rows.number, handle[0], handle[1], rows.list("key")[row])
        self.lanes[rows.number].add((*handle, act, delay_us, cause), waiter, 64)

    async def extend(self, rows: Rows, row: int, delay_us: int) -> None:
        """Extend the lease of one message to ``delay_us`` from now, and wait for the answer. Raises LEASE_LOST if it
        was withdrawn or has expired."""
        if self.order is not None and rows.withdrawn(row):
            raise error(Code.LEASE_LOST)
        waiter = self.lanes[rows.number].waiter()
        self.act(rows, row, Act.EXTEND, delay_us, None, waiter)
        await waiter
        if self.order is not None:
            self.order.extend(rows.number, [rows.handle(row)[0]], delay_us / 1e6)

    def extend_soon(self, rows: Rows, row: int, seconds: float, on_lost: Callable[[], None]) -> None:
        """Extend the lease of one message to ``seconds`` from now; never waits. ``on_lost`` is called, on any thread,
        if the broker rejects it because the lease has expired."""
        lease = rows.handle(row)[0]

        def on_answer(answer: Any) -> None:
            if not isinstance(answer, EscrowError):
                if self.order is not None:
                    self.order.extend(rows.number, [lease], seconds)
            elif answer.code is Code.LEASE_LOST:
                on_lost()

        with suppress(EscrowError):  # closed, or too many settlements wait: then the lease expires
            self.act(rows, row, Act.EXTEND, delay_us(seconds), None, on_answer)

    async def act_on_all(self, rows: Rows, act: Act, delay_us: int, cause: str | None, wait: bool) -> None:
        """Settle all messages of a batch, or extend their leases, without the withdrawn ones. With ``wait``, waits for
        the answer and raises the first refusal."""
        if hooks.installed and act != Act.EXTEND:
            with hooks.around(hooks.Call("settle", None, rows.count, columns=rows.batch, outcome=act)):
                await self._act_on_all(rows, act, delay_us, cause, wait)
        else:
            await self._act_on_all(rows, act, delay_us, cause, wait)

    async def _act_on_all(self, rows: Rows, act: Act, delay_us: int, cause: str | None, wait: bool) -> None:
        mine = self._without_withdrawn(rows, count=act != Act.EXTEND)
        if not mine.num_rows:
            if rows.count and wait:
                raise error(Code.LEASE_LOST)
            return
        lane, batch = self.lanes[rows.number], self._settling(rows.number, mine, act, delay_us, cause)
        if self.order is not None and act in RETURNED:
            self.order.fail_all(rows)
        if not wait:
            lane.add_batch(batch, None)
            return
        answer, resent = await lane.call_batch(batch)
        codes = SettlingCodec.codes(answer, resent)
        if self.order is not None:
            self._note(self.order, rows.number, batch, codes, act, delay_us)
        if codes.any():
            raise error(Code(int(codes[np.flatnonzero(codes)[0]])))

    def _without_withdrawn(self, rows: Rows, *, count: bool) -> pa.RecordBatch:
        """Return the messages of a batch without the withdrawn ones. ``count``: these are settlements, so count the
        withdrawn ones as refused."""
        withdrawn = None if self.order is None else self.order.find_withdrawn(rows)
        if withdrawn is None:
            return rows.batch
        if count:
            self._withdrawn += int(withdrawn.sum())
            if self._membership is not None:
                self._membership.settle_all(rows.number, rows.batch.filter(pa.array(withdrawn)))
        return rows.batch.filter(pa.array(~withdrawn))

    @staticmethod
    def _note(order: Order, number: int, batch: pa.RecordBatch, codes: Any, act: Act, delay_us: int) -> None:
        """Apply the broker's result codes of a settled batch to later messages of the same leases: extend those leases,
        or withdraw the messages of lost ones."""
        leases, starts, counts = (batch.column(name).to_numpy() for name in ("lease", "start", "count"))
        if act == Act.EXTEND:
            order.extend(number, leases[codes == Code.OK].tolist(), delay_us / 1e6)
        gone = np.flatnonzero((codes == Code.LEASE_LOST) | (codes == Code.DISCONNECTED))
        for row in gone.tolist():
            order.lose(number, int(leases[row]), int(starts[row] + counts[row]) - 1)

    async def receive_once(self, max_messages: int, wait: float) -> list[tuple[int, pa.RecordBatch]]:
        """Send one receive to every broker, and wait for the answers. Returns batches by broker number. Raises a
        refusal, or the error of a broker if none answered. Once a broker has answered, those that are away are not
        waited for."""
        found: list[tuple[int, pa.RecordBatch]] = []
        problem: EscrowError | None = None
        deadline = time.monotonic() + wait + self.timeout
        pending = await self.waiting.away(self._start_receives, max_messages, wait)
        try:
            while pending:
                number, future = pending[0]
                if not await self._await_answer(number, future, deadline, bool(found)):
                    problem = Unknown(Code.TIMED_OUT, f"{self.router.links[number].address} did not answer the receive")
                    self._cancel(*pending.pop(0))
                    continue
                pending.pop(0)
                try:
                    found.append((number, future.result()))
                except EscrowError as failed:
                    if failed.code not in AWAY:
                        raise
                    problem = failed
                    self._suspect(number)
            if not found and problem is not None:
                raise problem
        except BaseException:  # a refusal, or the caller's task was cancelled
            for number, future in pending:
                self._cancel(number, future)
            for number, batch in found:
                self.give_back(number, batch)
            raise
        return found

    async def _await_answer(self, number: int, future: Future[pa.RecordBatch], deadline: float, answered: bool) -> bool:
        while not future.done() and (left := deadline - time.monotonic()) > 0:
            if answered and self.router.presence.quiet(number):
                return False
            if time.monotonic() > deadline - self.timeout + AWAY_SECONDS:
                self._suspect(number)
            await self.arrival.wait(future.done, min(left, 0.2))
        return future.done()

    def _cancel(self, number: int, future: Future[pa.RecordBatch]) -> None:
        """Cancel a receive of broker ``number``; give its messages back if they come nevertheless."""

        def on_answer(done: Future[pa.RecordBatch]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.give_back(number, done.result())

        future.add_done_callback(on_answer)
        future.cancel()

    def _start_receives(self, max_messages: int, wait: float) -> list[tuple[int, Future[pa.RecordBatch]]]:
        """Send a receive to every broker where the group exists, the reachable ones first. Returns broker numbers and
        futures. Blocks."""
        options: Any = {**self._options, "max_messages": max_messages, "wait_ms": max(round(wait * 1000), 0)}
        pending, membership, presence = [], self._membership, self.router.presence
        for number in sorted(range(len(self.router)), key=lambda number: (presence.quiet(number), number)):
            if number in self._not_joined:
                continue
            if membership is not None:
                if membership.has_lost(number):
                    try:
                        membership.join(number, resume=True)
                    except EscrowError as problem:
                        pending.append((number, failed_future(problem)))
                        continue
                options |= membership.options(number)
            future = self.router.links[number].exchange(Exchange.RECEIVE, NO_ROWS, options.copy())
            if membership is not None:
                future.add_done_callback(partial(membership.on_response, number))
            future.add_done_callback(lambda _: self.arrival.set())
            pending.append((number, future))
        return pending

    def give_back(self, number: int, batch: pa.RecordBatch) -> None:
        """Release messages of broker ``number`` that were not handed out: redelivered at once, their attempt not
        counted. Never waits."""
        if batch.num_rows:
            with suppress(EscrowError):  # then their lease expires
                self.lanes[number].add_batch(self._settling(number, batch, Act.RELEASE, 0, None), None)

    def _settling(
        self, number: int, batch: pa.RecordBatch, act: Act, delay_us: int, cause: str | None
    ) -> pa.RecordBatch:
        if self._membership is not None and act != Act.EXTEND:
            self._membership.settle_all(number, batch)
        return settling_batch(*lease_runs(batch, self.order is not None), act, delay_us, cause)

    def stop(self) -> None:
        """Receive nothing more, and give back the messages that were not handed out. Never waits. The others can be
        acknowledged."""
        self.stopped = True
        for number, batch in self.fetcher.stop():
            self.give_back(number, batch)
        self.arrival.set()

    def drain(self) -> None:
        """Wait until receives in flight are cancelled, give their messages back, and send the pending settlements (at
        most ``timeout`` seconds)."""
        for number, batch in self.fetcher.close(WITHDRAW_SECONDS):
            self.give_back(number, batch)
        deadline = time.monotonic() + self.timeout
        for lane in self.lanes:
            lane.drain(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed, self.unfinished = True, False
            self.drain()
            for lane in self.lanes:
                lane.close()


class Iterations:
    """Counts loops by the thread or task that runs them. Thread-safe, and safe in a signal handler."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: Counter[object] = Counter()

    def begin(self) -> object:
        """Count a loop of the calling thread or task over the consumer. Returns the argument of :meth:`end`."""
        runner = _runner()
        with self._lock:
            self._running[runner] += 1
        return runner

    def end(self, runner: object) -> None:
        with self._lock:
            self._running[runner] -= 1
            self._running += Counter()  # drops what is zero

    @property
    def mine(self) -> bool:
        """Return whether the caller's thread or task runs a loop: the caller is in its body, or in a signal handler
        that interrupted it."""
        return _runner() in self._running

    @property
    def others(self) -> bool:
        """Return whether another thread or task runs a loop."""
        with self._lock:
            return len(self._running) > self.mine


def _runner() -> object:
    """Return what identifies the caller: the running task, or the thread's id if there is none."""
    with suppress(RuntimeError):
        if (task := asyncio.current_task()) is not None:
            return task
    return threading.get_ident()
