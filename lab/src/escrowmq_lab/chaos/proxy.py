"""A proxy process between nodes and brokers that can cut nodes off: every connection of a producer or consumer goes
through it.

Each node has its own loopback address, on which the proxy listens with the brokers' port numbers, so its URLs differ
from those of others only in the host. A fault applies to a name, a node's or a broker's, with all its links.

CUT: the connections are reset, and new ones rejected. SILENCE: connections stay and are still accepted, but no data
passes, in one direction or both; afterwards they continue, or are reset. Blocked data is not read: the sender faces a
full buffer, as with a stopped peer. A connection to a missing broker is accepted and then reset.
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
"""Timeout (s) of the proxy's responses."""
BUFFER = 1 << 16
"""Approximate bytes buffered per receiver before its sender is no longer read."""
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Route:
    """A listener for ``node`` to a port of ``broker``: the same port number at the node's own address."""

    node: str
    host: str
    broker: str
    port: int
    behind: str = "127.0.0.1"
    """The actual address of the broker."""


class Proxy:
    """The proxy of a run, started at once. A context manager. Commands have taken effect when the call returns. All
    calls raise Unknown(TIMED_OUT, DISCONNECTED) if its process does not respond."""

    def __init__(self, routes: Sequence[Route], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._channel, there = context.Pipe()
        self._process = context.Process(target=_main, args=(list(routes), there, log), name="proxy")
        self._process.start()
        there.close()
        try:
            self._read_response()
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
        """Reset the connections of a node or a broker, and reject new ones."""
        self._send_command("cut", name)

    def silence(self, name: str, *, to_brokers: bool = True, to_nodes: bool = True) -> None:
        """Block data in these directions."""
        self._send_command("silence", name, to_brokers, to_nodes)

    def heal(self, name: str, *, reset: bool = False) -> None:
        """Remove the faults of a name; ``reset``: reset its connections first."""
        self._send_command("heal", name, reset)

    def connections(self) -> int:
        """Return the number of connections."""
        return self._send_command("count")

    def _send_command(self, *words: str | bool) -> int:
        try:
            self._channel.send(words)
        except OSError as problem:
            raise Unknown(Code.DISCONNECTED, f"the proxy has ended: {problem}") from None
        return self._read_response()

    def _read_response(self) -> int:
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
    """One route, and its connections."""

    route: Route
    server: asyncio.Server | None = None
    pairs: set[_Pair] = field(default_factory=set)
    cut: bool = False
    to_broker_held: bool = False
    to_node_held: bool = False

    def apply(self) -> None:
        """Apply the link's faults to its connections."""
        for pair in list(self.pairs):
            pair.apply()

    def reset(self) -> None:
        """Reset all connections."""
        for pair in list(self.pairs):
            pair.reset()


class _Switchboard:
    """All links, and their faults. On one event loop."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._links = [_Link(route) for route in routes]
        self._faults: dict[str, _Fault] = {}

    async def run(self, channel: Connection) -> None:
        """Listen, and run the director's commands until it has gone."""
        for link in self._links:
            await self._listen(link)
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(channel.fileno(), ready.set)
        channel.send(0)
        try:
            while True:
                await ready.wait()
                ready.clear()
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
        """Combine the faults of a link's node and broker."""
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
        link.apply()

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

    def on_connected(self) -> None:
        """Connect to the broker after the node has connected."""
        self.link.pairs.add(self)
        if self.link.cut:
            self.reset()
            return
        self.near.hold("connecting")
        self.apply()
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
        self.apply()
        self.near.release("connecting")

    def apply(self) -> None:
        """Block or unblock both directions as the link requires."""
        for side, held in ((self.near, self.link.to_broker_held), (self.far, self.link.to_node_held)):
            side.hold("silence") if held else side.release("silence")

    def other(self, side: _Side) -> _Side:
        """Return the other side."""
        return self.far if side is self.near else self.near

    def on_eof(self) -> None:
        """Close the pair when both sides have sent everything."""
        if self.near.done and self.far.done:
            self._end()
            self.near.close()
            self.far.close()

    def on_lost(self, side: _Side, problem: Exception | None) -> None:
        """Close the other side after one is lost: pending data is delivered, unless this was a reset."""
        if self._over:
            return
        if problem is not None:
            self.reset()
            return
        self._end()
        self.other(side).close()

    def reset(self) -> None:
        """Reset both sides."""
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
            self._pair.on_connected()
        self._update_reading()

    def data_received(self, data: bytes) -> None:
        self._pair.other(self).write(data)

    def eof_received(self) -> bool:
        self.done = True
        self._pair.other(self).end()
        self._pair.on_eof()
        return True

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self._pair.on_lost(self, problem)

    def pause_writing(self) -> None:
        self._pair.other(self).hold("slow")

    def resume_writing(self) -> None:
        self._pair.other(self).release("slow")

    def hold(self, reason: str) -> None:
        """Stop reading it."""
        self._held.add(reason)
        self._update_reading()

    def release(self, reason: str) -> None:
        """Resume reading, unless another reason prevents it."""
        self._held.discard(reason)
        self._update_reading()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def end(self) -> None:
        """Signal the end of data to this side."""
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._held and transport.is_reading():
            transport.pause_reading()
        elif not self._held and not transport.is_reading() and not self.done:
            transport.resume_reading()
