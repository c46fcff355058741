"""Half messages on their way into the transaction table, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Halves:
    """The transactions of half messages that were decided as rows; a list has one item for each message."""

    epochs: Sequence[int]
    due_us: Sequence[int]
    owners: Sequence[int] | None
    """The transaction (ordinal) that each one joins; ``NONE``: it begins one. None: all begin one."""
    begins: dict[int, int]
    """How many transactions begin, by producer group."""
