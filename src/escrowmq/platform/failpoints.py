"""Named points at which a process can be killed, to test crashes between every two steps.

``ESCROWMQ_FAILPOINT=relay.sent`` kills this process (SIGKILL: no cleanup, no flush) when it first reaches that point,
``relay.sent:3`` at the third time; several are separated by commas. Unset, a failpoint costs one comparison. Names are
``room.what-was-just-done``.

With ``ESCROWMQ_FAILPOINT_TELL=FOLDER`` the process is not killed: it creates the file ``FOLDER/NAME`` (with its process
number) and blocks until the file is removed. Meanwhile the test can kill any process, or a whole cluster. If several
processes reach a point, only the first one blocks, and each point is reported once. FOLDER may be a link: when it
points to another folder, each point may be reported once more, there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from escrowmq.errors import Code, Misuse

VARIABLE = "ESCROWMQ_FAILPOINT"
TELL_VARIABLE = "ESCROWMQ_FAILPOINT_TELL"
_POLL = 0.01  # poll interval (s) for the removal of the file


def _trigger(name: str) -> None:
    """Kill this process; or report the point, if no process has yet, and block until its file is removed."""
    if (told := os.environ.get(TELL_VARIABLE)) is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    folder = Path(told).resolve()
    with suppress(FileExistsError):
        os.close(os.open(folder / f"{name}.told", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        written = folder / f"{name}.{os.getpid()}"
        written.write_text(f"{os.getpid()}\n")
        written.rename(folder / name)  # complete when it becomes visible
        while (folder / name).exists():
            time.sleep(_POLL)


class Failpoint:
    """One armed point: acts when reached the ``count``-th time, and with ``again`` every later time. Thread-safe."""

    def __init__(self, name: str, count: int, act: Callable[[], None], *, again: bool = False) -> None:
        self.name = name
        self._left = count
        self._trigger = act
        self._again = again
        self._lock = threading.Lock()

    def reached(self) -> None:
        with self._lock:
            self._left -= 1
            now = self._left == 0 or (self._again and self._left < 0)
        if now:
            self._trigger()


def parse(text: str, act: Callable[[], None] | None = None) -> Failpoint:
    """Parse ``NAME`` or ``NAME:COUNT``. Raises Misuse(BAD_SETTING) for anything else."""
    name, colon, count = text.partition(":")
    if not name or "/" in name or (colon and not (count.isdecimal() and int(count) > 0)):
        raise Misuse(Code.BAD_SETTING, f"{VARIABLE} = {text!r}", "NAME, or NAME:COUNT with a count of at least 1")
    tells = act is None and TELL_VARIABLE in os.environ
    return Failpoint(name, int(count or 1), act or (lambda: _trigger(name)), again=tells)


_armed: dict[str, Failpoint] = {}


def reach(name: str) -> None:
    """Report that the process reached the point ``name``."""
    if _armed and (point := _armed.get(name)) is not None:
        point.reached()


def arm(*failpoints: Failpoint) -> None:
    """Arm only these points in this process (for tests that raise instead of crashing; none: disarm all)."""
    global _armed
    _armed = {point.name: point for point in failpoints}


if _text := os.environ.get(VARIABLE):
    arm(*(parse(part) for part in _text.split(",")))
