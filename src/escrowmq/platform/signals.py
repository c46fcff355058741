"""A context manager that handles SIGTERM and SIGINT as requests to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def hang_up_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` on SIGHUP within the block, then restore the handler. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, lambda number, frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


SECOND_SIGNAL_SECONDS = 1.0


class Signals:
    """Calls ``first`` at the first signal and ``again`` at later ones; not at one that comes within a second of the
    first, because some programs signal a process and then its group."""

    def __init__(self, first: Callable[[], object], again: Callable[[], object]) -> None:
        self._first, self._again = first, again
        self._at: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if self._at is None:
            self._at = now
            self._first()
        elif now > self._at + SECOND_SIGNAL_SECONDS:
            self._again()


@contextmanager
def stop_signals(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` on SIGTERM and SIGINT within the block, then restore the handlers. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        act()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
