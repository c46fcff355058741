"""Bounds on the bytes of one round and of one connection's waiting messages, by the measured speed of the disk.

A sync takes a fixed time and a time for each byte. The fixed time is the shortest of the last syncs of rounds so small
that their bytes hardly count; the time of a byte is the median of the last larger rounds, without the fixed time. Noise
(a busy machine, a snapshot) only makes a sync longer, so it hardly affects the shortest and the median. A round takes
what the disk writes and syncs in ``ROUND_SECONDS``, or in twice the fixed time if that is longer, so that small rounds
do not make a slow disk much slower; but never more than ``LONGEST_SECONDS`` of writing. The first rounds are small, and
each may be twice as large as the one before.

A connection may have as much waiting as the disk writes of it in ``PATIENCE_SECONDS``, if all connections with waiting
messages get an equal part. Its client would take anything older for lost and send it again.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median

ROUND_SECONDS = 0.1
LONGEST_SECONDS = 0.1  # for the bytes of a round, however long a sync takes: a small request waits for two rounds
PATIENCE_SECONDS = 3.0
"""With the wait for memory (5 s: ``PATIENCE`` of the server's room) well under our clients' timeout of 12 s: the rounds
of a busy machine may be twice as long as measured.
"""
FIRST_ROUND, LEAST_ROUND, LEAST_WAITING = 1 << 20, 256 << 10, 1 << 20
SEEN_BYTES = 64 << 10
SLOWER = 0.9  # the rate falls by steps of this factor: one sync may take long for another reason
PROBE = 16  # every so many rounds one is small: equally large rounds do not show the fixed part of a sync
SMALL = 16  # a small round has at most one part in so many of what a round may take
SMALL_SEEN, LARGE_SEEN = 16, 7  # measured rounds kept; more small ones, because they are rare while much waits


class Pace:
    """The measured speed of a disk. ``most``: bytes of a round on any disk."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = min(FIRST_ROUND, most)
        self._rounds = 0
        self._rate = inf
        self._small: deque[float] = deque(maxlen=SMALL_SEEN)  # seconds
        self._large: deque[tuple[int, float]] = deque(maxlen=LARGE_SEEN)  # bytes and seconds

    def round(self) -> int:
        """Return the bytes of messages that the next round may take, if more wait. Every ``PROBE``-th call returns
        less."""
        self._rounds += 1
        return self._limit // SMALL if self._rounds % PROBE == 0 else self._limit

    def share(self, sources: int) -> float:
        """Return the bytes of messages that each of ``sources`` connections may have waiting."""
        return max(self._rate * PATIENCE_SECONDS / sources, LEAST_WAITING)

    def record(self, size: int, seconds: float) -> None:
        """Record how long a round of ``size`` bytes took to write and sync."""
        if size <= max(LEAST_ROUND, self._limit // SMALL):
            self._small.append(seconds)
        if size < self._limit // 4:
            return
        rate = size / seconds if seconds > 0.0 else inf
        self._rate = rate if self._rate == inf else max(rate, SLOWER * self._rate)
        self._large.append((size, seconds))
        alone = min(*self._small, *(seconds for _, seconds in self._large)) if self._small else 0.0
        each = median(max(seconds - alone, 0.0) / size for size, seconds in self._large)
        wanted = min(max(ROUND_SECONDS - alone, alone), LONGEST_SECONDS) / each if each > 0.0 else inf
        self._limit = int(max(min(wanted, 2 * self._limit, self._most), min(LEAST_ROUND, self._most)))
