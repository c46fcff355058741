"""A network of its own for this process and what it starts: nothing but loopback, so that no server can be reached from
outside.

RocketMQ's replication port listens on every address, whatever it is told.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41  # SIOCSIFFLAGS; IFF_UP | IFF_RUNNING


def isolate() -> bool:
    """Leave the machine's network for an empty one; False where that is not allowed (it takes root), nothing
    changed."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP_AND_RUNNING))
    return True


def last_error() -> str:
    """Why :func:`isolate` said no."""
    return os.strerror(ctypes.get_errno())
