"""A clock that moves only when a test advances it."""

from __future__ import annotations

from escrowmq.platform.times import to_us


class SimulatedClock:
    """Broker time under a test's control: starts at ``now_us`` and stands still until :meth:`advance`."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        """Return microseconds since 1970."""
        return self._now_us

    def advance(self, seconds: float = 0.0, *, us: int = 0) -> int:
        """Move time on by ``seconds`` and ``us`` microseconds, never back; the new time in microseconds."""
        step = to_us(seconds) + us
        if step < 0:
            raise ValueError("broker time never steps back")
        self._now_us += step
        return self._now_us
