"""What the check at the end of a chaos run found, mode by mode; :mod:`escrowmq_lab.chaos.check` fills it, the report
shows it.

| finding | when |
| --- | --- |
| lost | a business row without an effect under its mode |
| leaked | an effect of an id that was intended and has no business row, or whose business was to be rolled back |
| unexpected | an effect of an id that nobody intended |
| repeated | more than one effect of an id, all consumers' databases together, in a mode that does not allow it |
| altered | an effect whose hash is not that of its id's body, or under another mode than the id was intended for |
| misplaced | an effect in the database of another consumer than the one that the message was for |
| contradiction | confirmed without a business row; business or confirmed and never intended; one id in two producers' databases; a business row that was to be rolled back |
| unsettled | something had not come to rest when the run's patience was over |
| failed | a node did what none may do, or a log is damaged |
"""  # noqa: E501  # rows of a table

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEPT = 50
"""Findings of one kind and mode that are kept one by one; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise. ``what``: a word of the table above; ``subject``: an id, or a node; ``detail``: what each
    database says of it."""

    what: str
    mode: str
    subject: str
    detail: str


@dataclass(slots=True)
class Tally:
    """Numbers of one mode, each of ids."""

    intended: int = 0
    doomed: int = 0
    """Intended, and to be rolled back on purpose."""
    business: int = 0
    """Whose local transaction committed: each must have its effect."""
    confirmed: int = 0
    effects: int = 0
    """With at least one effect under this mode."""
    recovered: int = 0
    """With an effect and a business row, and never confirmed: their producer died, or was told nothing."""
    repeats: int = 0
    """Further effects, of modes that promise no more than "at least once"."""
    waited_us: tuple[int, int, int] | None = None
    """From business row to first effect, by wall clocks: half of the ids within, 99 % within, the longest."""


@dataclass(slots=True)
class Findings:
    """Of the whole run. ``counts``: anything else worth a line, by its name."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    broken: list[Finding] = field(default_factory=list)
    """The first KEPT of each kind and mode."""
    numbers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many there are of each kind and mode, those that are not kept included."""
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.broken and not self.numbers

    def add(self, what: str, mode: str, subject: str, detail: str) -> None:
        """One more finding."""
        self.numbers[what, mode] += 1
        if self.numbers[what, mode] <= KEPT:
            self.broken.append(Finding(what, mode, subject, detail))

    def of(self, what: str, mode: str | None = None) -> int:
        """Return how many of one kind, of one mode or of all."""
        return sum(count for (kind, of), count in self.numbers.items() if kind == what and (mode is None or of == mode))

    def subjects(self, what: str, mode: str | None = None) -> set[str]:
        """Return the subjects of the kept findings of one kind."""
        return {one.subject for one in self.broken if one.what == what and (mode is None or one.mode == mode)}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ok": self.ok,
            "modes": {name: _plain(tally) for name, tally in self.tallies.items()},
            "numbers": [{"what": what, "mode": mode, "ids": n} for (what, mode), n in sorted(self.numbers.items())],
            "findings": [
                {"what": one.what, "mode": one.mode, "subject": one.subject, "detail": one.detail}
                for one in self.broken
            ],
            "counts": self.counts,
        }


def _plain(tally: Tally) -> dict[str, Any]:
    waited = tally.waited_us
    numbers = {name: getattr(tally, name) for name in Tally.__slots__ if name != "waited_us"}
    return {**numbers, "waited_us": None if waited is None else list(waited)}
