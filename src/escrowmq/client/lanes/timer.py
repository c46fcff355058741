"""One thread that calls functions later, so that no caller blocks for a back-off or a deadline."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from escrowmq.platform.forks import tell_in_child

_log = logging.getLogger(__name__)
CLOSE_SECONDS = 2.0


class Timer:
    """Calls functions after a delay, on one daemon thread that starts with the first of them.

    Functions must be quick; an exception is logged.
    """

    def __init__(self, name: str = "escrowmq-timer") -> None:
        self._name = name
        self._wake = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False
        tell_in_child(self)

    def on_fork(self) -> None:
        self._wake = threading.Condition()
        self._closed = True

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` in ``seconds`` on the timer's thread, unless the timer is closed before."""
        with self._wake:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Drop pending calls and end the thread. Waits at most ``CLOSE_SECONDS`` for a call in progress."""
        with self._wake:
            self._closed = True
            self._due.clear()
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a delayed call failed")

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next due call, and return it; None when the timer is closed."""
        with self._wake:
            while not self._closed:
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                self._wake.wait(self._due[0][0] - now if self._due else None)
            return None
