"""Speed of a run: growing steps with a pause after each, and a maximum number of rows per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from escrowmq.errors import Code, Misuse

SHARES = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
PAUSE = 5.0


@dataclass(frozen=True, slots=True)
class Ramp:
    """Steps of a run: it pauses for ``pause`` seconds after each of ``shares`` percent of the set; the last is 100."""

    shares: tuple[float, ...] = SHARES
    pause: float = PAUSE

    def __post_init__(self) -> None:
        rising = all(before < after for before, after in zip((0.0, *self.shares), self.shares, strict=False))
        if not self.shares or not rising or self.shares[-1] != 100.0:
            text = ",".join(f"{share:g}" for share in self.shares)
            hint = "rising percentages that end with 100, such as 1,10,100"
            raise Misuse(Code.BAD_ARGUMENT, f"{text!r} is not a ramp", hint)
        if not 0 <= self.pause < 1e9:
            raise Misuse(Code.BAD_ARGUMENT, f"{self.pause!r} is not a pause in seconds")

    @classmethod
    def parse(cls, text: str, pause: float = PAUSE) -> Ramp:
        """Parse ``"1,2,5,10,100"``; ``"100"`` means a single step. Raises Misuse(BAD_ARGUMENT)."""
        try:
            shares = tuple(float(part.strip().removesuffix("%")) for part in text.split(","))
        except ValueError:
            raise Misuse(Code.BAD_ARGUMENT, f"{text!r} is not a ramp", "percentages such as 1,2,5,10,50,100") from None
        return cls(shares, pause)

    def ends(self, rows: int) -> list[int]:
        """Return the number of rows done at the end of each step, increasing to ``rows``; empty steps are omitted."""
        found: list[int] = []
        for share in self.shares:
            end = rows if share == 100.0 else min(math.ceil(rows * share / 100.0), rows)
            if end > (found[-1] if found else 0):
                found.append(end)
        return found


@dataclass(frozen=True, slots=True)
class StopAfter:
    """Condition to stop a run: ``count`` failures, or failures above ``share`` percent of the processed rows."""

    count: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> StopAfter:
        """Parse ``"100"`` or ``"5%"``; None: never. Raises Misuse(BAD_ARGUMENT)."""
        if text is None:
            return cls()
        try:
            if text.endswith("%"):
                if 0 <= (share := float(text[:-1])) <= 100:
                    return cls(share=share)
            elif (count := int(text)) >= 1:
                return cls(count)
        except ValueError:
            pass
        hint = "a number of rows such as 100, or a share such as 5%"
        raise Misuse(Code.BAD_ARGUMENT, f"{text!r} is not a number of failures", hint)

    def why(self, failures: int, handled: int) -> str | None:
        """Return the reason to stop now; None to continue."""
        if self.count is not None and failures >= self.count:
            return f"{failures:,} failures; the limit is {self.count:,}"
        if self.share is not None and handled and failures * 100.0 > self.share * handled:
            return f"{failures:,} failures of {handled:,} rows; the limit is {self.share:g} %"
        return None


class Pacing(TypedDict, total=False):
    """The speed of a run, and what stops it. ``rate``: maximum rows per second. ``stop_after``: number of failures,
    ``"100"`` or ``"5%"``. ``batch``: maximum rows of one act. ``patience``: seconds to wait for an unavailable
    broker."""

    ramp: Ramp | None
    rate: float | None
    stop_after: str | StopAfter | None
    batch: int
    patience: float


class Pace:
    """Limits a run to ``rate`` rows per second. ``wait(seconds)`` returns early, with True, if the run should stop."""

    def __init__(
        self, rate: float | None, wait: Callable[[float], bool], now: Callable[[], float] = time.monotonic
    ) -> None:
        if rate is not None and not 0 < rate < 1e12:
            raise Misuse(Code.BAD_ARGUMENT, f"{rate!r} is not a number of rows per second")
        self._rate, self._wait, self._now = rate, wait, now
        self._free_at = now()

    def most(self, rows: int) -> int:
        """Return the maximum size of the next batch: one second's rows, so that a slow run is even."""
        return rows if self._rate is None else max(1, min(rows, int(self._rate)))

    def wait_for(self, rows: int) -> bool:
        """Wait for the time of these rows at the rate, less the elapsed time. Returns True if the run should stop."""
        if self._rate is None:
            return self._wait(0.0)
        self._free_at = max(self._free_at, self._now() - 1.0) + rows / self._rate
        return self._wait(max(self._free_at - self._now(), 0.0))
