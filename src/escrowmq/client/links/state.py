"""The state of a link, when a link without a connection probes for its broker, and who waits for that.

A link looks; everybody above it (lanes, sessions, consumers, readers) waits for its news, so that a client asks no
more often the more it has to do, and continues the moment a broker leads again. :class:`Looks` says when a look is due.

Rules of looks at a shard of several brokers, of which another one soon leads:

1. For ``QUICK_SECONDS`` after a connection was lost the pauses are short (``QUICK_PAUSE`` at most): a take-over takes
   about the silence that standbys wait for, 2 s by default. After that they double, up to ``LAST_PAUSE``.
2. A broker that follows may say how long to leave it alone, because many ask; the longer pause counts, up to
   ``LONGEST_TOLD``.
3. A connection that lasted less than ``STEADY_SECONDS`` was none: the count continues.
4. All pauses are spread by chance: clients that lost their broker at one moment do not ask at one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

FIRST_PAUSE, LAST_PAUSE = 0.02, 2.0
QUICK_PAUSE = 0.15
QUICK_SECONDS = 6.0
STEADY_SECONDS = 1.0
LONGEST_TOLD = 5.0


class Phase(StrEnum):
    """How a link stands with its broker."""

    AWAY = "away"
    """There is no connection."""
    PROBING = "probing"
    """One is sought."""
    UP = "up"
    """There is one."""
    DRAINING = "draining"
    """It takes no more, and what was begun is still answered."""


@dataclass(slots=True)
class BrokerState:
    """A link's phase, since when (monotonic seconds), and why if it is not up. ``next_probe``: when the next look is
    due."""

    phase: Phase = Phase.AWAY
    since: float = 0.0
    reason: str = ""
    next_probe: float = 0.0

    def enter(self, phase: Phase, now: float, reason: str = "") -> None:
        """Note another phase."""
        if phase is not self.phase:
            self.phase, self.since = phase, now
        self.reason = reason


class Looks:
    """When the next look is due. Pure: times are seconds of a clock that only goes forward, ``chance`` is 0 <= it < 1.
    ``several``: a shard of several brokers; of one alone pauses double from the first."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self._next = FIRST_PAUSE
        self._since: float | None = None  # when the first look failed, or a connection was lost
        self._found: float | None = None
        self._due = 0.0

    def failed(self, now: float, chance: float, told: float = 0.0) -> None:
        """Note a probe that found no usable broker. ``told``: the pause that the answering ones asked for."""
        since = self._since = now if self._since is None else self._since
        pause = self._next
        quick = self.several and now - since < QUICK_SECONDS
        self._next = min(2 * pause, QUICK_PAUSE if quick else LAST_PAUSE)
        told = min(told, LONGEST_TOLD)
        self._due = now + max(pause, told) * (0.5 + chance)

    def found(self, now: float) -> None:
        """There is a connection."""
        self._found, self._due = now, 0.0

    def lost(self, now: float) -> None:
        """Note that the connection is gone: probe at once or, if it was of no use, when it is due."""
        steady = self._found is not None and now - self._found >= STEADY_SECONDS
        self._found = None
        if steady:
            self._next, self._since, self._due = FIRST_PAUSE, None, 0.0

    @property
    def due(self) -> float:
        """Return when a look is due (monotonic seconds); 0: now."""
        return self._due

    def left(self, now: float) -> float:
        """Return seconds until a look is due; 0: now."""
        return max(0.0, self._due - now)


class Waiters:
    """Calls that wait for a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[object, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have it called by the next :meth:`tell`; what takes it back."""
        key = object()
        with self._lock:
            self._calls[key] = call

        def forget() -> None:
            with self._lock:
                self._calls.pop(key, None)

        return forget

    def tell(self) -> None:
        """Call them all, once."""
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call()
