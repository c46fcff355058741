"""Unique random numbers to identify client objects, and to spread pauses."""

from __future__ import annotations

import os
import struct

_TWO = struct.Struct("<II")


def own_number() -> int:
    """Return a unique random number of 62 bits. It comes from the system, not from ``random``: programs that start with
    the same ``random.seed`` would have the same numbers."""
    return int.from_bytes(os.urandom(8), "big") >> 2


def fraction() -> float:
    """Return a random number of 53 bits in [0, 1), from the system: a waiting thread must not consume numbers of
    ``random``, which the program may have seeded (Hypothesis detects that, and fails a concurrent test)."""
    high, low = _TWO.unpack(os.urandom(_TWO.size))
    return float(((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53))
