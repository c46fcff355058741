"""The findings of the final check of a chaos run, by mode; :mod:`escrowmq_lab.chaos.check` fills them, the report shows
them.

| finding | when |
| --- | --- |
| lost | a business row without an effect under its mode |
| leaked | an effect of an id that was intended and has no business row, or whose business was to be rolled back |
| unexpected | an effect of an id that was never intended |
| repeated | more than one effect of an id over all databases, in a mode that does not allow it |
| altered | an effect whose hash does not match its id's body, or under another mode than intended |
| misplaced | an effect in the database of another consumer than the message's |
| contradiction | confirmed without a business row; business or confirmed but never intended; one id in two databases; a
business row that was to be rolled back |
| unsettled | work still pending when the run's patience was over |
| failed | a node failed in a way that is not allowed, or a log is damaged |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEPT = 50
"""Maximum number of findings listed per kind and mode; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise. ``what``: a word of the table; ``subject``: an id or node; ``detail``: database entries."""

    what: str
    mode: str
    subject: str
    detail: str


@dataclass(slots=True)
class Tally:
    """Counts of ids of one mode."""

    intended: int = 0
    doomed: int = 0
    """Intended, and to be rolled back on purpose."""
    business: int = 0
    """Local transaction committed: each must have its effect."""
    confirmed: int = 0
    effects: int = 0
    """With at least one effect under this mode."""
    recovered: int = 0
    """With an effect and a business row, but never confirmed: the producer died, or got no response."""
    repeats: int = 0
    """Further effects, in modes that promise only "at least once"."""
    waited_us: tuple[int, int, int] | None = None
    """Time from business row to first effect, by wall clocks: median, 99th percentile, maximum."""


@dataclass(slots=True)
class Findings:
    """Findings of the whole run. ``counts``: other numbers for the report, by name."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    broken: list[Finding] = field(default_factory=list)
    """The first KEPT of each kind and mode."""
    numbers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of findings of each kind and mode, including unlisted ones."""
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Return whether every promise held."""
        return not self.broken and not self.numbers

    def add(self, what: str, mode: str, subject: str, detail: str) -> None:
        """Add a finding."""
        self.numbers[what, mode] += 1
        if self.numbers[what, mode] <= KEPT:
            self.broken.append(Finding(what, mode, subject, detail))

    def of(self, what: str, mode: str | None = None) -> int:
        """Return the number of findings of a kind, of one mode or of all."""
        return sum(count for (kind, of), count in self.numbers.items() if kind == what and (mode is None or of == mode))

    def subjects(self, what: str, mode: str | None = None) -> set[str]:
        """Return the subjects of the listed findings of a kind."""
        return {one.subject for one in self.broken if one.what == what and (mode is None or one.mode == mode)}

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "ok": self.ok,
            "modes": {name: _to_json(tally) for name, tally in self.tallies.items()},
            "numbers": [{"what": what, "mode": mode, "ids": n} for (what, mode), n in sorted(self.numbers.items())],
            "findings": [
                {"what": one.what, "mode": one.mode, "subject": one.subject, "detail": one.detail}
                for one in self.broken
            ],
            "counts": self.counts,
        }


def _to_json(tally: Tally) -> dict[str, Any]:
    waited = tally.waited_us
    numbers = {name: getattr(tally, name) for name in Tally.__slots__ if name != "waited_us"}
    return {**numbers, "waited_us": None if waited is None else list(waited)}
