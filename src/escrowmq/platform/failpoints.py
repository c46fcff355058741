"""Named places at which a process can be made to die, so that "killed between every two steps" is a test and not a
hope.

``ESCROWMQ_FAILPOINT=relay.sent`` kills this process (SIGKILL: no cleanup, no flush) the first time it comes to that
place, ``relay.sent:3`` the third time; several with commas between. Unset, a failpoint costs one comparison. Names are
``room.what-was-just-done``.

With ``ESCROWMQ_FAILPOINT_TELL=FOLDER`` the process does not die: it makes the file ``FOLDER/NAME`` (with its process
number) and stands still until the file is gone. Whoever made the run can kill there what it likes, this process,
another, or a whole cluster; of many processes that come to a place, the first stands still, the others continue, and
each place tells once. FOLDER may be a link: when it leads to another folder, each place may tell once more, there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from escrowmq.errors import Code, Misuse

VARIABLE = "ESCROWMQ_FAILPOINT"
TELL_VARIABLE = "ESCROWMQ_FAILPOINT_TELL"
_POLL = 0.01
"""Seconds between looks whether the file is gone."""


def _act(name: str) -> None:
    folder = os.environ.get(TELL_VARIABLE)
    if folder is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        _stand_still(Path(folder).resolve(), name)


def _stand_still(folder: Path, name: str) -> None:
    file, done = folder / name, folder / f"{name}.told"
    try:
        os.close(os.open(done, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    written = folder / f"{name}.{os.getpid()}"
    written.write_text(f"{os.getpid()}\n")
    written.rename(file)  # whole when it is seen
    while file.exists():
        time.sleep(_POLL)


class Failpoint:
    """One armed place: acts the ``count``-th time that it is reached, and with ``again`` every time after it.
    Thread-safe."""

    def __init__(self, name: str, count: int, act: Callable[[], None], *, again: bool = False) -> None:
        self.name = name
        self._left = count
        self._act = act
        self._again = again
        self._lock = threading.Lock()

    def reached(self) -> None:
        """Count; act when the count is used up."""
        with self._lock:
            self._left -= 1
            now = self._left == 0 or (self._again and self._left < 0)
        if now:
            self._act()


def parse(text: str, act: Callable[[], None] | None = None) -> Failpoint:
    """Return the failpoint that ``NAME`` or ``NAME:COUNT`` names; raises Misuse(BAD_SETTING) for anything else."""
    name, colon, count = text.partition(":")
    if not name or "/" in name or (colon and not (count.isdecimal() and int(count) > 0)):
        raise Misuse(Code.BAD_SETTING, f"{VARIABLE} = {text!r}", "NAME, or NAME:COUNT with a count of at least 1")
    tells = act is None and TELL_VARIABLE in os.environ
    return Failpoint(name, int(count or 1), act or (lambda: _act(name)), again=tells)


_armed: dict[str, Failpoint] = {}


def reach(name: str) -> None:
    """Say that the place ``name`` was reached."""
    if _armed and (point := _armed.get(name)) is not None:
        point.reached()


def arm(*failpoints: Failpoint) -> None:
    """Arm these places in this process, and no others (tests that raise instead of dying; none: disarm)."""
    global _armed
    _armed = {point.name: point for point in failpoints}


if _text := os.environ.get(VARIABLE):
    arm(*(parse(part) for part in _text.split(",")))
