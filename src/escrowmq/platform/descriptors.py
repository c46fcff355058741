"""Bounds on the files and connections that this process may open."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

KEPT = 64
"""Descriptors that connections leave to everything else in the process: the log, databases, connections that it makes
itself.
"""
RESERVED = 32
"""Descriptors that no connection gets: the log opens files when nothing else can."""
UNLIMITED = 1 << 20
"""Stands for a limit that there is not."""


_reserve = 0
_using_reserve = threading.Lock()


def raise_descriptor_limit(reserve: int = RESERVED) -> int:
    """Raise the soft limit of open files to the hard one, which an administrator sets, less ``reserve``; the limit that
    holds now.

    The reserve is what :func:`with_reserve` may use when connections have taken all the rest.
    """
    global _reserve
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _reserve = reserve if hard != resource.RLIM_INFINITY and hard >= 4 * reserve else 0
    with suppress(OSError, ValueError):  # macOS knows a lower one that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - _reserve, hard))
    return descriptor_limit()


def with_reserve(act: Callable[[], T]) -> T:
    """Return the result of ``act``, which opens one file; without a free descriptor it gets one of the reserve, if
    this process has one.

    The limit is lifted for the moment of the call: what accepts connections meanwhile could take one, too, but it waits
    for a second after it found none.
    """
    try:
        return act()
    except OSError as problem:
        if problem.errno != errno.EMFILE or not _reserve:
            raise
    with _using_reserve:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + _reserve, hard), hard))
        try:
            return act()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def connection_share() -> int:
    """Return how many connections one listening port of this process may have: there may be two, a broker's and a
    gateway's."""
    return max((descriptor_limit() - KEPT) // 2, 1)
