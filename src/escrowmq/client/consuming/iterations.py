"""The loops over one consumer that are under way, so that closing can wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter


class Iterations:
    """Counts loops by the thread, or the task of an event loop, that runs them. Thread-safe, and safe in a signal
    handler."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: Counter[object] = Counter()

    def begin(self) -> object:
        """Note that the caller begins a loop. Returns what :meth:`end` takes."""
        runner = _runner()
        with self._lock:
            self._running[runner] += 1
        return runner

    def end(self, runner: object) -> None:
        """Note that a loop is over."""
        with self._lock:
            self._running[runner] -= 1
            if not self._running[runner]:
                del self._running[runner]

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
    """Identify the running task, or the thread if none runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task or threading.get_ident()
