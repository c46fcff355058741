"""Limits the memory of all calls of a served broker together: bytes of requests, answers and reads, and the number of
calls.

Each call has limits of its own; this limits the sum. Rules:

1. A call waits for room up to ``PATIENCE`` seconds, then it gets Overloaded(QUEUE_FULL). In as many seconds after that,
   calls of its connection without room are rejected at once, so that later ones do not wait longer than their client
   would. A call always gets room if no other holds any, however large it is.
2. Existing bytes (an answer) are counted without waiting.
3. If room is missing, the connection that has not read for the longest time, and at least for ``STUCK_SECONDS``, is
   closed. So clients that read do not wait for clients that do not.
4. Messages may use the part ``MESSAGES`` of the room, and those of one connection as much as is left for all others: so
   small requests, acknowledgements, decisions and queries have room, however many clients send without limit.
5. The answer to a receive gets room before it is read from the log: from the part of reads, and not more than is left
   for all others. A client with unread answers gets none.
6. There are at most ``most_calls`` calls (actions, reads and watches). A further one is rejected; if one connection has
   more than ``SHARE`` of them, that connection is closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from escrowmq.errors import Code, EscrowError, error

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Together with the wait for the disk (``PATIENCE_SECONDS`` of the writer's pace, 3 s) less than the 12 s after which a
client gives up a silent broker."""
STUCK_SECONDS = 0.5
READS = 0.5
"""The part of all bytes that reads may hold, so that they do not delay sends and receives."""
LEAST_GRANT = 64 << 10
"""Minimum bytes of an answer if more messages are ready."""
MESSAGES = 7 / 8
"""The part of all bytes that messages may hold."""
SHARE = 64
"""Calls of one connection that are never too many; our clients have a handful."""


class Held:
    """The memory of one connection. ``stuck_since``: since when the client has read nothing of its queued answers
    (monotonic seconds); None if none is queued. ``shut`` closes the connection. ``impatient_until``: end of a period in
    whose first half calls wait for room, and in whose second half they do not.
    """

    __slots__ = ("closed", "impatient_until", "peer", "reads", "shut", "size", "stuck_since")

    def __init__(self, peer: str, shut: Callable[[], None] = lambda: None) -> None:
        self.peer = peer
        self.shut = shut
        self.size = 0
        self.stuck_since: float | None = None
        self.impatient_until = 0.0
        self.reads = False  # whether it holds what was read for its client
        self.closed = False


class Room:
    """The bytes and calls of one broker. ``refused`` is called at each rejection."""

    def __init__(self, most_bytes: int, most_calls: int, refused: Callable[[Code], None] = lambda code: None) -> None:
        self.most_bytes = most_bytes
        self.most_calls = most_calls
        self._refused = refused
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0  # threads in take()
        self._held: set[Held] = set()
        self._calls: Counter[Held] = Counter()
        self._call_count = 0
        self.used = 0

    def enter(self, held: Held) -> None:
        """Count the memory of a connection from now on, until :meth:`leave`."""
        with self._lock:
            self._held.add(held)

    def leave(self, held: Held) -> None:
        """Release all memory of a connection, and count it no longer."""
        with self._lock:
            self._held.discard(held)
            self.used -= held.size
            held.size = 0
            self._changed.notify_all()

    def begin_call(self, held: Held) -> None:
        """Count a call of a connection, until :meth:`end_call`. Raises Overloaded(QUEUE_FULL) when there are too
        many."""
        greedy = None
        with self._lock:
            refused = self._call_count >= self.most_calls
            if refused:
                ((most, count),) = self._calls.most_common(1)
                greedy = most if count > SHARE else None
            else:
                self._calls[held] += 1
                self._call_count += 1
        if greedy is not None:
            logger.warning("closing a connection with too many calls: %s", greedy.peer)
            greedy.shut()
        if refused:
            self._refused(Code.QUEUE_FULL)
            raise error(Code.QUEUE_FULL, "the broker has too many pending calls")

    def end_call(self, held: Held) -> None:
        """Count one call of a connection less: it has ended."""
        with self._lock:
            self._call_count -= 1
            self._calls[held] -= 1
            if not self._calls[held]:
                del self._calls[held]

    def take(self, held: Held, size: int, *, messages: bool = False, reads: bool = False) -> None:
        """Reserve ``size`` bytes for a connection, waiting for room. ``messages``: within their part (rule 4);
        ``reads``: within the part of reads (rule 5). Raises Overloaded(QUEUE_FULL) if there is none in time."""
        while True:
            with self._lock:
                if self._fits(held, size, messages=messages, reads=reads):
                    return
                left = self.patience(held)
                if left <= 0:
                    raise self.refusal()
                stuck = self._longest_stuck()
                if stuck is None:
                    self._waiters += 1
                    self._changed.wait(min(left, STUCK_SECONDS / 4))
                    self._waiters -= 1
            if stuck is not None:
                self._close(stuck)

    def offer(self, held: Held, size: int, *, messages: bool = False) -> bool:
        """As :meth:`take`, without waiting. Returns whether the bytes fit. If not, a connection that does not read is
        closed by rule 3; retry soon, within :meth:`patience`."""
        with self._lock:
            if self._fits(held, size, messages=messages):
                return True
            stuck = self._longest_stuck()
        if stuck is not None:
            self._close(stuck)
        return False

    def grant(self, held: Held, wanted: int) -> int:
        """Reserve up to ``wanted`` bytes for the answer to a receive, from the part of reads (rule 5), without waiting.
        Returns how many. If 0, a connection that does not read is closed (rule 3): retry soon."""
        with self._lock:
            held.reads = True
            left = int(self._compute_read_room(wanted))
            granted = wanted if self.used == held.size else min(wanted, left - held.size)
            if granted >= min(wanted, LEAST_GRANT):
                self.used += granted
                held.size += granted
                return granted
            stuck = self._longest_stuck()
        if stuck is not None:
            self._close(stuck)
        return 0

    def _compute_read_room(self, wanted: int) -> float:
        """Return how many bytes more reads may hold, if ``wanted`` are requested. Requires the lock."""
        most = READS * self.most_bytes
        if self.used + wanted <= most:
            return most - self.used
        return min(self.most_bytes - self.used, most - sum(held.size for held in self._held if held.reads))

    def _fits(self, held: Held, size: int, *, messages: bool, reads: bool = False) -> bool:
        """Reserve ``size`` bytes for a connection if there is room. Returns whether there was. Requires the lock."""
        left = (MESSAGES if messages else 1.0) * self.most_bytes - self.used
        if reads:
            held.reads = True
            left = self._compute_read_room(size)
        if self.used != held.size and (size > left or (messages and held.size + size > left)):
            return False
        self.used += size
        held.size += size
        return True

    @staticmethod
    def patience(held: Held) -> float:
        """Return the seconds that a call of the connection without room may still wait; 0 or less: none."""
        now = time.monotonic()
        if now >= held.impatient_until:
            held.impatient_until = now + 2 * PATIENCE
        return held.impatient_until - PATIENCE - now

    def refusal(self) -> EscrowError:
        """Count a rejection, and return the error for a call that waited too long for room."""
        self._refused(Code.QUEUE_FULL)
        return error(Code.QUEUE_FULL, "pending requests and answers hold too many bytes")

    def change(self, held: Held, size: int) -> None:
        """Count ``size`` bytes that a connection holds already, without waiting; a negative ``size`` releases them."""
        with self._lock:
            self.used += size
            held.size += size
            if size < 0 and self._waiters:
                self._changed.notify_all()

    def relieve(self) -> None:
        """Close connections that do not read, the longest stuck first, while the limit of bytes is exceeded. Called
        regularly."""
        while True:
            with self._lock:
                stuck = self._longest_stuck() if self.used > self.most_bytes else None
            if stuck is None:
                return
            self._close(stuck)

    def _longest_stuck(self) -> Held | None:
        before = time.monotonic() - STUCK_SECONDS
        stuck = [
            (since, held) for held in self._held if not held.closed and (since := held.stuck_since) and since < before
        ]
        return min(stuck, key=lambda pair: pair[0])[1] if stuck else None

    def _close(self, held: Held) -> None:
        held.closed = True
        logger.warning("closing a connection that does not read: %s holds %d bytes", held.peer, held.size)
        held.shut()


class Allowance:
    """Room for the answer to one receive, until the answer itself is counted. ``unread`` returns the queued bytes of
    the client, ``most_unread`` is their limit."""

    __slots__ = ("_held", "_most_unread", "_room", "_unread", "size")

    def __init__(self, room: Room, held: Held, unread: Callable[[], int], most_unread: int) -> None:
        self._room, self._held, self._unread, self._most_unread = room, held, unread, most_unread
        self.size = 0

    def grant(self, wanted: int) -> int:
        """Reserve room for the answer to a receive. Returns how many bytes it may have, up to ``wanted``; 0: none now,
        or the client has too many unread bytes. Never waits."""
        if self._unread() >= self._most_unread:
            return 0
        granted = self._room.grant(self._held, wanted)
        self.size += granted
        return granted
