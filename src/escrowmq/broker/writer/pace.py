"""How many bytes of messages one round takes, and how many of one connection may wait: by how fast the disk is found to be.

The time of a sync is taken to be a part of its own and a part for each byte, both found by least squares over the rounds of ``SEEN_BYTES``
or more; older ones count less and less. A round takes what the disk writes and syncs in ``ROUND_SECONDS``, or in twice the time that a sync takes by itself
if that is more: then smaller rounds do not make a slow disk much slower. Only rounds that were about as large as they might be change anything: small ones say
little about what a byte costs. The first rounds are small, and may be twice as large each time.

Every connection may have as much waiting as the disk writes of it in ``PATIENCE_SECONDS`` when all that have something waiting get an equal part. What waits
longer, its client would take for lost and send again.
"""

from __future__ import annotations

from math import inf

ROUND_SECONDS = 0.1
PATIENCE_SECONDS = 3.0
"""With the wait for room (``PATIENCE`` of the served broker's room, 5 s) well under the 12 s that our clients wait for an answer: the rounds of a busy
machine may be twice as long as those that the pace was found from."""
FIRST_ROUND, LEAST_ROUND, LEAST_WAITING = 1 << 20, 256 << 10, 1 << 20
SEEN_BYTES = 64 << 10
FORGET = 0.95
"""What a round counts for when the next has been seen."""
SLOWER = 0.9
"""A disk that gets slower is believed step by step: one sync may take long for another reason."""
PROBE = 16
"""One round of so many takes a quarter: rounds that are all as large do not show what a sync takes by itself."""


class Pace:
    """What was seen of a disk. ``most``: bytes of a round on any disk."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = min(FIRST_ROUND, most)
        self._rounds = 0
        self._rate = inf
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def round(self) -> int:
        """Bytes of messages that the next round may take, when more wait."""
        self._rounds += 1
        return self._limit // 4 if self._rounds % PROBE == 0 else self._limit

    def share(self, sources: int) -> float:
        """Bytes that one of so many connections may have waiting."""
        return max(self._rate * PATIENCE_SECONDS / sources, LEAST_WAITING)

    def saw(self, size: int, seconds: float) -> None:
        """A round with ``size`` bytes was written and synced in so long."""
        megabytes = size / 1e6
        self._n = FORGET * self._n + 1.0
        self._x = FORGET * self._x + megabytes
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + megabytes * megabytes
        self._xy = FORGET * self._xy + megabytes * seconds
        if size < self._limit // 4:
            return
        rate = size / seconds if seconds > 0.0 else inf
        self._rate = rate if self._rate == inf else max(rate, SLOWER * self._rate)
        alone, each = self._fitted()
        wanted = 1e6 * max(ROUND_SECONDS - alone, alone) / each if each > 0.0 else inf
        self._limit = int(max(min(wanted, 2 * self._limit, self._most), min(LEAST_ROUND, self._most)))

    def _fitted(self) -> tuple[float, float]:
        """Seconds that a sync takes by itself, and more for a megabyte."""
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-3 * self._x * self._x:  # all were alike
            return 0.0, self._y / self._x
        each = (self._n * self._xy - self._x * self._y) / spread
        alone = (self._y - each * self._x) / self._n
        if each <= 0.0:
            return self._y / self._n, 0.0
        return (alone, each) if alone > 0.0 else (0.0, self._y / self._x)
