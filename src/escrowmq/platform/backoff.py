"""Exponential back-off with jitter."""

from __future__ import annotations

import threading
import time

from escrowmq.platform.numbers import fraction


class Backoff:
    """Delays after failures: doubling, with jitter, up to a limit. Thread-safe."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._lock = threading.Lock()
        self._next = first
        self._until = 0.0
        self.failing = False

    def failed(self) -> float:
        """Record a failure; return the delay in seconds."""
        with self._lock:
            now = time.monotonic()
            if self.failing and now < self._until:  # another worker's attempt during the same outage
                return self._until - now
            pause = self._next * (0.5 + fraction())
            self.failing = True
            self._next = min(2 * self._next, self._last)
            self._until = now + pause
            return pause

    def worked(self) -> bool:
        """Record a success; return whether there were failures before."""
        if not self.failing:
            return False
        with self._lock:
            self.failing, self._next, self._until = False, self._first, 0.0
            return True

    def left(self) -> float:
        """Return the seconds until the next attempt; 0: now."""
        return max(0.0, self._until - time.monotonic()) if self.failing else 0.0
