"""The network between nodes: connections as pairs of sockets, with delays, splits, stalls and breaks that are noticed
late. Data of one connection arrives in order, or not at all: TCP promises that, and the product relies on it. Between
connections there is no order. A connection whose other end has died notices that after a while, or when it sends; until
then it is silent."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from escrowmq_lab.simulation.scheduler import Node, Scheduler, Task


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """The behaviour of the network; times in seconds."""

    latency: float = 0.001
    slow: float = 0.0
    """Probability that data takes up to a hundred times as long."""
    split: float = 0.0
    """Probability that data arrives in two parts."""
    refused: float = 0.0
    """Probability that a connection fails."""
    held: float = 0.0
    """Probability that data is held for up to ten seconds."""


class End:
    """One end of a connection: the part of ``socket`` that the product uses. Its send buffer is never full."""

    def __init__(self, network: Network, owner: Node, far: Node) -> None:
        self.owner, self.far = owner, far
        self.last_ns = 0
        """Arrival time of the last data sent: later data arrives later."""
        self.other: End | None = None
        self.blocking = True
        self.closed = False
        self.lost = False
        """Whether the connection is broken: received data can still be read, then an error follows."""
        self._network = network
        self._received = bytearray()
        self._finished = False
        self._waiting: deque[Task] = deque()
        self._timeout: float | None = None
        self.woken: Callable[[], None] = lambda: None
        self.on_sent: Callable[[bytes], None] = lambda data: None

    # Of a socket

    family = socket.AF_UNIX
    """A family without options to set."""

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Pass data to the network."""
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.lost:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        sent = bytes(data)
        self.on_sent(sent)
        self._network.carry(self, sent)
        return len(sent)

    def sendall(self, data: bytes) -> None:
        """Send like :meth:`send`: the buffer is never full."""
        self.send(data)

    def sendmsg(self, parts: Sequence[bytes | memoryview], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Send several parts like :meth:`send`."""
        return self.send(b"".join(parts))

    def recv(self, most: int, flags: int = 0) -> bytes:
        """Return received data; b"" after the other end has finished."""
        run = self._network.scheduler
        until = None if self._timeout is None else run.seconds + self._timeout
        while True:
            if self.closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if self._received:
                data = bytes(self._received[:most])
                del self._received[:most]
                return data
            if self.lost:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            if self._finished:
                return b""
            if not self.blocking:
                raise BlockingIOError
            left = None if until is None else until - run.seconds
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            self.wait(left)

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        """Receive like :meth:`recv`, into the caller's memory."""
        data = self.recv(size or len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until data has arrived, or the connection has ended."""
        run = self._network.scheduler
        assert run.current is not None
        task = run.current
        self._waiting.append(task)
        if not run.park(seconds) and task in self._waiting:
            self._waiting.remove(task)

    @property
    def readable(self) -> bool:
        """Return whether :meth:`recv` would return at once."""
        return bool(self._received) or self.lost or self._finished or self.closed

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of :meth:`recv`."""
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        """Return the timeout of :meth:`recv`; None: none."""
        return self._timeout if self.blocking else 0.0

    def setblocking(self, blocking: bool) -> None:
        """Set whether :meth:`recv` waits."""
        self.blocking, self._timeout = blocking, None

    def fileno(self) -> int:
        """Return -1 when it is closed."""
        return -1 if self.closed else 3

    def shutdown(self, how: int) -> None:
        """End sending and reading."""
        if self.closed or self.lost:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        self._network.finish(self)
        if how != 1:  # SHUT_WR
            self._finished = True
            self._wake()

    def close(self) -> None:
        """Close it; the other end reads data in flight, then the end."""
        if not self.closed:
            if not self.lost:
                self._network.finish(self)
            self.closed = True
            self._network.ends.pop(self, None)
            self._wake()

    # Of the network

    def on_data(self, data: bytes) -> None:
        """Deliver arrived bytes."""
        if not (self.closed or self.lost):
            self._received += data
            self._wake()

    def on_finish(self) -> None:
        """Mark the end of the other side's data."""
        self._finished = True
        self._wake()

    def on_loss(self) -> None:
        """Break the connection."""
        self.lost = True
        self._network.ends.pop(self, None)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            self._network.scheduler.wake(self._waiting.popleft())
        self.woken()


class Network:
    """All connections. ``listen`` registers acceptors for a host; ``trace`` receives events."""

    def __init__(
        self, scheduler: Scheduler, random: Random, options: NetworkOptions, trace: Callable[[str], None]
    ) -> None:
        self.scheduler = scheduler
        self.random = random
        self.options = options
        self.trace = trace
        self.opened: Callable[[End, End], None] = lambda near, far: None
        """Called with the client's end and the broker's end of each connection."""
        self.ends: dict[End, None] = {}
        self._listening: dict[tuple[str, int], tuple[Node, Callable[[End], None]]] = {}
        self._stalled: dict[tuple[str, str], float] = {}

    def listen(self, host: str, port: int, node: Node, accept: Callable[[End], None]) -> None:
        """Accept connections to this address with ``accept`` from now on."""
        self._listening[host, port] = node, accept

    def connect(self, host: str, port: int, timeout: float) -> End:
        """Connect to an address, from the node of the running task. Raises OSError; TimeoutError without a response."""
        run, options = self.scheduler, self.options
        assert run.current is not None
        mine = run.current.node
        stalled = self._stall(mine.name, host)
        run.park(2 * (self._latency(mine.name, host) - stalled))
        found = self._listening.get((host, port))
        refused = found is None or found[0].dead or self.random.random() < options.refused
        if not refused and stalled:  # the system of a stalled process still accepts connections
            refused = self.random.random() < 0.5
        if found is None or refused:
            if self.random.random() < 0.3:
                run.park(timeout)
                raise TimeoutError("timed out")
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        node, accept = found
        near, far = End(self, mine, node), End(self, node, mine)
        near.other, far.other = far, near
        self.ends[near] = self.ends[far] = None
        self.opened(near, far)
        accept(far)
        return near

    # Transport

    def _latency(self, a: str, b: str) -> float:
        options = self.options
        seconds = options.latency * (0.5 + self.random.random())
        if options.slow and self.random.random() < options.slow:
            seconds *= 1 + 99 * self.random.random()
        return seconds + self._stall(a, b)

    def _stall(self, a: str, b: str) -> float:
        return max(self._stalled.get((a, b), 0.0) - self.scheduler.seconds, 0.0)

    def carry(self, end: End, data: bytes) -> None:
        """Send data of an end."""
        if len(data) > 1 and self.options.split and self.random.random() < self.options.split:
            cut = self.random.randrange(1, len(data))
            self._deliver_later(end, partial(End.on_data, data=data[:cut]))
            data = data[cut:]
        self._deliver_later(end, partial(End.on_data, data=data))

    def finish(self, end: End) -> None:
        """Send the end of data."""
        self._deliver_later(end, lambda other: other.on_finish())

    def _deliver_later(self, end: End, act: Callable[[End], None]) -> None:
        """Deliver to the other end later, after earlier data."""
        now = self.scheduler.now_ns
        soonest = end.last_ns + 1
        seconds = self._latency(end.owner.name, end.far.name)
        if self.options.held and self.random.random() < self.options.held:
            seconds += 10 * self.random.random()
        at = end.last_ns = max(now + round(seconds * 1e9), soonest)

        def arrive() -> None:
            other = end.other
            if other is None:  # cut
                return
            if other.owner.dead:  # sending to a dead node breaks the connection
                self.scheduler.after(self._latency(other.owner.name, end.owner.name), lambda: self._notice_loss(end))
            elif not other.lost:
                act(other)

        self.scheduler.after((at - now) / 1e9, arrive)

    def _notice_loss(self, end: End) -> None:
        if not (end.lost or end.closed or end.owner.dead):
            end.on_loss()

    # Faults

    def stall(self, a: str, b: str, seconds: float) -> None:
        """Delay data from ``a`` to ``b`` by this time."""
        self._stalled[a, b] = self.scheduler.seconds + seconds

    def cut(self, a: str, b: str) -> None:
        """Break all connections between two nodes; each end notices later, and data in flight arrives or not."""
        for end in [e for e in self.ends if {e.owner.name, e.far.name} == {a, b}]:
            if self.random.random() < 0.5:
                end.other = None
            self.scheduler.after(self.random.random() * 0.2, lambda end=end: self._notice_loss(end))  # type: ignore[misc]

    def drop_node(self, node: Node) -> None:
        """Remove the ends of a dead node; the other ends notice soon, late, or when they send."""
        for end in list(self.ends):
            if end.owner is node:
                self.ends.pop(end, None)
            elif end.far is node:
                silence = 0.05 * self.random.random() if self.random.random() < 0.7 else 6 * self.random.random()
                self.scheduler.after(silence, lambda end=end: self._notice_loss(end))  # type: ignore[misc]
