"""Compares confirmed and consumed message ids of a run: reports lost, foreign and repeated ones.

confirmed ≤ consumed ≤ confirmed + unconfirmed; with nothing unconfirmed they are equal. Counts are never compared: one
lost and one foreign message would cancel out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

SHOWN = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """The problems, by id; nothing if :attr:`ok`."""

    lost: frozenset[bytes]
    """Confirmed, and never consumed."""
    foreign: frozenset[bytes]
    """Consumed, but neither confirmed nor unconfirmed: rolled back, or of nowhere."""
    repeated: frozenset[bytes]
    """With more than one effect."""

    @property
    def ok(self) -> bool:
        """Return whether no id is lost, foreign or repeated."""
        return not (self.lost or self.foreign or self.repeated)

    def __str__(self) -> str:
        parts = [("lost", self.lost), ("foreign", self.foreign), ("repeated", self.repeated)]
        return "; ".join(f"{len(ids)} {name}: {_first(ids)}" for name, ids in parts if ids) or "both sides agree"


def compare(confirmed: Iterable[bytes], consumed: Iterable[bytes], unconfirmed: Iterable[bytes] = ()) -> Verdict:
    """Compare message ids, and return the lost, foreign and repeated ones. ``consumed`` has one entry per effect;
    ``unconfirmed`` may or may not have been consumed."""
    produced, open_, effects = set(confirmed), set(unconfirmed), Counter(consumed)
    return Verdict(
        lost=frozenset(produced - effects.keys()),
        foreign=frozenset(effects.keys() - produced - open_),
        repeated=frozenset(i for i, count in effects.items() if count > 1),
    )


def _first(ids: frozenset[bytes]) -> str:
    shown = ", ".join(i.hex() for i in sorted(ids)[:SHOWN])
    return shown + (", ..." if len(ids) > SHOWN else "")
