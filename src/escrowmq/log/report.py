"""Describes damage found in a stored log: the file, the byte offset and the error :class:`DamagedLog`."""

from __future__ import annotations

from dataclasses import dataclass

from escrowmq.errors import Code, Corrupt


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding. ``offset`` is in bytes from the start of ``file``; ``sequence`` the frame that should be there, or -1."""

    file: str
    offset: int
    sequence: int
    what: str
    newer: bool = False

    def __str__(self) -> str:
        frame = f", frame {self.sequence}" if self.sequence >= 0 else ""
        return f"{self.file}, byte {self.offset}{frame}: {self.what}"


class DamagedLog(Corrupt):
    """Corrupt(DAMAGED) or Corrupt(NEWER_FORMAT) with the place in ``damage``."""

    def __init__(self, file: str, offset: int, sequence: int, what: str, *, newer: bool = False) -> None:
        self.damage = Damage(file, offset, sequence, what, newer)
        super().__init__(Code.NEWER_FORMAT if newer else Code.DAMAGED, str(self.damage))
