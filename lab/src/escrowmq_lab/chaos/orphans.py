"""Imported first by the fork server: it then ends with the director, however that ends, and its nodes with it.

Without this a node that is paused when the director is killed would stay for ever: it holds the pipe open at whose end
the fork server would end.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_the_parent() -> None:
    """SIGKILL this process when the one that forked it has died. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    die_with_the_parent()
