"""Hash windows of ids: an id is in the same window on every side. Imports no Spark."""

from __future__ import annotations

import hashlib

import xxhash

NO_ID = "(no id)"
"""Stands for an id that is null."""

SAMPLED_OF = 1_000_000
"""A sample consists of the ids whose hash modulo this number is below a limit."""


def find_window(id: str, count: int, portable: bool) -> int:
    """Return the window of an id, 0 .. ``count``-1: by the first 60 bits of its MD5, or by Spark's xxHash64."""
    if portable:
        return (int.from_bytes(hashlib.md5(id.encode(), usedforsecurity=False).digest()[:8]) >> 4) % count
    hashed = xxhash.xxh64_intdigest(id.encode(), 42)  # Spark's seed
    return (hashed - (hashed >> 63 << 64)) % count  # Spark's number is signed
