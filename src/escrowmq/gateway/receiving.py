"""Long polls at the brokers on behalf of HTTP clients that may disconnect at any moment.

Theory of operation. Requests that want the same (group, lease, number of messages) share a *line*; everything here runs
on the event loop, except that a thread speaks to each link, because a full connection blocks.

1. A client that comes gets one *poll* at each broker: an exchange RECEIVE. What a poll brings goes to the client it was
   made for; if that one was served or has left, to the client that has waited longest in the line; if there is none,
   back to the broker.
2. A poll whose client was served or has left stays in the line without an owner, and the next client that waits as long
   takes it over. When no client is left in a line, its polls are withdrawn, so that a broker leases nothing to clients
   that are gone.
3. A poll that comes back empty before its client's time is over is asked anew. When all polls of a client are over, it
   is answered that nothing came, or what went wrong if every broker failed.
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
"""Lines share so many member numbers: each is one stream at a served broker. Withdrawing one line's polls may end
another's on the same stream; those are asked anew (rule 3).
"""
PATIENCE = 5.0
"""Seconds past its own waiting time that a receive waits for a broker that is away."""
WORTH_ASKING = 0.02
"""A shorter rest of the waiting time is not worth another question."""
LOOK_SECONDS = 0.25
"""Interval (s) between two probes whether a broker with a pending answer is away."""
CLOSE_SECONDS = 2.0
_NO_ROWS = pa.RecordBatch.from_pylist([], schema=pa.schema([]))

Key = tuple[str, int | None, int]
Received = tuple[int, pa.RecordBatch]
"""A broker's number and a DELIVERY batch of it."""


@dataclass(eq=False)
class _Client:
    result: asyncio.Future[Received | None]
    until: float
    polls: set[_Poll] = field(default_factory=set)
    empty: bool = False
    """Whether a broker said that it has nothing."""
    problem: EscrowError | None = None


@dataclass(eq=False)
class _Poll:
    number: int
    owner: _Client | None
    until: float
    backoff: Backoff = field(default_factory=lambda: Backoff(0.01, 1.0))
    future: Future[pa.RecordBatch] | None = None


class _Line:
    """The clients that wait for the same, in their order, and the polls for them."""

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
        """Return messages of one broker, or None if nothing came within ``wait`` seconds, or ``gone`` (the client's
        leaving) was first: what came for it then is given back. Raises UNKNOWN_GROUP and so on,
        Overloaded(QUEUE_FULL)."""
        if self._closed:
            raise Unknown(Code.CLOSED, "the gateway is stopping")
        key = (group, lease_ms, max_messages)
        line = self._lines.setdefault(key, _Line(key))
        client = _Client(self._loop.create_future(), time.monotonic() + wait)
        try:
            self._enter(line, client)
            if not await self._ends(client, gone, time.monotonic() + wait + self._settings.timeout):
                if client.empty:
                    return None
                raise client.problem or Unknown(Code.TIMED_OUT, "no broker answered the receive")
            if gone.done():
                self._give_back(group, client)
                return None
            return client.result.result()
        except asyncio.CancelledError:
            self._give_back(group, client)
            raise
        finally:
            self._leave(line, client)

    async def _ends(self, client: _Client, gone: asyncio.Future[Any], deadline: float) -> bool:
        """Wait for the client's result, or its leaving; False if neither is worth waiting for any longer: the deadline
        is over, or all that is missing are answers of brokers that are away, and the others have nothing."""
        while (left := deadline - time.monotonic()) > 0:
            late = time.monotonic() > client.until + WORTH_ASKING
            step = LOOK_SECONDS if late else min(left, client.until - time.monotonic() + 2 * WORTH_ASKING)
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

    async def close(self) -> None:
        """Tell all who wait that nothing came, and withdraw their polls; what still comes is given back."""
        self._closed = True
        for line in list(self._lines.values()):
            for client in list(line.clients):
                _settle(client, None)
                self._leave(line, client)
        if self._polls:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._empty.wait()
            except TimeoutError:
                pass  # a broker that is away: the leases end by themselves
        await asyncio.gather(*(asyncio.to_thread(sender.close) for sender in self._senders))

    # The lines

    def _enter(self, line: _Line, client: _Client) -> None:
        latest = client.until + WORTH_ASKING
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
                self._ask(line, poll, client.until - time.monotonic())
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

    def _drop(self, line: _Line, poll: _Poll) -> None:
        line.polls.discard(poll)
        self._polls -= 1
        if poll.owner is not None:
            poll.owner.polls.discard(poll)
        if not line.polls and not line.clients:
            self._lines.pop(line.key, None)
        if not self._polls:
            self._empty.set()

    # Polls

    def _ask(self, line: _Line, poll: _Poll, wait: float) -> None:
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
            except Exception as problem:  # whatever it is, the thread must continue for others
                future = Future()
                future.set_exception(problem)
            poll.future = future
            future.add_done_callback(lambda done: self._call(partial(self._on_answer, line, poll, done)))

        poll.until = time.monotonic() + max(wait, 0.0)
        self._empty.clear()
        self._senders[poll.number].put(exchange)

    def _withdraw(self, poll: _Poll) -> None:
        def cancel() -> None:
            if poll.owner is None and poll.future is not None:
                poll.future.cancel()

        self._senders[poll.number].put(cancel)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass  # the loop is closed: no client waits any more

    def _on_answer(self, line: _Line, poll: _Poll, done: Future[pa.RecordBatch]) -> None:
        problem = Unknown(Code.DISCONNECTED, "withdrawn") if done.cancelled() else done.exception()
        if problem is None and done.result().num_rows:
            received = (poll.number, done.result())
            self._drop(line, poll)
            for client in (poll.owner, *line.clients):
                if client is not None and not client.result.done():
                    client.result.set_result(received)
                    return
            self._settler.give_back(poll.number, line.key[0], done.result())
            return
        if self._ask_again(line, poll, problem):
            return
        self._drop(line, poll)
        client = poll.owner
        if client is not None:
            if problem is None:
                client.empty = True
            else:
                client.problem = problem if isinstance(problem, EscrowError) else Unknown(Code.CLOSED, repr(problem))
            if not client.polls:
                _settle(client, None if client.empty else client.problem)

    def _ask_again(self, line: _Line, poll: _Poll, problem: BaseException | None) -> bool:
        """Ask anew if its client still wants it; whether it was."""
        if poll.owner is None or poll.owner.result.done() or self._closed:
            return False
        left = poll.owner.until - time.monotonic()
        if problem is None:
            poll.backoff.worked()
            if left <= WORTH_ASKING:
                return False
            self._ask(line, poll, left)
            return True
        if not (isinstance(problem, EscrowError) and problem.code in AWAY):
            return False
        if (attended := self._attendances[poll.number]) is not None:
            attended.suspect()
        if left <= (0.0 if poll.owner.empty else -PATIENCE):
            return False
        pause = poll.backoff.failed()
        self._loop.call_later(pause, lambda: self._ask(line, poll, max(left - pause, 0.0)))
        return True

    def _give_back(self, group: str, client: _Client) -> None:
        """Give back what came for a client that has left."""
        if client.result.done() and not client.result.exception() and (received := client.result.result()):
            self._settler.give_back(received[0], group, received[1])


def _settle(client: _Client, outcome: Received | EscrowError | None) -> None:
    if client.result.done():
        return
    if isinstance(outcome, EscrowError):
        client.result.set_exception(outcome)
    else:
        client.result.set_result(outcome)
