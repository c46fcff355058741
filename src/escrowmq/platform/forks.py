"""Notification of objects in a forked child: their threads are gone there, and what they hold belongs to the
parent.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

FORKED = "this connection was made before the process was forked: connect in the child, or start children with spawn"


class InChild(Protocol):
    """An object that may stay open across a fork."""

    def forked(self) -> None:
        """Make new locks in the child of a fork; wait for no thread, and leave everything outside the process alone."""
        ...


_known: weakref.WeakSet[InChild] = weakref.WeakSet()


def tell_in_child(one: InChild) -> None:
    """Call its ``forked`` in every child that this process forks from now on, while it lives."""
    _known.add(one)


def _tell() -> None:
    for one in list(_known):
        one.forked()


os.register_at_fork(after_in_child=_tell)
