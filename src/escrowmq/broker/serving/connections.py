"""The TCP connections that this process accepted on a port: which are silent, how many there are, and closing them.

Flight has no deadlines for its connections, no bound on them, and its shutdown waits until every client has left. So they are looked
at from the side: every descriptor of the process that is a connection on the port is one of them, and Linux tells of each how many
bytes it has brought and when (``TCP_INFO``). Why it is done so is in docs/decisions/0018-silent-connections.md.

Rules of a look (:meth:`Guard.look`):

1. A connection that has not brought the bytes of one call after ``SILENT_SECONDS`` is closed; under pressure (more than half of the
   bound) after ``PRESSED_SECONDS``.
2. When there are more than the bound, the surplus is closed: first those that never spoke, then those without a call under way, then
   the others; among equals those that have been silent longest.
3. A connection that brings more bytes than two requests may have, and nothing of it is whole, is closed: gRPC gathers a message in
   memory before anybody sees it, however large it is.
4. The bound is ``max_connections``, or what the process's descriptors leave when the log, HTTP and clients have got theirs.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from escrowmq.broker.serving.room import Room
from escrowmq.platform.descriptors import connection_share, descriptor_limit

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
BUSY_LOOK_SECONDS = 0.05
"""After a look that closed some, or while much is on its way."""
LOOK_SHARE = 10
"""A look may take one part in so many of the time: with thousands of connections there are fewer looks."""
SILENT_SECONDS = 5.0
PRESSED_SECONDS = 0.1
SPOKEN_BYTES = 128
"""Fewer bytes are no call: gRPC's greeting takes some 60, the headers of a call more than 100."""
DEFER_SECONDS = 5
"""How long the system itself keeps a new connection that has brought nothing, where it can, before it hands it over."""

_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux
_LAST_RECEIVED = struct.Struct("<I")  # tcpi_last_data_recv, milliseconds
_RECEIVED = struct.Struct("<Q")  # tcpi_bytes_received
_LAST_RECEIVED_AT, _RECEIVED_AT = 52, 128


@dataclass(frozen=True, slots=True)
class Seen:
    """A connection as a look found it. ``peer`` as Flight writes it: ``ipv4:127.0.0.1:40000``."""

    descriptor: int
    peer: str
    received: int
    silent_ms: int


class Probe:
    """Looks at descriptors of this process. Takes its own beforehand: when there are none left it still works.

    Another thread may close a descriptor, and the system give its number to something else, at any time. So a descriptor is first
    copied onto one that belongs to the probe, and everything is asked of, and done to, that copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)

    def close(self) -> None:
        """Give its descriptors back."""
        with self._lock:
            for descriptor in (self._copy, self._nothing):
                os.close(descriptor)
            self._copy = self._nothing = -1

    @contextmanager
    def socket(self, descriptor: int) -> Iterator[socket.socket | None]:
        """A copy of the TCP socket that ``descriptor`` is, None if it is none."""
        with self._lock:
            if self._copy < 0 or descriptor in (self._copy, self._nothing):
                yield None
                return
            found: socket.socket | None = None
            try:
                os.dup2(descriptor, self._copy, inheritable=False)
                found = socket.socket(fileno=self._copy)
            except OSError:
                pass
            try:
                of_tcp = found is not None and found.family in (socket.AF_INET, socket.AF_INET6)
                yield found if of_tcp and found is not None and found.type == socket.SOCK_STREAM else None
            finally:
                if found is not None:
                    found.detach()
                os.dup2(self._nothing, self._copy, inheritable=False)

    def connections(self, port: int) -> list[Seen]:
        """Every connection that was accepted on ``port``."""
        return [seen for number in _descriptors() if (seen := self._seen(number, port)) is not None]

    def _seen(self, number: int, port: int) -> Seen | None:
        with self.socket(number) as found, suppress(OSError, struct.error):
            if found is not None and found.getsockname()[1] == port:
                received, silent_ms = SPOKEN_BYTES, 0
                peer = _peer_of(found)  # raises for a socket that is not connected, such as the listening one
                if _TCP_INFO is not None:
                    info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                    (received,), (silent_ms,) = (
                        _RECEIVED.unpack_from(info, _RECEIVED_AT),
                        _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT),
                    )
                return Seen(number, peer, received, silent_ms)
        return None

    def shut(self, seen: Seen, port: int) -> bool:
        """Shut a connection down, if it still is the one that was seen. Data already written is still sent."""
        with self.socket(seen.descriptor) as found, suppress(OSError):
            if found is not None and found.getsockname()[1] == port and _peer_of(found) == seen.peer:
                found.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def defer_accept(self, port: int) -> None:
        """Let the system keep connections on ``port`` to itself until they bring something, where it can (Linux)."""
        option: int = getattr(socket, "TCP_DEFER_ACCEPT", 0)
        for number in _descriptors() if option else ():
            with self.socket(number) as found, suppress(OSError):
                ours = found is not None and found.getsockname()[1] == port
                if ours and found is not None and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.setsockopt(socket.IPPROTO_TCP, option, DEFER_SECONDS)


def _descriptors() -> Collection[int]:
    """The numbers of open descriptors; all that there may be, if none is left to list them with."""
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return range(descriptor_limit())


def _peer_of(connection: socket.socket) -> str:
    """As gRPC names it: a client over IPv4 of a socket that takes both is one over IPv4."""
    host, port = connection.getpeername()[:2]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def close_connections(port: int) -> int:
    """Shut down every connection that this process accepted on ``port``; returns how many. Data already written is still sent."""
    probe = Probe()
    try:
        return sum(probe.shut(seen, port) for seen in probe.connections(port))
    finally:
        probe.close()


class Guard:
    """Keeps the connections of one port within their bound, on a thread of its own. ``room`` knows their calls; ``unfinished`` are
    the bytes that one may bring before what it sends is whole."""

    def __init__(self, port: int, most: int, room: Room, unfinished: int) -> None:
        self._port = port
        self._most = most
        self._room = room
        self._unfinished = unfinished
        self._marks: dict[
            str, tuple[int, int]
        ] = {}  # by peer: what had come whole, and how many bytes, when that changed
        self._probe = Probe()
        self._first_seen: dict[str, float] = {}
        self._hurried = False  # much is on its way
        self._wanted: set[str] = set()  # peers that somebody wants to be closed
        self._ended = False
        self._called = threading.Event()  # to end, or to close those
        self._thread = threading.Thread(target=self._work, name="escrowmq-guard", daemon=True)
        self.closed = 0
        """Connections that it has closed."""

    def start(self) -> None:
        """Begin to look."""
        self._probe.defer_accept(self._port)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended = True
        self._called.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._probe.close()

    def shut(self, *peers: str) -> None:
        """Close the connections of these peers, whoever they are."""
        for seen in self._probe.connections(self._port):
            if seen.peer in peers and self._probe.shut(seen, self._port):
                self.closed += 1

    def shut_soon(self, peer: str) -> None:
        """Have it closed by the guard's thread: to find one connection takes as long as to look at all, and whoever found that it must go has others to serve."""
        self._wanted.add(peer)
        self._called.set()

    def _work(self) -> None:
        due = time.monotonic() + LOOK_SECONDS
        while True:
            self._called.wait(max(due - time.monotonic(), 0.0))
            self._called.clear()
            if self._ended:
                return
            began, closed = time.monotonic(), 0
            try:
                if wanted := [self._wanted.pop() for _ in range(len(self._wanted))]:
                    self.shut(*wanted)
                if began < due:
                    continue
                closed = self.look(began)
                self._room.relieve()
            except Exception:
                logger.exception("connections could not be looked at")
            pause = BUSY_LOOK_SECONDS if closed or self._hurried else LOOK_SECONDS
            now = time.monotonic()
            due = now + max(pause, LOOK_SHARE * (now - began))

    @property
    def bound(self) -> int:
        """How many connections there may be."""
        return min(self._most, connection_share())

    def look(self, now: float) -> int:
        """Close what the rules say; how many."""
        there = self._probe.connections(self._port)
        self._first_seen = {seen.peer: self._first_seen.get(seen.peer, now) for seen in there}
        bound = self.bound
        patience = PRESSED_SECONDS if len(there) > bound // 2 else SILENT_SECONDS
        gone = self._endless(there)
        mute = [seen for seen in there if seen.received < SPOKEN_BYTES]
        gone += [seen for seen in mute if now - self._first_seen[seen.peer] >= patience]
        surplus = len(there) - len(gone) - bound
        if surplus > 0:
            busy, known = self._room.peers(), {seen.descriptor for seen in gone}
            others = [seen for seen in there if seen.descriptor not in known]
            others.sort(key=lambda seen: (seen.received >= SPOKEN_BYTES, seen.peer in busy, -seen.silent_ms))
            gone += others[:surplus]
        closed = sum(self._probe.shut(seen, self._port) for seen in gone)
        if closed:
            logger.info("closed %d silent connections of %d", closed, len(there))
        self.closed += closed
        return closed

    def _endless(self, there: list[Seen]) -> list[Seen]:
        """Those that bring more than requests may have, without an end; all of them together count, too, the largest first."""
        arrived = self._room.arrivals({seen.peer for seen in there})
        marks = {}
        pending: list[tuple[int, Seen]] = []
        for seen in there:
            count = arrived.get(seen.peer, 0)
            known, bytes_then = self._marks.get(seen.peer, (-1, 0))
            marks[seen.peer] = (count, seen.received if count != known else bytes_then)
            pending.append((seen.received - marks[seen.peer][1], seen))
        self._marks = marks
        pending.sort(key=lambda pair: -pair[0])
        total = sum(size for size, _ in pending)
        self._hurried = total > self._unfinished // 4
        found = []
        for size, seen in pending:
            if size <= self._unfinished and total <= 2 * self._unfinished:
                break
            found.append(seen)
            total -= size
        return found
