"""Where a broker's lean carrier is, and a socket to it whose greeting was answered."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from escrowmq.errors import EscrowError, unsent
from escrowmq.platform.listening import is_loopback
from escrowmq.wire import Json, lean

CONNECT_SECONDS = 2.0
"""For connecting and being welcomed: where a firewall swallows what is sent, nothing comes at all."""
_MAX_WELCOME_BYTES = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""An idle connection whose other end is gone is noticed by the kernel within half a minute. Where a system has these options."""


class Place(NamedTuple):
    """What a broker's ``hello`` says of its lean carrier, and who must answer there."""

    host: str
    port: int
    """0: it is reached over the Unix socket alone."""
    path: str
    """Of a Unix socket; empty: none that could be reached from here."""
    shard: int
    epoch: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.host}:{self.port}" if self.port else self.path


def place_of(host: str, hello: Json) -> Place | None:
    """Where the lean carrier of the broker at ``host`` is; None if it has none that could be reached from here."""
    told = hello.get("lean") or {}
    port, path = told.get("port"), told.get("socket")
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        port = 0
    if not isinstance(path, str) or not is_loopback(host):
        path = ""
    if not port and not path:
        return None
    return Place(host, port, path, int(hello.get("shard", -1)), int(hello.get("epoch", -1)))


def reach(place: Place) -> tuple[socket.socket, lean.Welcome, lean.Reader]:
    """A connected socket whose broker has welcomed us as the one that it should be: over its Unix socket if that can be reached,
    else over TCP. Raises ``unsent(...)``."""
    deadline = time.monotonic() + CONNECT_SECONDS
    problem: EscrowError | None = None
    for connect in [_local] * bool(place.path) + [_tcp] * bool(place.port):
        try:
            broker = connect(place, deadline)
        except OSError as raised:
            problem = unsent(f"no lean carrier answers at {place.name}: {raised}")
            continue
        try:
            return _greeted(broker, place, deadline)
        except BaseException as raised:
            broker.close()
            if isinstance(raised, (EscrowError, OSError)):
                problem = unsent(f"the lean carrier at {place.name} is of no use: {raised}")
                continue
            raise
    assert problem is not None
    raise problem


def _local(place: Place, deadline: float) -> socket.socket:
    broker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        broker.settimeout(_left(deadline))
        broker.connect(place.path)
    except BaseException:
        broker.close()
        raise
    return broker


def _tcp(place: Place, deadline: float) -> socket.socket:
    broker = socket.create_connection((place.host, place.port), _left(deadline))
    broker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    broker.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            broker.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return broker


def _greeted(broker: socket.socket, place: Place, deadline: float) -> tuple[socket.socket, lean.Welcome, lean.Reader]:
    broker.settimeout(_left(deadline))
    broker.sendall(lean.hello())
    frames = lean.Reader(_MAX_WELCOME_BYTES)
    found: list[lean.Frame] = []
    while not found:
        broker.settimeout(_left(deadline))
        if not (data := broker.recv(_MAX_WELCOME_BYTES)):
            raise unsent("it closed the connection instead of answering")
        found = frames.feed(data)
    said = lean.read_answer(found[0])
    if isinstance(said, EscrowError):
        raise unsent(said.message)
    if not isinstance(said, lean.Welcome) or len(found) > 1 or frames.waiting:
        raise unsent("it answered something else than a welcome")
    if (said.shard, said.epoch) != (place.shard, place.epoch):
        raise unsent(f"shard {said.shard:08x} answers there, not {place.shard:08x}, or another run of it")
    frames.most = said.max_answer_bytes
    return broker, said, frames


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
