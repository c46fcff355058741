"""Notifies objects in a forked child: there their threads are gone, and their resources belong to the parent."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

FORKED = "this connection was made before the process was forked: connect in the child, or start children with spawn"


class InChild(Protocol):
    """An object that may stay open across a fork."""

    def on_fork(self) -> None:
        """Create new locks in the child, wait for no thread, and do not touch anything outside the process."""
        ...


_registered: weakref.WeakSet[InChild] = weakref.WeakSet()


def tell_in_child(one: InChild) -> None:
    """Call ``on_fork`` of an object in every child that this process forks from now on, while the object lives."""
    _registered.add(one)


def _notify_all() -> None:
    for one in list(_registered):
        one.on_fork()


os.register_at_fork(after_in_child=_notify_all)
