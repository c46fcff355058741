"""The running loops over one consumer, for which closing waits."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress


class Iterations:
    """Counts loops by the thread or task that runs them. Thread-safe, and safe in a signal handler."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: Counter[object] = Counter()

    def begin(self) -> object:
        """Count a loop of the caller. Returns the argument of :meth:`end`."""
        runner = _runner()
        with self._lock:
            self._running[runner] += 1
        return runner

    def end(self, runner: object) -> None:
        with self._lock:
            self._running[runner] -= 1
            self._running += Counter()  # drops what is zero

    @property
    def mine(self) -> bool:
        """Whether the caller runs one: in its body, or in a signal handler that interrupted it."""
        return _runner() in self._running

    @property
    def others(self) -> bool:
        """Whether another thread or task runs one."""
        with self._lock:
            return len(self._running) > self.mine


def _runner() -> object:
    """Return the running task, or the thread if there is none."""
    with suppress(RuntimeError):
        if (task := asyncio.current_task()) is not None:
            return task
    return threading.get_ident()
