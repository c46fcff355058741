"""One accepted connection: it sends without waiting, and queues what its client does not read.

The thread that produces an answer sends it, under the connection's lock and without waiting. Bytes that the socket does
not accept are queued for the thread of the loop, which alone reads and alone closes. So no client delays a thread that
answers.

Small and large answers have separate queues. All small answers are sent between two frames of large ones: a client that
reads much does not delay the acknowledgements of its own process.
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
"""After a minute of silence the system sends a keep-alive probe, four times within a minute: a connection without a
peer ends."""
_HTTP2 = b"PRI "
"""The beginning of HTTP/2, over which clients of version 0.1 spoke."""
_UPGRADE = "this broker does not speak Arrow Flight: its clients need the version of EscrowMQ that it has"
_GOAWAY = struct.pack(">HBBBIHBBBIII", 0, 0, 4, 0, 0, 0, 8 + len(_UPGRADE), 7, 0, 0, 0, 0) + _UPGRADE.encode()
"""HTTP/2 for: settings, none; GOAWAY, with the reason. Its client shows it."""

logger = logging.getLogger(__name__)


class _Unsent:
    """A frame that was not sent, or not completely."""

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
        """Remove the first ``sent`` bytes of the frame, which were sent."""
        self.pieces = frames.drop_bytes(self.pieces, sent)
        self.left -= sent


class Connection:
    """A channel that does not block. ``most``: limit of queued answer bytes, besides a first answer. ``attention``
    reports the connection to the loop. ``freed`` is called with the bytes of queued answers that were sent or
    dropped."""

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
        """The memory of its requests and answers."""
        self.received = self.sent = 0
        self.closed = False
        self.broken = False
        """Whether the loop must close it."""
        self.events = 0
        """Events that the loop waits for; used by the loop only."""
        self.freed: Callable[[int], None] | None = None
        self.unsent_bytes = 0
        """Queued bytes of answers; without those of reads and watches, which have limits of their own."""
        self._begun: _Unsent | None = None  # partly sent: it continues first
        self._small: deque[_Unsent] | None = None  # created on demand: most connections are idle
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
        """Return whether bytes are queued for the client."""
        return self._begun is not None or bool(self._small or self._large) or self._channel.unsent

    @property
    def buffered(self) -> bool:
        """Return whether received bytes can be read although the socket has none: TLS holds them."""
        return self._channel.buffered

    def send(
        self,
        answer: Sequence[Pieces],
        lost: Callable[[], None] | None = None,
        freed: Callable[[int], None] | None = None,
        *,
        large: bool = False,
    ) -> int:
        """Send or queue the frames of an answer. From any thread; never waits.

        Returns the bytes of frames that were sent completely. ``freed`` (by default the connection's) is called with
        the bytes of the others when they are sent or dropped. ``lost`` is called when the client certainly did not
        receive the whole answer. ``large``: small answers are sent first, and if ``freed`` is given, the bytes do not
        count as unsent answers. Large frames keep their order.
        """
        gone = at = 0
        with self._lock:
            owes = self.owes
            for at, pieces in enumerate(answer, 1):
                if self.closed or self.broken:
                    at -= 1
                    break
                size = frames.size_of(pieces)
                sent = 0 if owes else self._try(pieces)
                if sent == size:
                    gone += size
                    owes = self._channel.unsent
                else:
                    last = lost if at == len(answer) else None
                    self._keep(_Unsent(pieces, sent, size, last, freed), large or len(answer) > 1)
                    owes = True
        if owes:
            self._attention(self)
        if at < len(answer):
            self._lose(sum(map(frames.size_of, answer[at:])), lost, freed)
        return gone

    def _lose(self, size: int, lost: Callable[[], None] | None, freed: Callable[[int], None] | None) -> None:
        """Release the memory of an answer that was not sent completely: call ``freed`` with its bytes, and ``lost``."""
        freed = freed or self.freed
        try:
            if freed is not None:
                freed(size)
            if lost is not None:
                lost()
        except Exception:  # the calling thread has other answers to send
            logger.exception("the memory of an answer could not be released: %s", self.peer)

    def _keep(self, unsent: _Unsent, large: bool) -> None:
        """Queue a frame that was not sent completely. Marks the connection as broken if its client leaves too many
        bytes unread. Requires the lock."""
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
                    "closing a connection that does not read: %s has %d bytes waiting", self.peer, self.unsent_bytes
                )
                self.broken = True

    def _try(self, pieces: Pieces) -> int:
        """Send without waiting; return the number of bytes that the socket accepted, 0 if the client has left. Requires
        the lock."""
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
        """Send queued bytes, as many as the socket accepts. Called on the server's thread."""
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
        """Send the next queued frames in one call; completely sent ones are appended to ``done``. Returns whether more
        may be sent. Requires the lock."""
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
        """Receive once. Returns the completed frames; None if the client has gone or will send no more. Raises Rejected
        for an invalid frame. Called on the server's thread."""
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
        """Set the keep-alive of an accepted client's socket. Called on the server's thread."""
        try:
            self._channel.keep_alive(*KEEPALIVE)
        except OSError as problem:
            logger.debug("a client is gone: %s", problem)
            self.broken = True

    def end_sending(self) -> None:
        """Shut down the sending side; the client can read what was sent, and may still send."""
        with self._lock:
            try:
                self._channel.shutdown(SHUT_WR)
            except OSError:
                self.broken = True

    def attend(self) -> None:
        """Report the connection to the server's thread, which reads on or closes it. From any thread."""
        self._attention(self)

    def give_up(self) -> None:
        """Make the server's thread close the connection. From any thread."""
        self.broken = True
        self._attention(self)

    def close(self) -> None:
        """Close the connection and drop queued bytes. Called on the server's thread."""
        with self._lock:
            self.closed = True
            left = [*([self._begun] if self._begun else []), *(self._small or ()), *(self._large or ())]
            self._begun = self._small = self._large = None
            self.unsent_bytes = 0
            self.held.stuck_since = None
            self._channel.close()
        self.assembler.discard()  # its room is free from now on; the collector of cycles may come much later
        for unsent in left:
            self._lose(unsent.size, unsent.lost, unsent.freed)
