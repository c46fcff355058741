"""Waiting for a link that lost its connection: it looks for its broker itself, and whoever waits for its news asks
nobody meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from escrowmq.wire import Link
from escrowmq.wire.link import ReturningLink

SLICE_SECONDS = 0.05
"""Between two looks of who waits for two things; they cost nobody anything."""


def tell_when_there(link: Link, call: Callable[[], None]) -> Callable[[], None] | None:
    """Have ``call`` called once, on a thread that others need, when a link that lost its connection has one again; what
    takes that back. None, and no call, of a link that has one, or of a kind that is always there."""
    if isinstance(link, ReturningLink) and not link.there:
        return link.when_there(call)
    return None


def rest(link: Link, seconds: float, or_until: threading.Event | None = None) -> None:
    """Sleep for ``seconds``, but no longer than until a link that lost its connection has one again, or until the
    event."""
    back = threading.Event()
    forget = tell_when_there(link, back.set)
    if forget is None:
        time.sleep(seconds) if or_until is None else or_until.wait(seconds)
        return
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and not (or_until is not None and or_until.is_set()):
        if back.wait(left if or_until is None else min(left, SLICE_SECONDS)):
            break
    forget()
