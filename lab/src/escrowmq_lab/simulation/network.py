"""The network between nodes: connections as pairs of sockets, which delay, split, stall, break, and are told of it
late.

What is sent over one connection comes in order, or not at all: that is what TCP promises, and the product relies on it.
Between connections there is no order. A connection whose other end has died is told so after a while, or when it sends;
until then it is silent.
"""

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
    """How this network behaves; seconds."""

    latency: float = 0.001
    slow: float = 0.0
    """How likely what is sent takes up to a hundred times as long."""
    split: float = 0.0
    """How likely what is sent comes in two parts."""
    refused: float = 0.0
    """How likely a connection cannot be made."""
    held: float = 0.0
    """How likely what is sent lies somewhere for up to ten seconds."""


class End:
    """One end of a connection: as much of a ``socket`` as the product uses. Nothing it sends is refused for want of
    room."""

    def __init__(self, network: Network, owner: Node, far: Node) -> None:
        self.owner, self.far = owner, far
        self.last_ns = 0
        """When what was sent last arrives: what comes later arrives later."""
        self.other: End | None = None
        self.blocking = True
        self.closed = False
        self.lost = False
        """Broken: what has come can still be read, then an error."""
        self._network = network
        self._come = bytearray()
        self._finished = False
        self._waiting: deque[Task] = deque()
        self._timeout: float | None = None
        self.woken: Callable[[], None] = lambda: None

    # Of a socket

    family = socket.AF_UNIX
    """Without options to set."""

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Give it to the network."""
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.lost:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        self._network.carry(self, bytes(data))
        return len(data)

    def sendall(self, data: bytes) -> None:
        """As :meth:`send`: there is always room."""
        self.send(data)

    def sendmsg(self, parts: Sequence[bytes | memoryview], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """As :meth:`send`, of several."""
        return self.send(b"".join(parts))

    def recv(self, most: int) -> bytes:
        """Return what arrived; b"" after the other end shut down its direction."""
        run = self._network.scheduler
        until = None if self._timeout is None else run.seconds + self._timeout
        while True:
            if self.closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if self._come:
                data = bytes(self._come[:most])
                del self._come[:most]
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
        """As :meth:`recv`, into memory of the caller."""
        data = self.recv(size or len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until something has come, or the connection has ended."""
        run = self._network.scheduler
        assert run.current is not None
        task = run.current
        self._waiting.append(task)
        if not run.park(seconds) and task in self._waiting:
            self._waiting.remove(task)

    @property
    def readable(self) -> bool:
        """Whether :meth:`recv` would not wait."""
        return bool(self._come) or self.lost or self._finished or self.closed

    def settimeout(self, seconds: float | None) -> None:
        """How long :meth:`recv` waits."""
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        """Return how long :meth:`recv` waits; None: without end."""
        return self._timeout if self.blocking else 0.0

    def setblocking(self, blocking: bool) -> None:
        """Whether :meth:`recv` waits."""
        self.blocking, self._timeout = blocking, None

    def fileno(self) -> int:
        """-1 when it is closed."""
        return -1 if self.closed else 3

    def shutdown(self, how: int) -> None:
        """Say no more, and read no more."""
        if self.closed or self.lost:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        self._network.finish(self)
        if how != 1:  # SHUT_WR
            self._finished = True
            self._wake()

    def close(self) -> None:
        """Close it; the other end reads what is on its way, then the end."""
        if not self.closed:
            if not self.lost:
                self._network.finish(self)
            self.closed = True
            self._network.ends.pop(self, None)
            self._wake()

    # Of the network

    def came(self, data: bytes) -> None:
        """Bytes arrived."""
        if not (self.closed or self.lost):
            self._come += data
            self._wake()

    def finished(self) -> None:
        """Handle the other end's shutdown of its direction."""
        self._finished = True
        self._wake()

    def lose(self) -> None:
        """Mark the connection as broken."""
        self.lost = True
        self._network.ends.pop(self, None)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            self._network.scheduler.wake(self._waiting.popleft())
        self.woken()


class Network:
    """All connections. ``listen`` says who takes those to a host; ``trace`` is told what happens."""

    def __init__(
        self, scheduler: Scheduler, random: Random, options: NetworkOptions, trace: Callable[[str], None]
    ) -> None:
        self.scheduler = scheduler
        self.random = random
        self.options = options
        self.trace = trace
        self.ends: dict[End, None] = {}
        self._listening: dict[tuple[str, int], tuple[Node, Callable[[End], None]]] = {}
        self._stalled: dict[tuple[str, str], float] = {}

    def listen(self, host: str, port: int, node: Node, accept: Callable[[End], None]) -> None:
        """From now on ``accept`` takes connections to this place."""
        self._listening[host, port] = node, accept

    def connect(self, host: str, port: int, timeout: float) -> End:
        """Return a connection to a place, from the node whose task runs. Raises OSError; TimeoutError where nobody
        answers."""
        run, options = self.scheduler, self.options
        assert run.current is not None
        mine = run.current.node
        stalled = self._stall(mine.name, host)
        run.park(2 * (self._latency(mine.name, host) - stalled))
        found = self._listening.get((host, port))
        refused = found is None or found[0].dead or self.random.random() < options.refused
        if not refused and stalled:  # a process that stands still is connected to all the same, by its system
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
        accept(far)
        return near

    # Carrying

    def _latency(self, a: str, b: str) -> float:
        options = self.options
        seconds = options.latency * (0.5 + self.random.random())
        if options.slow and self.random.random() < options.slow:
            seconds *= 1 + 99 * self.random.random()
        return seconds + self._stall(a, b)

    def _stall(self, a: str, b: str) -> float:
        return max(self._stalled.get((a, b), 0.0) - self.scheduler.seconds, 0.0)

    def carry(self, end: End, data: bytes) -> None:
        """Put what an end sends on its way."""
        if len(data) > 1 and self.options.split and self.random.random() < self.options.split:
            cut = self.random.randrange(1, len(data))
            self._later(end, partial(End.came, data=data[:cut]))
            data = data[cut:]
        self._later(end, partial(End.came, data=data))

    def finish(self, end: End) -> None:
        """Send an end's shutdown of its direction."""
        self._later(end, lambda other: other.finished())

    def _later(self, end: End, act: Callable[[End], None]) -> None:
        """Let it come to the other end, after what was sent before."""
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
            if other.owner.dead:  # whoever sends to the dead is told so
                self.scheduler.after(self._latency(other.owner.name, end.owner.name), lambda: self._told(end))
            elif not other.lost:
                act(other)

        self.scheduler.after((at - now) / 1e9, arrive)

    def _told(self, end: End) -> None:
        if not (end.lost or end.closed or end.owner.dead):
            end.lose()

    # Faults

    def stall(self, a: str, b: str, seconds: float) -> None:
        """Delay everything sent from ``a`` to ``b`` until this time has passed."""
        self._stalled[a, b] = self.scheduler.seconds + seconds

    def cut(self, a: str, b: str) -> None:
        """Break all connections between two nodes; each end hears of it in its own time, and what is on its way comes
        or does not."""
        for end in [e for e in self.ends if {e.owner.name, e.far.name} == {a, b}]:
            if self.random.random() < 0.5:
                end.other = None
            self.scheduler.after(self.random.random() * 0.2, lambda end=end: self._told(end))  # type: ignore[misc]

    def dropped(self, node: Node) -> None:
        """Remove the ends of a node that died; the others learn of it soon, late, or when they send."""
        for end in list(self.ends):
            if end.owner is node:
                self.ends.pop(end, None)
            elif end.far is node:
                silence = 0.05 * self.random.random() if self.random.random() < 0.7 else 6 * self.random.random()
                self.scheduler.after(silence, lambda end=end: self._told(end))  # type: ignore[misc]
