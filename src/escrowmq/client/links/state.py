"""The schedule of a link's probes while it has no connection, and the calls that wait for one.

Only the link probes for its broker; everything above it (lanes, sessions, consumers, readers) waits for its
notification. So the number of probes does not grow with the number of callers, and all of them continue as soon as a
broker leads again.

Rules of :class:`ProbeSchedule` for a shard of several brokers:

1. For ``QUICK_SECONDS`` after a connection was lost, pauses are short (at most ``QUICK_PAUSE``): a take-over takes
   about as long as the silence after which standbys act, 2 s by default. Then pauses double, up to ``LAST_PAUSE``.
2. A standby may request a longer pause, because many clients probe it; up to ``LONGEST_REQUESTED``.
3. A connection that lasted less than ``STEADY_SECONDS`` does not reset the pauses, and from the second in a row on
   there is a pause after it: a broker that welcomes clients and then rejects their requests, because its disk has
   failed, is not asked without a pause.
4. All pauses are randomized, so that clients that lost their broker at the same moment do not probe at the same moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_PAUSE, LAST_PAUSE = 0.02, 2.0
QUICK_PAUSE = 0.15
QUICK_SECONDS = 6.0
STEADY_SECONDS = 1.0
LONGEST_REQUESTED = 5.0


class ProbeSchedule:
    """The time of the next probe. Pure: ``now`` is in monotonic seconds, ``chance`` is in [0, 1).

    ``several``: the shard has several brokers; with one broker, pauses double from the first.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self._next = FIRST_PAUSE
        self._since: float | None = None  # when the first probe failed, or the connection was lost
        self._found: float | None = None
        self._due = 0.0

    def add_failure(self, now: float, chance: float, requested: float = 0.0) -> None:
        """Schedule the next probe after one that found no usable broker. ``requested``: the pause (s) that standbys
        requested."""
        since = self._since = now if self._since is None else self._since
        pause = self._next
        quick = self.several and now - since < QUICK_SECONDS
        self._next = min(2 * pause, QUICK_PAUSE if quick else LAST_PAUSE)
        requested = min(requested, LONGEST_REQUESTED)
        self._due = now + max(pause, requested) * (0.5 + chance)

    def on_connected(self, now: float) -> None:
        """Note that a connection was made at ``now``; no pause is left."""
        self._found, self._due = now, 0.0

    def on_disconnected(self, now: float, chance: float, *, useless: bool = False) -> None:
        """Note that the connection was lost. The next probe is due at once, unless the connection was ``useless`` (its
        broker does not lead), or was short after an earlier failure."""
        steady = self._found is not None and now - self._found >= STEADY_SECONDS
        self._found = None
        if steady:
            self._next, self._since, self._due = FIRST_PAUSE, None, 0.0
        if useless or self._since is not None:
            self.add_failure(now, chance)
        elif not steady:
            self._since = now

    @property
    def due(self) -> float:
        """When the next probe is due (monotonic seconds); 0: at once."""
        return self._due

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next probe is due."""
        return max(0.0, self._due - now)


class Waiters:
    """Calls to make when there is a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[object, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], None]) -> Callable[[], None]:
        """Let the next :meth:`notify` call ``call``. Returns a function that cancels this."""
        key = object()
        with self._lock:
            self._calls[key] = call

        def cancel() -> None:
            with self._lock:
                self._calls.pop(key, None)

        return cancel

    def notify(self) -> None:
        """Call all added functions once, and remove them."""
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call()
