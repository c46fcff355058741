"""One accepted connection: sending without ever waiting, and what waits because its client does not read.

The thread that has an answer sends it, under the connection's lock and without waiting. What the socket does not take
is kept and left to the thread of the loop, which alone reads and alone closes. So nobody who answers is held up by a
client.

Small answers and large ones wait in two queues. Between two frames of large answers, all small ones go: a client that
reads much does not wait for the acknowledgements of its own process.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from socket import SHUT_WR

from escrowmq.broker.serving.room import Held
from escrowmq.errors import Code, error
from escrowmq.wire import frames
from escrowmq.wire.channel import MAX_PIECES, Channel
from escrowmq.wire.frames import Pieces

KEEPALIVE = (60, 15, 4)
"""After a minute of silence the system asks the other side's, four times in a minute: a connection of which only this
end is left ends."""
_HTTP2 = b"PRI "
"""The beginning of HTTP/2, over which clients of version 0.1 spoke."""
_UPGRADE = "this broker does not speak Arrow Flight: its clients need the version of EscrowMQ that it has"
_GOAWAY = struct.pack(">HBBBIHBBBIII", 0, 0, 4, 0, 0, 0, 8 + len(_UPGRADE), 7, 0, 0, 0, 0) + _UPGRADE.encode()
"""HTTP/2 for: settings, none; GOAWAY, with the reason. Its client shows it."""

logger = logging.getLogger(__name__)


class _Unsent:
    """A frame that has not left, or not whole."""

    __slots__ = ("freed", "left", "lost", "pieces", "size")

    def __init__(
        self, pieces: Pieces, sent: int, size: int, lost: Callable[[], None] | None, freed: Callable[[int], None] | None
    ) -> None:
        self.pieces = frames.drop_bytes(pieces, sent)
        self.left = size - sent
        self.size = size
        self.lost = lost
        self.freed = freed

    def drop_sent(self, sent: int) -> None:
        """Drop the first bytes, which have left."""
        self.pieces = frames.drop_bytes(self.pieces, sent)
        self.left -= sent


class Connection:
    """A channel that does not block. ``most`` bytes of answers may wait to be sent beside a first one. ``attention``
    makes the loop look at the connection. ``freed`` is called with the bytes of answers that waited and wait no
    more."""

    __slots__ = (
        "__weakref__",
        "_attention",
        "_begun",
        "_channel",
        "_large",
        "_lock",
        "_most",
        "_small",
        "assembler",
        "broken",
        "closed",
        "events",
        "freed",
        "heard",
        "held",
        "opened",
        "peer",
        "received",
        "sent",
        "unsent_bytes",
    )

    def __init__(
        self,
        channel: Channel,
        peer: str,
        most: int,
        attention: Callable[[Connection], None],
        assembler: frames.Assembler,
    ) -> None:
        self.peer = peer
        self.assembler = assembler
        self.opened = self.heard = time.monotonic()
        self.held = Held(peer, self.give_up)
        """What its requests and answers hold."""
        self.received = self.sent = 0
        self.closed = False
        self.broken = False
        """Whether the loop is to close it."""
        self.events = 0
        """What the loop waits for; for the loop alone."""
        self.freed: Callable[[int], None] | None = None
        self.unsent_bytes = 0
        """Bytes of answers that wait; those of reads and watches, which bound themselves, do not count."""
        self._begun: _Unsent | None = None  # of which a part has left: it continues first
        self._small: deque[_Unsent] | None = None  # made when something waits: most connections are idle
        self._large: deque[_Unsent] | None = None
        self._channel = channel
        self._most = most
        self._attention = attention
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 when it is closed."""
        return self._channel.fileno()

    def certificate_names(self) -> list[str]:
        """Return the names in the client's certificate, if it has presented one."""
        return self._channel.certificate_names()

    @property
    def owes(self) -> bool:
        """Return whether something waits until the socket takes more."""
        return self._begun is not None or bool(self._small or self._large) or self._channel.unsent

    @property
    def buffered(self) -> bool:
        """Return whether there is more to read although the socket has nothing."""
        return self._channel.buffered

    def send(
        self,
        answer: Sequence[Pieces],
        lost: Callable[[], None] | None = None,
        freed: Callable[[int], None] | None = None,
        *,
        large: bool = False,
    ) -> int:
        """Send the frames of an answer, or keep them to be sent. From any thread; never waits.

        Returns the bytes of those that have left whole. Of the others ``freed`` (by default the connection's) is
        called with their bytes, when they have left or are lost. ``lost`` is called when the client certainly did not
        get the whole answer. ``large``: small answers go first, and the bytes do not count as unsent answers if
        ``freed`` is given. Frames that are sent as large keep their order.
        """
        gone = at = 0
        with self._lock:
            for at, pieces in enumerate(answer, 1):
                if self.closed or self.broken:
                    at -= 1
                    break
                gone += self._send_or_keep(pieces, lost if at == len(answer) else None, freed, large or len(answer) > 1)
            owes = self.owes
        if owes:
            self._attention(self)
        if at < len(answer):
            self._lose(sum(map(frames.size_of, answer[at:])), lost, freed)
        return gone

    def _send_or_keep(
        self, pieces: Pieces, lost: Callable[[], None] | None, freed: Callable[[int], None] | None, large: bool
    ) -> int:
        """Send a frame, or keep what the socket does not take of it. Returns its bytes if it has left whole, else 0.
        With the lock held."""
        size = frames.size_of(pieces)
        sent = 0 if self.owes else self._try(pieces)
        if sent == size:
            return size
        self._keep(_Unsent(pieces, sent, size, lost, freed), large)
        return 0

    def _lose(self, size: int, lost: Callable[[], None] | None, freed: Callable[[int], None] | None) -> None:
        """Give back what an answer held that never leaves whole."""
        freed = freed or self.freed
        try:
            if freed is not None:
                freed(size)
            if lost is not None:
                lost()
        except Exception:  # whoever answers has others to answer
            logger.exception("what an answer held could not be given back: %s", self.peer)

    def _keep(self, unsent: _Unsent, large: bool) -> None:
        """Keep a frame until the socket takes it. With the lock held."""
        alone = self._begun is None and not (self._small or self._large)
        if alone:
            self.held.stuck_since = time.monotonic()
        if unsent.left < unsent.size:
            self._begun = unsent
        elif large:
            self._large = self._large or deque()
            self._large.append(unsent)
        else:
            self._small = self._small or deque()
            self._small.append(unsent)
        if unsent.freed is None:
            self.unsent_bytes += unsent.left
            if self.unsent_bytes > self._most and not alone:
                logger.warning(
                    "closing a connection that does not read: %s is owed %d bytes", self.peer, self.unsent_bytes
                )
                self.broken = True

    def _try(self, pieces: Pieces) -> int:
        """Hand over what the socket takes. Returns how many bytes. With the lock held."""
        try:
            sent = self._channel.send(pieces)
        except OSError as problem:
            logger.debug("a client left before its answer: %s", problem)
            self.broken = True
            self._attention(self)
            return 0
        self.sent += sent
        return sent

    def flush(self) -> None:
        """Send more of pending work. By the loop."""
        done: list[_Unsent] = []
        with self._lock:
            try:
                goes_on = self._channel.flush()
            except OSError:
                goes_on, self.broken = False, True
            while goes_on and not (self.closed or self.broken):
                goes_on = self._send_next(done)
            if self._begun is None and not (self._small or self._large):
                self.held.stuck_since = None
                self._small = self._large = None
        for unsent in done:
            if (freed := unsent.freed or self.freed) is not None:
                freed(unsent.size)

    def _send_next(self, done: list[_Unsent]) -> bool:
        """Send in one call what goes next, what has left joins ``done``. Returns whether there may be more. With the
        lock held."""
        chosen = [self._begun] if self._begun is not None else []
        count = len(chosen[0].pieces) if chosen else 0
        for unsent in self._small or ():
            count += len(unsent.pieces)
            if count > MAX_PIECES and chosen:
                break
            chosen.append(unsent)
        if not chosen and self._large:
            chosen.append(self._large[0])
        if not chosen:
            return False
        sent = self._try([piece for unsent in chosen for piece in unsent.pieces])
        if not sent:
            return False
        self.held.stuck_since = time.monotonic()
        for unsent in chosen:
            if unsent is not self._begun:
                if not sent:
                    break
                queue = self._small if self._small and self._small[0] is unsent else self._large
                assert queue is not None
                queue.popleft()
            took = min(sent, unsent.left)
            if unsent.freed is None:
                self.unsent_bytes -= took
            sent -= took
            unsent.drop_sent(took)
            self._begun = unsent if unsent.left else None
            if not unsent.left:
                done.append(unsent)
        return True

    def receive(self) -> list[frames.Frame] | None:
        """Receive once. Returns the frames that became whole, None when the client is gone, or will send no more. By
        the loop.

        Raises Rejected for what is no frame.
        """
        target = self.assembler.target()
        if not target:
            return []  # a large frame waits for room
        try:
            count = self._channel.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as problem:
            logger.debug("a client is gone: %s", problem)
            return None
        if not count:
            return None
        if not self.received and bytes(target[: len(_HTTP2)]) == _HTTP2:
            logger.warning("a client of version 0.1 came, or one that speaks HTTP/2: %s", self.peer)
            self.send([[_GOAWAY]])
            raise error(Code.BAD_REQUEST, _UPGRADE)
        self.received += count
        self.heard = time.monotonic()
        return self.assembler.filled(count)

    def tune(self) -> None:
        """Set the socket options of a client's connection. By the loop."""
        try:
            self._channel.keep_alive(*KEEPALIVE)
        except OSError as problem:
            logger.debug("a client is gone: %s", problem)
            self.broken = True

    def end_sending(self) -> None:
        """Let the client read the end behind what was sent; what it still sends can be read."""
        with self._lock:
            try:
                self._channel.shutdown(SHUT_WR)
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
            left = [*([self._begun] if self._begun else []), *(self._small or ()), *(self._large or ())]
            self._begun = self._small = self._large = None
            self.unsent_bytes = 0
            self.held.stuck_since = None
            self._channel.close()
        for unsent in left:
            self._lose(unsent.size, unsent.lost, unsent.freed)
