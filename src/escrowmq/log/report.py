"""Describes damage found in a stored log: the file, the byte offset, the rows of a frame, and the error
:class:`DamagedLog`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from escrowmq.errors import Code, Corrupt

DAMAGED_NAME = "damaged"
"""The file that lists the frames in which damage was met, so that a broker that starts anew still knows of it."""


def pack_damaged(sequences: Iterable[int]) -> bytes:
    """Content of the file ``damaged``: one sequence a line."""
    return "".join(f"{sequence}\n" for sequence in sequences).encode()


def unpack_damaged(raw: bytes) -> list[int]:
    """Return the sequences of the file ``damaged``; a line that is no number is passed over, for each is looked at
    again."""
    return [int(line) for line in raw.split() if line.isdigit() and len(line) < 19]


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding. ``offset`` is in bytes from the start of ``file``; ``sequence`` the frame that should be there, or
    -1."""

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


@dataclass(frozen=True, slots=True)
class FrameDamage:
    """The readable rest of a damaged frame. ``rows`` marks those that are not as they were written; with
    ``bodies_only`` nothing but their bodies is lost, else nothing of them is known."""

    place: Damage
    rows: npt.NDArray[np.bool_]
    bodies_only: bool


@dataclass(frozen=True, slots=True)
class RowDamage:
    """The damage of one row: that of its frame, and the row's own position in the log."""

    place: Damage
    position: int
    body_only: bool

    def __str__(self) -> str:
        return f"{self.place}; position {self.position}"

    def error(self) -> DamagedLog:
        """Return the error for who asked for the row."""
        return DamagedLog(
            self.place.file, self.place.offset, self.place.sequence, f"{self.place.what}; position {self.position}"
        )
