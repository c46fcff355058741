"""Signals with which a supervisor requests something, and notifications for it (systemd's ``Type=notify``)."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


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


def notify(state: str) -> None:
    """Send a state, such as ``READY=1``, to the socket that the environment variable NOTIFY_SOCKET names.

    Without the variable nothing happens. A failure is logged: the manager then ends the service after its timeout.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.sendto(state.encode(), address)
    except OSError as problem:
        logger.warning("the service manager was not notified of %s: %s", state.partition("\n")[0], problem)
