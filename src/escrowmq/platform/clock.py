"""Broker time: microseconds that never decrease, whatever the wall clock does."""

from __future__ import annotations

import time
from typing import Protocol


def now_us() -> int:
    """Return the wall time of this machine, microseconds since 1970; it may step back."""
    return time.time_ns() // 1000


def uptime() -> float:
    """Return the seconds of a monotonic clock that includes suspension of the machine, if the system has one (Linux).
    With Python's, a broker that resumes after an hour would treat its last proof as recent."""
    if _BOOT_TIME is None:
        return time.monotonic()
    return time.clock_gettime(_BOOT_TIME)


_BOOT_TIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """Clock of the engine. ``now_us`` never decreases within one process."""

    def now_us(self) -> int:
        """Return microseconds since 1970."""


class ContinuedClock:
    """Another clock, advanced to ``floor_us`` if it is behind: broker time continues from the log's last frame."""

    def __init__(self, clock: Clock, floor_us: int) -> None:
        self._clock = clock
        self._ahead_us = max(floor_us - clock.now_us(), 0)

    def now_us(self) -> int:
        return self._clock.now_us() + self._ahead_us


class SystemClock:
    """Wall time read once at the start, then advanced by the monotonic clock, so wall clock jumps have no effect."""

    def __init__(self) -> None:
        self._start_wall_ns = time.time_ns()
        self._start_ns = time.monotonic_ns()

    def now_us(self) -> int:
        return (self._start_wall_ns + time.monotonic_ns() - self._start_ns) // 1000
