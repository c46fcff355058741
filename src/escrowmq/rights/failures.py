"""Failed authentications by address: who guesses must wait.

Five failures from one address within a minute delay its next ones by a second each. The protocol and the metrics delay
the refusal; while too many of these are delayed, the server of the protocol closes further connections from addresses
with failures unread. The gateways and the console delay the check of a token that they do not know yet, so that a guess
neither reaches a broker nor occupies a connection meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from escrowmq.errors import Code, Overloaded

FREE_FAILURES = 5
FAILURE_SECONDS = 60.0
"""Time (s) for which a failure counts against its address."""
DELAY_SECONDS = 1.0
MOST_ADDRESSES = 10_000
"""Addresses with failures that are remembered; the oldest is forgotten first."""
MOST_WAITING = 64
"""Requests or refusals that wait at the same time in one server. Others from addresses with failures are refused."""


class Failures:
    """The failures that one server has seen. Thread-safe, but for :meth:`wait`, which belongs to one event loop."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, float]] = {}  # count and time of the first, the latest address at the end
        self._delayed: deque[float] = deque(
            maxlen=max(MOST_WAITING, 1)
        )  # times of the latest failures that are delayed
        self._lock = threading.Lock()
        self._waiting = 0

    def note(self, source: str) -> None:
        """Count a failure of an address."""
        now = time.monotonic()
        with self._lock:
            count, since = self._found.pop(source, (0, 0.0))
            self._found[source] = (count + 1, since) if now - since < FAILURE_SECONDS else (1, now)
            if len(self._found) > MOST_ADDRESSES:
                del self._found[next(iter(self._found))]
            if self._found[source][0] > FREE_FAILURES:
                self._delayed.append(now)

    def delay(self, source: str) -> float:
        """Return the seconds by which an address must wait."""
        with self._lock:
            count, since = self._found.get(source, (0, 0.0))
        return DELAY_SECONDS if count > FREE_FAILURES and time.monotonic() - since < FAILURE_SECONDS else 0.0

    def is_unread(self, source: str) -> bool:
        """Return whether a connection from an address is to be closed unread: it must wait, and ``MOST_WAITING``
        failures are delayed already, whether or not their clients still wait for the refusal."""
        delay = self.delay(source)
        with self._lock:
            is_full = len(self._delayed) == self._delayed.maxlen
            return is_full and time.monotonic() - self._delayed[0] < delay

    async def wait(self, source: str) -> None:
        """Wait as long as an address must. Raises Overloaded(QUEUE_FULL) if too many wait."""
        if not (seconds := self.delay(source)):
            return
        if self._waiting >= MOST_WAITING:
            text = "too many wrong tokens came from this address"
            raise Overloaded(Code.QUEUE_FULL, text, "try again later", seconds)
        self._waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._waiting -= 1
