"""Bounds on the bytes of one round and of one connection's waiting messages, by how fast the disk is found to
be.

The time of a sync is taken to be a part of its own and a part for each byte. The part of its own is the shortest of the
last syncs of rounds so small that their bytes hardly count; what a byte costs is the median of the last larger rounds,
without that part. So a sync that took long for another reason (a busy machine, a snapshot that is written beside it)
makes no round larger or smaller: of noise, which only ever makes a sync longer, the shortest and the median know
little. A round takes what the disk writes and syncs in ``ROUND_SECONDS``, or in twice the time that a sync takes by
itself if that is more, so that small rounds do not make a slow disk much slower, but never more than it writes in
``LONGEST_SECONDS``. The first rounds are small, and may be twice as large each time.

Every connection may have as much waiting as the disk writes of it in ``PATIENCE_SECONDS`` when all that have something
waiting get an equal part. What waits longer, its client would take for lost and send again.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median

ROUND_SECONDS = 0.1
LONGEST_SECONDS = 0.1
"""Of the bytes of a round, however long a sync takes by itself: the caller for little waits for two rounds."""
PATIENCE_SECONDS = 3.0
"""With the wait for room (``PATIENCE`` of the served broker's room, 5 s) well under the 12 s that our clients wait for
an answer: the rounds of a busy machine may be twice as long as those that the pace was found from.
"""
FIRST_ROUND, LEAST_ROUND, LEAST_WAITING = 1 << 20, 256 << 10, 1 << 20
SEEN_BYTES = 64 << 10
SLOWER = 0.9
"""A disk that gets slower is believed step by step: one sync may take long for another reason."""
PROBE = 16
"""One round of so many is a small one: rounds that are all as large do not show what a sync takes by itself."""
SMALL = 16
"""A small round has at most one part in so many of what a round may take."""
SMALL_SEEN, LARGE_SEEN = 16, 7
"""Rounds that are remembered. Of small ones more: while much waits there are few, and those of before were undisturbed.
"""


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
        """Return bytes of messages that the next round may take, when more wait."""
        self._rounds += 1
        return self._limit // SMALL if self._rounds % PROBE == 0 else self._limit

    def share(self, sources: int) -> float:
        """Return bytes that one of so many connections may have waiting."""
        return max(self._rate * PATIENCE_SECONDS / sources, LEAST_WAITING)

    def saw(self, size: int, seconds: float) -> None:
        """Note how long a round of ``size`` bytes took to write and sync."""
        if size <= max(LEAST_ROUND, self._limit // SMALL):
            self._small.append(seconds)
        if size < self._limit // 4:
            return
        rate = size / seconds if seconds > 0.0 else inf
        self._rate = rate if self._rate == inf else max(rate, SLOWER * self._rate)
        self._large.append((size, seconds))
        alone = 0.0
        if self._small:
            alone = min(*self._small, *(seconds for _, seconds in self._large))
        each = median(max(seconds - alone, 0.0) / size for size, seconds in self._large)
        wanted = min(max(ROUND_SECONDS - alone, alone), LONGEST_SECONDS) / each if each > 0.0 else inf
        self._limit = int(max(min(wanted, 2 * self._limit, self._most), min(LEAST_ROUND, self._most)))
