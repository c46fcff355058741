"""Death signal of the fork server, which imports this first: it and its nodes die with the director. Without it a
paused node would remain when the director is killed: it holds the pipe open whose end would end the fork server."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_the_parent() -> None:
    """Send SIGKILL to this process when its parent dies. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    die_with_the_parent()
