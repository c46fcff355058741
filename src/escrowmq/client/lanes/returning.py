"""Pauses that end when a link has its connection again: the link probes for its broker itself, so that its callers
need not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from escrowmq.wire import Link
from escrowmq.wire.link import ReturningLink

SLICE_SECONDS = 0.05
"""Poll interval when waiting for two events."""


def call_when_there(link: Link, call: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``call`` once after the link reconnects (on the I/O thread: it must not block).

    Returns a function that cancels it; None, and no call, if the link is connected or of a kind that always is.
    """
    return link.when_there(call) if isinstance(link, ReturningLink) and not link.state.is_there else None


def rest(link: Link, seconds: float, or_until: threading.Event | None = None) -> None:
    """Sleep for ``seconds``, but no longer than until the event, or until the link reconnects if it has lost its
    connection."""
    back = threading.Event()
    cancel = call_when_there(link, back.set)
    if cancel is None:
        time.sleep(seconds) if or_until is None else or_until.wait(seconds)
        return
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and not (or_until is not None and or_until.is_set()):
        if back.wait(left if or_until is None else min(left, SLICE_SECONDS)):
            break
    cancel()
