"""Named places at which a process can be made to die, so that "killed between every two steps" is a test and not a hope.

``ESCROWMQ_FAILPOINT=relay.sent`` kills this process (SIGKILL: no cleanup, no flush) the first time it comes to that
place, ``relay.sent:3`` the third time. Unset, a failpoint costs one comparison. Names are ``room.what-was-just-done``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from escrowmq.errors import Code, Misuse

VARIABLE = "ESCROWMQ_FAILPOINT"


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failpoint:
    """One armed place: acts the ``count``-th time that it is reached. Thread-safe."""

    def __init__(self, name: str, count: int, act: Callable[[], None]) -> None:
        self.name = name
        self._left = count
        self._act = act
        self._lock = threading.Lock()

    def reached(self) -> None:
        """Count; act when the count is used up."""
        with self._lock:
            self._left -= 1
            now = self._left == 0
        if now:
            self._act()


def parse(text: str, act: Callable[[], None] = _kill) -> Failpoint:
    """The failpoint that ``NAME`` or ``NAME:COUNT`` names; raises Misuse(BAD_SETTING) for anything else."""
    name, colon, count = text.partition(":")
    if not name or (colon and not (count.isdecimal() and int(count) > 0)):
        raise Misuse(Code.BAD_SETTING, f"{VARIABLE} = {text!r}", "NAME, or NAME:COUNT with a count of at least 1")
    return Failpoint(name, int(count or 1), act)


_armed: Failpoint | None = parse(text) if (text := os.environ.get(VARIABLE)) else None


def reach(name: str) -> None:
    """Say that the place ``name`` was reached."""
    if _armed is not None and _armed.name == name:
        _armed.reached()


def arm(failpoint: Failpoint | None) -> None:
    """Arm another failpoint in this process, or none (tests that raise instead of dying)."""
    global _armed
    _armed = failpoint
