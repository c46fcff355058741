"""Long polls at the brokers on behalf of HTTP clients that may disconnect at any moment.

Theory of operation. Requests with equal (group, lease, number of messages) share a *line*. Everything here runs on the
event loop, except that one thread per link sends, because a full connection blocks.

1. A new client gets one *poll* at each broker: an exchange RECEIVE. The messages of a poll go to its own client; if
   that one is served or gone, to the client that has waited longest in the line; if there is none, back to the broker.
2. A poll whose client is served or gone stays in the line without an owner, and the next client with as long a wait
   adopts it. When a line has no clients, its polls are withdrawn, so that a broker leases nothing to clients that are
   gone.
3. A poll that returns empty before its client's wait is over is repeated. When all polls of a client are over, it gets
   an empty response, or the error if every broker failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from escrowmq.client.aio import AsyncBus
from escrowmq.client.lanes.waiting import Sender
from escrowmq.errors import AWAY, Code, EscrowError, Overloaded, Unknown
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.settling import Settler
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.numbers import own_number
from escrowmq.wire import Exchange
from escrowmq.wire.exchanges import ReceiveOptions

MEMBERS = 16
"""Member numbers shared by all lines: each is one stream at a served broker. Withdrawing one line's polls may end
another's on the same stream; those are repeated (rule 3)."""
PATIENCE = 5.0
"""Time (s) past its own wait that a receive waits for an unreachable broker."""
LEAST_WAIT = 0.02
"""Minimum remaining wait (s) for which another poll is sent."""
CHECK_SECONDS = 0.25
"""Interval (s) between checks whether an overdue broker is unreachable."""
CLOSE_SECONDS = 2.0
_NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))

Key = tuple[str, int | None, int]
Received = tuple[int, pa.RecordBatch]
"""A broker's number and a DELIVERY batch from it."""


@dataclass(eq=False)
class _Client:
    result: asyncio.Future[Received | None]
    until: float
    polls: set[_Poll] = field(default_factory=set)
    empty: bool = False
    """Whether a broker reported that it has no messages."""
    problem: EscrowError | None = None


@dataclass(eq=False)
class _Poll:
    number: int
    owner: _Client | None
    until: float
    backoff: Backoff = field(default_factory=lambda: Backoff(0.01, 1.0))
    future: Future[pa.RecordBatch] | None = None


class _Line:
    """Clients that wait for equal receives, in order of arrival, and the polls for them."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.clients: deque[_Client] = deque()
        self.polls: set[_Poll] = set()


class Receiving:
    """All receives of one gateway."""

    def __init__(self, bus: AsyncBus, settings: GatewaySettings, settler: Settler) -> None:
        self._links = bus.router.links
        self._attendances = bus.router.attendances
        self._settings = settings
        self._settler = settler
        self._loop = asyncio.get_running_loop()
        self._senders = [Sender() for _ in self._links]
        self._lines: dict[Key, _Line] = {}
        self._members = [own_number() for _ in range(MEMBERS)]
        self._polls = 0
        self._closed = False
        self._empty = asyncio.Event()

    async def receive(
        self, group: str, max_messages: int, wait: float, lease_ms: int | None, gone: asyncio.Future[Any]
    ) -> Received | None:
        """Receive messages from one broker. Returns None if none arrive within ``wait`` seconds, or if ``gone`` (the
        client's disconnect) completes first: messages for it are then returned to the broker. Raises UNKNOWN_GROUP and
        so on, Overloaded(QUEUE_FULL)."""
        if self._closed:
            raise Unknown(Code.CLOSED, "the gateway is stopping")
        key = (group, lease_ms, max_messages)
        line = self._lines.setdefault(key, _Line(key))
        client = _Client(self._loop.create_future(), time.monotonic() + wait)
        try:
            self._enter(line, client)
            if not await self._wait_for_result(client, gone, time.monotonic() + wait + self._settings.timeout):
                if client.empty:
                    return None
                raise client.problem or Unknown(Code.TIMED_OUT, "no broker answered the receive")
            if gone.done():
                self._return_messages(group, client)
                return None
            return client.result.result()
        except asyncio.CancelledError:
            self._return_messages(group, client)
            raise
        finally:
            self._leave(line, client)

    async def _wait_for_result(self, client: _Client, gone: asyncio.Future[Any], deadline: float) -> bool:
        """Wait for the client's result or its disconnect. Returns False if waiting longer is useless: the deadline is
        over, or only unreachable brokers have not answered and the others have no messages."""
        while (left := deadline - time.monotonic()) > 0:
            late = time.monotonic() > client.until + LEAST_WAIT
            step = CHECK_SECONDS if late else min(left, client.until - time.monotonic() + 2 * LEAST_WAIT)
            done, _ = await asyncio.wait(
                {client.result, gone}, timeout=max(step, 0.0), return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return True
            if late and client.empty:
                attended = [one for poll in client.polls if (one := self._attendances[poll.number]) is not None]
                for one in attended:
                    one.suspect()
                if len(attended) == len(client.polls) and all(one.away for one in attended):
                    return False
        return False

    async def close(self, problem: EscrowError | None = None) -> None:
        """Give waiting clients an empty result, or the error, and withdraw their polls; late messages are returned."""
        self._closed = True
        for line in list(self._lines.values()):
            for client in list(line.clients):
                _set_result(client, problem)
                self._leave(line, client)
        if self._polls:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._empty.wait()
            except TimeoutError:
                pass  # a broker is unreachable: its leases will expire
        await asyncio.gather(*(asyncio.to_thread(sender.close) for sender in self._senders))

    # The lines

    def _enter(self, line: _Line, client: _Client) -> None:
        latest = client.until + LEAST_WAIT
        free = {poll.number: poll for poll in line.polls if poll.owner is None and poll.until <= latest}
        if self._polls + len(self._links) - len(free) > self._settings.max_receives * len(self._links):
            raise Overloaded(Code.QUEUE_FULL, "too many receives wait at the gateway")
        line.clients.append(client)
        for number in range(len(self._links)):
            poll = free.get(number)
            if poll is None:
                poll = _Poll(number, client, client.until)
                line.polls.add(poll)
                self._polls += 1
                self._poll(line, poll, client.until - time.monotonic())
            poll.owner = client
            client.polls.add(poll)

    def _leave(self, line: _Line, client: _Client) -> None:
        if client in line.clients:
            line.clients.remove(client)
        for poll in client.polls:
            poll.owner = None
        client.polls.clear()
        if not line.clients:
            for poll in line.polls:
                self._withdraw(poll)
            if not line.polls:
                self._lines.pop(line.key, None)

    def _remove(self, line: _Line, poll: _Poll) -> None:
        line.polls.discard(poll)
        self._polls -= 1
        if poll.owner is not None:
            poll.owner.polls.discard(poll)
        if not line.polls and not line.clients:
            self._lines.pop(line.key, None)
        if not self._polls:
            self._empty.set()

    # Polls

    def _poll(self, line: _Line, poll: _Poll, wait: float) -> None:
        group, lease_ms, max_messages = line.key
        options: ReceiveOptions = {
            "group": group,
            "member": self._members[hash(line.key) % MEMBERS],
            "max_messages": max_messages,
            "max_bytes": self._settings.max_receive_bytes,
            "wait_ms": max(round(wait * 1000), 0),
            "lease_ms": lease_ms,
            "return_rest": True,
        }

        def exchange() -> None:
            try:
                future = self._links[poll.number].exchange(Exchange.RECEIVE, _NO_ROWS, options)
            except Exception as problem:  # of any kind: the thread must keep serving others
                future = Future()
                future.set_exception(problem)
            poll.future = future
            future.add_done_callback(lambda done: self._call_on_loop(partial(self._on_answer, line, poll, done)))

        poll.until = time.monotonic() + max(wait, 0.0)
        self._empty.clear()
        self._senders[poll.number].put(exchange)

    def _withdraw(self, poll: _Poll) -> None:
        def cancel() -> None:
            if poll.owner is None and poll.future is not None:
                poll.future.cancel()

        self._senders[poll.number].put(cancel)

    def _call_on_loop(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass  # the loop is closed, so no client waits

    def _on_answer(self, line: _Line, poll: _Poll, done: Future[pa.RecordBatch]) -> None:
        problem = Unknown(Code.DISCONNECTED, "withdrawn") if done.cancelled() else done.exception()
        if problem is None and done.result().num_rows:
            received = (poll.number, done.result())
            self._remove(line, poll)
            for client in (poll.owner, *line.clients):
                if client is not None and not client.result.done():
                    client.result.set_result(received)
                    return
            self._settler.give_back(poll.number, line.key[0], done.result())
            return
        if self._poll_again(line, poll, problem):
            return
        self._remove(line, poll)
        client = poll.owner
        if client is not None:
            if problem is None:
                client.empty = True
            else:
                client.problem = problem if isinstance(problem, EscrowError) else Unknown(Code.CLOSED, repr(problem))
            if not client.polls:
                _set_result(client, None if client.empty else client.problem)

    def _poll_again(self, line: _Line, poll: _Poll, problem: BaseException | None) -> bool:
        """Repeat a poll if its client still waits for it. Returns whether it was repeated."""
        if poll.owner is None or poll.owner.result.done() or self._closed:
            return False
        left = poll.owner.until - time.monotonic()
        if problem is None:
            poll.backoff.worked()
            if left <= LEAST_WAIT:
                return False
            self._poll(line, poll, left)
            return True
        if not (isinstance(problem, EscrowError) and problem.code in AWAY):
            return False
        if (attended := self._attendances[poll.number]) is not None:
            attended.suspect()
        if left <= (0.0 if poll.owner.empty else -PATIENCE):
            return False
        pause = poll.backoff.failed()
        self._loop.call_later(pause, lambda: self._poll(line, poll, max(left - pause, 0.0)))
        return True

    def _return_messages(self, group: str, client: _Client) -> None:
        """Return messages that arrived for a client that is gone."""
        if client.result.done() and not client.result.exception() and (received := client.result.result()):
            self._settler.give_back(received[0], group, received[1])


def _set_result(client: _Client, outcome: Received | EscrowError | None) -> None:
    if client.result.done():
        return
    if isinstance(outcome, EscrowError):
        client.result.set_exception(outcome)
    else:
        client.result.set_result(outcome)
