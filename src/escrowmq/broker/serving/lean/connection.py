"""One accepted connection: sending without ever waiting, and what waits because its client does not read.

The thread that has an answer sends it, under the connection's lock and without waiting. What the socket does not take is kept and left
to the thread of the loop, which alone reads and alone closes. So nobody who answers is held up by a client.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from escrowmq.broker.serving.lean.listening import tune
from escrowmq.broker.serving.room import Held
from escrowmq.wire import lean

PIECES = 64
"""Answers that leave in one call of the system, at most."""
READ_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class _Unsent:
    """An answer that has not left, or not whole."""

    __slots__ = ("lost", "rest", "size")

    def __init__(self, rest: memoryview, size: int, lost: Callable[[], None] | None) -> None:
        self.rest = rest
        self.size = size
        self.lost = lost


class Connection:
    """A socket that does not block. ``most`` bytes may wait to be sent beside a first answer. ``attention`` tells the loop
    that there is something to do for it. ``freed`` is told of the bytes of answers that waited and wait no more."""

    def __init__(
        self,
        accepted: socket.socket,
        peer: str,
        most: int,
        attention: Callable[[Connection], None],
        reader: lean.Reader,
    ) -> None:
        self.peer = peer
        self.reader = reader
        self.opened = self.heard = time.monotonic()
        self.held = Held(peer, self.give_up)
        """What its requests and answers hold; ``stuck_since``: since when the client has taken nothing of what waits for it."""
        self.received = self.sent = 0
        self.closed = False
        self.broken = False
        """It is to be closed: the loop will."""
        self.events = 0
        """What the loop waits for; the loop's alone."""
        self.freed: Callable[[int], None] = lambda _: None
        self.unsent_bytes = 0
        self._unsent: deque[_Unsent] = deque()
        self._socket = accepted
        self._most = most
        self._attention = attention
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Of the socket; -1 when it is closed."""
        return self._socket.fileno()

    def send(self, data: bytes | bytearray, lost: Callable[[], None] | None = None) -> bool:
        """Send, or keep to be sent. From any thread; never waits. Whether all of it has left: else ``freed`` will hear of its bytes.

        ``lost`` is called when the client surely did not get it whole.
        """
        with self._lock:
            if not (self.closed or self.broken):
                sent = 0
                if not self._unsent:
                    sent = self._try([memoryview(data)])
                    if sent == len(data):
                        return True
                if not self.broken:
                    self._keep(memoryview(data)[sent:], len(data), lost)
                    return False
        self._lose(len(data), lost)
        return False

    def _lose(self, size: int, lost: Callable[[], None] | None) -> None:
        """An answer did not leave whole, and never will."""
        self.freed(size)
        try:
            if lost is not None:
                lost()
        except Exception:  # whoever answers has others to answer
            logger.exception("what an answer held could not be given back: %s", self.peer)

    def _keep(self, rest: memoryview, size: int, lost: Callable[[], None] | None) -> None:
        if not self._unsent:
            self.held.stuck_since = time.monotonic()
        self._unsent.append(_Unsent(rest, size, lost))
        self.unsent_bytes += len(rest)
        if len(self._unsent) > 1 and self.unsent_bytes > self._most:
            logger.warning("closing a connection that does not read: %s is owed %d bytes", self.peer, self.unsent_bytes)
            self.broken = True
        self._attention(self)

    def _try(self, pieces: list[memoryview]) -> int:
        """Hand over what the socket takes; how many bytes. With the lock held."""
        try:
            sent = self._socket.send(pieces[0]) if len(pieces) == 1 else self._socket.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as problem:
            logger.debug("a client left before its answer: %s", problem)
            self.broken = True
            self._attention(self)
            return 0
        self.sent += sent
        return sent

    def flush(self) -> bool:
        """Send more of what waits; whether nothing waits any more. By the loop."""
        freed = 0
        with self._lock:
            while self._unsent and not (self.closed or self.broken):
                sent = self._try([one.rest for one, _ in zip(self._unsent, range(PIECES), strict=False)])
                if not sent:
                    break
                self.unsent_bytes -= sent
                self.held.stuck_since = time.monotonic()
                while sent:
                    first = self._unsent[0]
                    if sent < len(first.rest):
                        first.rest = first.rest[sent:]
                        break
                    sent -= len(first.rest)
                    freed += first.size
                    self._unsent.popleft()
            if not self._unsent:
                self.held.stuck_since = None
        if freed:
            self.freed(freed)
        return not self._unsent

    def receive(self) -> bytes | None:
        """What came, b"" if nothing; None when the client is gone, or will say no more. By the loop."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as problem:
            logger.debug("a client is gone: %s", problem)
            return None
        self.received += len(data)
        self.heard = time.monotonic()
        return data or None

    def tune(self) -> None:
        """Set it to what a client's connection is. By the loop."""
        try:
            tune(self._socket)
        except OSError as problem:
            logger.debug("a client is gone: %s", problem)
            self.broken = True

    def say_no_more(self) -> None:
        """The client is told the end behind what was sent; what it still says can be read."""
        with self._lock:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.broken = True

    def attend(self) -> None:
        """Have the loop look at it. From any thread."""
        self._attention(self)

    def give_up(self) -> None:
        """Have the loop close it. From any thread."""
        self.broken = True
        self._attention(self)

    def close(self) -> None:
        """Close it; what waited to be sent is lost. By the loop."""
        with self._lock:
            self.closed = True
            left, self._unsent, self.unsent_bytes = self._unsent, deque(), 0
            self.held.stuck_since = None
            self._socket.close()
        for unsent in left:
            self._lose(unsent.size, unsent.lost)
