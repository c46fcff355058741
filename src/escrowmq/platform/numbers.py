"""Unique random numbers to identify client objects, and to spread pauses."""

from __future__ import annotations

import os
import struct

_TWO = struct.Struct("<II")


def own_number() -> int:
    """Return a unique random number of 62 bits, from the system: programs may use the same ``random.seed``."""
    return int.from_bytes(os.urandom(8), "big") >> 2


def fraction() -> float:
    """Return a random number in [0, 1), from the system: the program may have seeded ``random`` (as Hypothesis
    checks)."""
    high, low = _TWO.unpack(os.urandom(_TWO.size))
    return float(((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53))
