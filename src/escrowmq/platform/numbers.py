"""Random numbers from the system: they distinguish objects of clients, and spread pauses."""

from __future__ import annotations

import os
import struct

_TWO = struct.Struct("<II")


def own_number() -> int:
    """Return a random number of 62 bits that no other object has. From the system, not from ``random``: programs that
    begin alike with
    ``random.seed`` would have the same numbers."""
    return int.from_bytes(os.urandom(8), "big") >> 2


def fraction() -> float:
    """Return a random number, 0 <= it < 1, of 53 bits, from the system.

    A thread that waits must not move on the numbers of ``random``, which the program around it may have seeded.
    """
    high, low = _TWO.unpack(os.urandom(_TWO.size))
    return float(((high >> 5) * (1 << 26) + (low >> 6)) / (1 << 53))
