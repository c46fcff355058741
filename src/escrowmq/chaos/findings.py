"""What the check at the end of a chaos run found, mode by mode; :mod:`escrowmq.chaos.check` fills it, the report shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise. ``what``: lost, repeated, leaked, unexpected, altered, unsettled, failed; ``subject``: an id, or a node."""

    what: str
    mode: str
    subject: str
    detail: str


@dataclass(slots=True)
class Tally:
    """Numbers of one mode, each of ids."""

    intended: int = 0
    business: int = 0
    """Whose local transaction committed: each must have its effect."""
    confirmed: int = 0
    effects: int = 0
    """With at least one effect."""
    recovered: int = 0
    """With an effect and a business row, and never confirmed: their producer died, or was told nothing."""
    repeats: int = 0
    """Further effects, of modes that promise no more than "at least once"."""


@dataclass(slots=True)
class Findings:
    """Of the whole run. ``counts``: anything else worth a line, by its name."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    broken: list[Finding] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.broken
