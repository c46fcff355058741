"""Numbers by which objects of clients are told apart."""

from __future__ import annotations

import os


def own_number() -> int:
    """A random number of 62 bits that no other object has. From the system, not from ``random``: programs that begin alike with
    ``random.seed`` would have the same numbers."""
    return int.from_bytes(os.urandom(8), "big") >> 2
