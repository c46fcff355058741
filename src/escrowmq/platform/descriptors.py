"""Limits of open files and connections of this process."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

KEPT = 64  # descriptors reserved for other uses than incoming connections: the log, databases, outgoing connections
RESERVED = 32  # descriptors that connections never get: the log opens files when no other descriptor is left
UNLIMITED = 1 << 20  # represents the absence of a limit


_reserve = 0
_using_reserve = threading.Lock()


def raise_descriptor_limit(reserve: int = RESERVED) -> int:
    """Raise the soft limit of open files to the hard one, which an administrator sets, less ``reserve``; return the new
    limit. :func:`with_reserve` may use the reserve when connections have taken all the rest."""
    global _reserve
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _reserve = reserve if hard != resource.RLIM_INFINITY and hard >= 4 * reserve else 0
    with suppress(OSError, ValueError):  # macOS has a lower limit that it does not report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - _reserve, hard))
    return descriptor_limit()


def with_reserve(act: Callable[[], T]) -> T:
    """Call ``act``, which opens one file; without a free descriptor use the reserve, by raising the limit during the
    call. An accepting thread could take the descriptor, but it waits for a second after a failure."""
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
    """Return the maximum number of descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def connection_share() -> int:
    """Return the connections that one listening port may have: there may be two, a broker's and a gateway's."""
    return max((descriptor_limit() - KEPT) // 2, 1)
