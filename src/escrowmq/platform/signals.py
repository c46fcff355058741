"""A context manager that handles SIGTERM and SIGINT as requests to stop."""

from __future__ import annotations

import signal
import threading
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
