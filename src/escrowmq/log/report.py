"""Damage found in a stored log: file, byte offset, rows of a frame, and the error :class:`DamagedLog`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from escrowmq.errors import Code, Corrupt

DAMAGED_NAME = "damaged"  # the file that lists damaged frames, so that a restarted broker still knows them


def pack_damaged(sequences: Iterable[int]) -> bytes:
    """Encode the file ``damaged``: one sequence per line."""
    return "".join(f"{sequence}\n" for sequence in sequences).encode()


def unpack_damaged(raw: bytes) -> list[int]:
    """Return the sequences in the file ``damaged``; skip other lines, as every listed frame is rechecked."""
    return [int(line) for line in raw.split() if line.isdigit() and len(line) < 19]


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding. ``offset`` is in bytes from the start of ``file``; ``sequence`` is the expected frame, or -1."""

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

    @classmethod
    def of(cls, damage: Damage) -> DamagedLog:
        return cls(damage.file, damage.offset, damage.sequence, damage.what, newer=damage.newer)


@dataclass(frozen=True, slots=True)
class FrameDamage:
    """The damage of a frame: the damaged rows; with ``bodies_only`` they lost only their bodies, else everything."""

    place: Damage
    rows: npt.NDArray[np.bool_]
    bodies_only: bool


@dataclass(frozen=True, slots=True)
class RowDamage:
    """Why a row is incomplete: the damage of its frame, and the row's position in the log."""

    place: Damage
    position: int
    body_only: bool

    def __str__(self) -> str:
        return f"{self.place}; position {self.position}"

    def error(self) -> DamagedLog:
        return DamagedLog.of(replace(self.place, what=f"{self.place.what}; position {self.position}"))
