"""The speed of a run: in steps that grow, with a pause after each, and no more rows in a second than it may."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from escrowmq.errors import Code, Misuse

SHARES = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
PAUSE = 5.0


@dataclass(frozen=True, slots=True)
class Ramp:
    """A ramp: the run pauses for ``pause`` seconds after each of ``shares`` percent. The last share is 100."""

    shares: tuple[float, ...] = SHARES
    pause: float = PAUSE

    def __post_init__(self) -> None:
        rising = all(before < after for before, after in zip((0.0, *self.shares), self.shares, strict=False))
        if not self.shares or not rising or self.shares[-1] != 100.0:
            text = ",".join(f"{share:g}" for share in self.shares)
            raise Misuse(
                Code.BAD_ARGUMENT, f"{text!r} is no ramp", "rising percentages that end with 100, such as 1,10,100"
            )
        if not 0 <= self.pause < 1e9:
            raise Misuse(Code.BAD_ARGUMENT, f"{self.pause!r} is no pause in seconds")

    @classmethod
    def parse(cls, text: str, pause: float = PAUSE) -> Ramp:
        """From ``"1,2,5,10,100"``; ``"100"`` is all at once. Raises Misuse(BAD_ARGUMENT)."""
        try:
            shares = tuple(float(part.strip().removesuffix("%")) for part in text.split(","))
        except ValueError:
            raise Misuse(Code.BAD_ARGUMENT, f"{text!r} is no ramp", "percentages, such as 1,2,5,10,25,50,100") from None
        return cls(shares, pause)

    def ends(self, rows: int) -> list[int]:
        """Return how many rows of ``rows`` are done at the end of each step: rising, the last is ``rows``. A step of a
        small
        set that would be empty is left out."""
        found: list[int] = []
        for share in self.shares:
            end = rows if share == 100.0 else min(math.ceil(rows * share / 100.0), rows)
            if end > (found[-1] if found else 0):
                found.append(end)
        return found


@dataclass(frozen=True, slots=True)
class StopAfter:
    """When a run stops by itself: after ``count`` failures, or once more than ``share`` percent of what it did are
    failures."""

    count: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | None) -> StopAfter:
        """From ``"100"`` or ``"5%"``; None: never. Raises Misuse(BAD_ARGUMENT)."""
        if text is None:
            return cls()
        try:
            if text.endswith("%"):
                share = float(text[:-1])
                if not 0 <= share <= 100:
                    raise ValueError
                return cls(share=share)
            count = int(text)
            if count < 1:
                raise ValueError
        except ValueError:
            hint = "a number of rows such as 100, or a share such as 5%"
            raise Misuse(Code.BAD_ARGUMENT, f"{text!r} is no number of failures", hint) from None
        return cls(count)

    def why(self, failures: int, handled: int) -> str | None:
        """Return the reason to stop now; None: continue."""
        if self.count is not None and failures >= self.count:
            return f"{failures:,} failures; it was to stop after {self.count:,}"
        if self.share is not None and handled and failures * 100.0 > self.share * handled:
            return f"{failures:,} failures of {handled:,} rows; it was to stop above {self.share:g} %"
        return None


class Pace:
    """Holds a run to ``rate`` rows a second. ``wait(seconds)`` comes back early, with True, if the run is to stop."""

    def __init__(
        self, rate: float | None, wait: Callable[[float], bool], now: Callable[[], float] = time.monotonic
    ) -> None:
        if rate is not None and not 0 < rate < 1e12:
            raise Misuse(Code.BAD_ARGUMENT, f"{rate!r} is no number of rows a second")
        self._rate, self._wait, self._now = rate, wait, now
        self._free_at = now()

    def most(self, rows: int) -> int:
        """Return how many rows the next batch may have: no more than a second's, so that a slow run is an even one."""
        return rows if self._rate is None else max(1, min(rows, int(self._rate)))

    def took(self, rows: int) -> bool:
        """Wait for as long as these rows are to take, less what has passed. Whether the run is to stop."""
        if self._rate is None:
            return self._wait(0.0)
        self._free_at = max(self._free_at, self._now() - 1.0) + rows / self._rate
        return self._wait(max(self._free_at - self._now(), 0.0))


def boundaries(first: int, ends: Sequence[int]) -> list[int]:
    """Return the step ends that a run which continues at row ``first`` still has before it."""
    return [end for end in ends if end > first]
