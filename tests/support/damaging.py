"""Damage for tests: one flipped bit in a stored body, as a bad disk leaves it."""

from __future__ import annotations

from pathlib import Path

FILLER = b"filler" * 200


def flip(folder: Path, content: bytes, *, byte: int = 0) -> tuple[str, int]:
    """Flip one bit of the ``byte``-th byte of the one place in the segments where ``content`` stands: the segment's
    name, and where."""
    places = [(path, at) for path in sorted(folder.glob("*.segment")) if (at := path.read_bytes().find(content)) >= 0]
    ((path, at),) = places
    data = bytearray(path.read_bytes())
    assert data.count(content) == 1
    data[at + byte] ^= 1
    path.write_bytes(data)
    return path.name, at + byte
