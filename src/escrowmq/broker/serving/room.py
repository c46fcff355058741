"""Room for what all calls of a served broker hold together: bytes of requests, answers and reads, and the calls
themselves.

Each call alone is bounded by its limits; this bounds the sum. Rules:

1. Who needs room waits for it, up to ``PATIENCE`` seconds, then gets Overloaded(QUEUE_FULL); what does not fit in as
   many seconds after that is refused at once, so that what stands behind it waits for no longer than its client would.
   Nothing alone is too large: a call is always given room when nobody else holds any.
2. Bytes that are there already (an answer) are counted without waiting.
3. When room is missing, the call whose client has not taken what was written for the longest time, ``STUCK_SECONDS``
   at least, is closed with its connection. So those who read are not kept waiting by those who do not.
4. Messages may have ``MESSAGES`` of the room, and those of one call as much as is left to all others: so there is room
   for who holds little, and for acknowledgements, decisions and questions, however many send without bound.
5. The answer to a receive is given room before it is read from the log: of the part that reads may have, and not more
   than is left to all others. A client that has not taken what it was given before is given none.
6. There are at most ``most_calls`` calls (actions, reads and watches). A further one is refused; if one connection has
   more than its ``SHARE`` of them, that connection is closed.
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
"""With what then waits for the disk (``PATIENCE_SECONDS`` of the writer's pace, 3 s) less than our clients wait for a
broker from which nothing comes (12 s)."""
STUCK_SECONDS = 0.5
READS = 0.5
"""The part of all bytes that reads may hold: those who send and receive do not wait for who reads much."""
LEAST_GRANT = 64 << 10
"""Bytes of an answer that are worth to be read by themselves, when more lies ready."""
MESSAGES = 7 / 8
"""The part of all bytes that messages may hold."""
SHARE = 64
"""Calls of one connection that are never taken for too many; our clients have a handful."""


class Held:
    """The memory that one connection holds. ``stuck_since``: since when the client has taken nothing of what waits for
    it, by the monotonic clock; None while nothing waits. ``shut`` closes the connection. ``impatient_until``: half of
    the time before then it waits for room, in the other half not.
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
    """Bytes and calls of one broker. ``refused`` is called at each refusal."""

    def __init__(self, most_bytes: int, most_calls: int, refused: Callable[[Code], None] = lambda code: None) -> None:
        self.most_bytes = most_bytes
        self.most_calls = most_calls
        self._refused = refused
        self._changed = threading.Condition()
        self._held: set[Held] = set()
        self._calls: Counter[Held] = Counter()
        self._call_count = 0
        self.used = 0

    def enter(self, held: Held) -> None:
        """Count what a connection holds from now on, until :meth:`leave`."""
        with self._changed:
            self._held.add(held)

    def leave(self, held: Held) -> None:
        """Give back whatever a connection still holds."""
        with self._changed:
            self._held.discard(held)
            self.used -= held.size
            held.size = 0
            self._changed.notify_all()

    def begin_call(self, held: Held) -> None:
        """Count a call of a connection, until :meth:`end_call`. Raises Overloaded(QUEUE_FULL) when there are too
        many."""
        greedy = None
        with self._changed:
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
            raise error(Code.QUEUE_FULL, "the broker has too many calls under way")

    def end_call(self, held: Held) -> None:
        """Count a call no longer."""
        with self._changed:
            self._call_count -= 1
            self._calls[held] -= 1
            if not self._calls[held]:
                del self._calls[held]

    def take(self, held: Held, size: int, *, messages: bool = False, reads: bool = False) -> None:
        """Wait until ``size`` bytes more fit, for ``messages`` see rule 4, for ``reads`` rule 2.
        Overloaded(QUEUE_FULL)."""
        while True:
            with self._changed:
                if self._fits(held, size, messages=messages, reads=reads):
                    return
                left = self.patience(held)
                if left <= 0:
                    raise self.refusal()
                stuck = self._longest_stuck()
                if stuck is None:
                    self._changed.wait(min(left, STUCK_SECONDS / 4))
            if stuck is not None:
                self._close(stuck)

    def offer(self, held: Held, size: int, *, messages: bool = False) -> bool:
        """As :meth:`take`, without waiting: whether they fit. If not, who has not read for longest is closed; ask
        again soon, while there is :meth:`patience`."""
        with self._changed:
            if self._fits(held, size, messages=messages):
                return True
            stuck = self._longest_stuck()
        if stuck is not None:
            self._close(stuck)
        return False

    def grant(self, held: Held, wanted: int) -> int:
        """Give as much room of the reads' as there is, and is fair, up to ``wanted`` bytes; how much. If there is
        none, who has not read for longest is closed; ask again soon."""
        with self._changed:
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
        """Return bytes that reads may hold beside what they hold; what they hold is only counted where it matters.
        With the
        lock held."""
        most = READS * self.most_bytes
        if self.used + wanted <= most:
            return most - self.used
        return min(self.most_bytes - self.used, most - sum(held.size for held in self._held if held.reads))

    def _fits(self, held: Held, size: int, *, messages: bool, reads: bool = False) -> bool:
        """Give room if there is some. With the lock held."""
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
        """Return how many seconds longer a call that finds no room is to wait for it."""
        now = time.monotonic()
        if now >= held.impatient_until:
            held.impatient_until = now + 2 * PATIENCE
        return held.impatient_until - PATIENCE - now

    def refusal(self) -> EscrowError:
        """Return the error for a call that waited too long for room."""
        self._refused(Code.QUEUE_FULL)
        return error(Code.QUEUE_FULL, "requests and answers under way hold too many bytes")

    def change(self, held: Held, size: int) -> None:
        """Count ``size`` bytes more (or, negative, fewer) that are there already (or gone)."""
        with self._changed:
            self.used += size
            held.size += size
            if size < 0:
                self._changed.notify_all()

    def relieve(self) -> None:
        """Close those that do not read while more is held than there is room for. Called now and then."""
        while True:
            with self._changed:
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
    """Room for the answer to one receive of a call: what it was granted, until the answer itself is counted.
    ``unread`` are the bytes that the client has been given and not taken, ``most_unread`` how many they may be."""

    __slots__ = ("_held", "_most_unread", "_room", "_unread", "size")

    def __init__(self, room: Room, held: Held, unread: Callable[[], int], most_unread: int) -> None:
        self._room, self._held, self._unread, self._most_unread = room, held, unread, most_unread
        self.size = 0

    def grant(self, wanted: int) -> int:
        """Return bytes that the answer may have, up to ``wanted``; 0: none now. Never waits."""
        if self._unread() >= self._most_unread:
            return 0
        granted = self._room.grant(self._held, wanted)
        self.size += granted
        return granted
