"""Cuts nodes off: every connection of a producer or consumer to a broker goes through this, a process of its own.

Each node has a loopback address of its own, on which the proxy listens with the brokers' port numbers; so its URLs
differ from those of others in the host alone. What is struck is a name, a node's or a broker's: all its links.

CUT: the connections are reset, and new ones refused. SILENCE: connections stay and are still accepted, and nothing
passes, in one direction or in both; when it is over they go on, or are reset. What is not passed on is not read: a
sender stands before a full buffer, as with a peer that has stopped. A broker that is not there is a connection that is
accepted and then reset.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from escrowmq.errors import Code, Unknown
from escrowmq_lab.chaos.nodes import log_to
from escrowmq_lab.chaos.orphans import die_with_the_parent

ANSWER_SECONDS = 30.0
"""How long the proxy may take for what it is told."""
BUFFER = 1 << 16
"""Bytes that wait for one receiver, about, until its sender is not read any more."""
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Route:
    """Where ``node`` finds a port of ``broker``: the same port number at the node's own address."""

    node: str
    host: str
    broker: str
    port: int
    behind: str = "127.0.0.1"
    """Where the broker really listens."""


class Proxy:
    """The proxy of a run, started at once. A context manager. What it is told has happened when the call returns.

    Raises Unknown(TIMED_OUT, DISCONNECTED) from all calls if its process does not answer.
    """

    def __init__(self, routes: Sequence[Route], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._channel, there = context.Pipe()
        self._process = context.Process(target=_main, args=(list(routes), there, log), name="proxy")
        self._process.start()
        there.close()
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._channel.close()

    def cut(self, name: str) -> None:
        """Reset the connections of a node or a broker, and refuse new ones."""
        self._ask("cut", name)

    def silence(self, name: str, *, to_brokers: bool = True, to_nodes: bool = True) -> None:
        """Pass nothing on in these directions."""
        self._ask("silence", name, to_brokers, to_nodes)

    def heal(self, name: str, *, reset: bool = False) -> None:
        """As if nothing had been; ``reset``: its connections are reset first."""
        self._ask("heal", name, reset)

    def connections(self) -> int:
        """Return how many there are."""
        return self._ask("count")

    def _ask(self, *words: str | bool) -> int:
        try:
            self._channel.send(words)
        except OSError as problem:
            raise Unknown(Code.DISCONNECTED, f"the proxy has ended: {problem}") from None
        return self._answer()

    def _answer(self) -> int:
        try:
            if self._channel.poll(ANSWER_SECONDS):
                answer: int = self._channel.recv()
                return answer
        except (EOFError, OSError) as problem:
            raise Unknown(Code.DISCONNECTED, f"the proxy has ended: {problem}", "see nodes/proxy.log") from None
        raise Unknown(Code.TIMED_OUT, "the proxy does not answer", "see nodes/proxy.log")


def _main(routes: list[Route], channel: Connection, log: Path) -> None:
    die_with_the_parent()
    log_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_Switchboard(routes).run(channel))


@dataclass(slots=True)
class _Fault:
    cut: bool
    to_brokers: bool
    to_nodes: bool


@dataclass(slots=True)
class _Link:
    """One route, and what runs over it."""

    route: Route
    server: asyncio.Server | None = None
    pairs: set[_Pair] = field(default_factory=set)
    cut: bool = False
    to_broker_held: bool = False
    to_node_held: bool = False

    def obey(self) -> None:
        """Have the connections do what the link says."""
        for pair in list(self.pairs):
            pair.obey()

    def reset(self) -> None:
        """Reset all connections."""
        for pair in list(self.pairs):
            pair.reset()


class _Switchboard:
    """All links, and what is wrong with them. On one event loop."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._links = [_Link(route) for route in routes]
        self._faults: dict[str, _Fault] = {}

    async def run(self, channel: Connection) -> None:
        """Listen, and do what the director says until it has gone."""
        for link in self._links:
            await self._listen(link)
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(channel.fileno(), told.set)
        channel.send(0)
        try:
            while True:
                await told.wait()
                told.clear()
                while channel.poll():
                    channel.send(await self._do(*channel.recv()))
        except (EOFError, OSError):
            return

    async def _do(self, word: str, name: str = "", *more: bool) -> int:
        links = [link for link in self._links if name in (link.route.node, link.route.broker)]
        match word:
            case "cut":
                self._faults[name] = _Fault(True, True, True)
            case "silence":
                self._faults[name] = _Fault(False, *more)
            case "heal":
                self._faults.pop(name, None)
                for link in links if more[0] else ():
                    link.reset()
        for link in links:
            await self._set(link)
        return sum(len(link.pairs) for link in self._links)

    async def _set(self, link: _Link) -> None:
        """Give a link the faults of its node and of its broker together."""
        names = (link.route.node, link.route.broker)
        faults = [fault for name in names if (fault := self._faults.get(name)) is not None]
        link.cut = any(fault.cut for fault in faults)
        link.to_broker_held = any(fault.to_brokers for fault in faults)
        link.to_node_held = any(fault.to_nodes for fault in faults)
        if link.cut:
            if link.server is not None:
                link.server.close()
                link.server = None
            link.reset()
        elif link.server is None:
            await self._listen(link)
        link.obey()

    async def _listen(self, link: _Link) -> None:
        loop, route = asyncio.get_running_loop(), link.route
        link.server = await loop.create_server(lambda: _Pair(link).near, route.host, route.port, backlog=256)


class _Pair:
    """A connection of a node, and the one to the broker that continues it."""

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.near, self.far = _Side(self), _Side(self)
        self._over = False
        self._connecting: asyncio.Task[None] | None = None

    def begun(self) -> None:
        """Connect to the broker after the node has connected."""
        self.link.pairs.add(self)
        if self.link.cut:
            self.reset()
            return
        self.near.hold("connecting")
        self.obey()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        route = self.link.route
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.far, route.behind, route.port)
        except OSError:
            self.reset()
            return
        if self._over:
            self.far.reset()
            return
        self.obey()
        self.near.let("connecting")

    def obey(self) -> None:
        """Pass on what the link passes on."""
        for side, held in ((self.near, self.link.to_broker_held), (self.far, self.link.to_node_held)):
            side.hold("silence") if held else side.let("silence")

    def other(self, side: _Side) -> _Side:
        """Return the one that continues it."""
        return self.far if side is self.near else self.near

    def eof(self) -> None:
        """One side has said all; when both have, it is over."""
        if self.near.done and self.far.done:
            self._end()
            self.near.close()
            self.far.close()

    def lost(self, side: _Side, problem: Exception | None) -> None:
        """Close the other side after one has gone: deliver what is on its way, unless this was a reset."""
        if self._over:
            return
        if problem is not None:
            self.reset()
            return
        self._end()
        self.other(side).close()

    def reset(self) -> None:
        """Both sides see a reset."""
        self._end()
        self.near.reset()
        self.far.reset()

    def _end(self) -> None:
        self._over = True
        self.link.pairs.discard(self)


class _Side(asyncio.Protocol):
    """One of the two connections of a pair. It is read while nothing holds it."""

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        self._held: set[str] = set()
        self._transport: asyncio.Transport | None = None
        self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(BUFFER)
        if self._pair.near is self:
            self._pair.begun()
        self._obey()

    def data_received(self, data: bytes) -> None:
        self._pair.other(self).write(data)

    def eof_received(self) -> bool:
        self.done = True
        self._pair.other(self).end()
        self._pair.eof()
        return True

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self._pair.lost(self, problem)

    def pause_writing(self) -> None:
        self._pair.other(self).hold("slow")

    def resume_writing(self) -> None:
        self._pair.other(self).let("slow")

    def hold(self, reason: str) -> None:
        """Do not read it."""
        self._held.add(reason)
        self._obey()

    def let(self, reason: str) -> None:
        """Read it, unless there is another reason not to."""
        self._held.discard(reason)
        self._obey()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def end(self) -> None:
        """Nothing more comes from the other side."""
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def _obey(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._held and transport.is_reading():
            transport.pause_reading()
        elif not self._held and not transport.is_reading() and not self.done:
            transport.resume_reading()
