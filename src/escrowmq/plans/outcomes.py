"""Outcome of each row of a plan, as one number per row, and counts of outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Outcomes: TypeAlias = npt.NDArray[np.uint8]


class Outcome(IntEnum):
    """Outcome of one row: the stored number, and a sentence for operators. In a dry run it is the predicted outcome."""

    sentence: str

    def __new__(cls, number: int, sentence: str = "") -> Outcome:
        outcome = int.__new__(cls, number)
        outcome._value_ = number
        outcome.sentence = sentence
        return outcome

    NONE = 0, "nothing was done to it yet"
    DONE = 1, "this plan did it"
    ALREADY = 2, "it had been done or settled before"
    CHANGED = 3, "it died again, or its state changed, since the plan was made: nothing was done"
    CONFLICT = 4, "it was decided the other way: nothing was done"
    DAMAGED = 5, "the log is damaged at this message: nothing was done"
    GONE = 6, "it no longer exists: retention removed it, or its topic or group was deleted"
    REFUSED = 7, "the broker rejected it"

    @property
    def is_failure(self) -> bool:
        """Whether a run counts it for ``stop_after``: neither done by this plan nor before."""
        return self > Outcome.ALREADY


def all_of(outcome: Outcome, rows: int) -> Outcomes:
    """Return the same outcome for a number of rows."""
    return np.full(rows, outcome, np.uint8)


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the frozen set: its number there, its outcome and its columns."""

    row: int
    outcome: str
    about: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"row": self.row, "outcome": self.outcome, "about": dict(self.about)}


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of rows by outcome (its name in lower case), with sample rows of each."""

    plan: str
    rows: int
    at_us: int
    by_outcome: Mapping[str, int]
    samples: tuple[Sample, ...] = ()
    handled: int = 0
    """Rows that earlier runs processed: a dry run covers only the others."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "plan": self.plan,
            "rows": self.rows,
            "at_us": self.at_us,
            "handled": self.handled,
            "by_outcome": dict(self.by_outcome),
            "samples": [sample.to_json() for sample in self.samples],
        }


@dataclass(slots=True)
class Tally:
    """Counts outcomes batch by batch, in bounded memory."""

    numbers: list[int] = field(default_factory=lambda: [0] * len(Outcome))

    def add(self, outcomes: Outcomes) -> None:
        """Count a batch."""
        for number, count in enumerate(np.bincount(outcomes, minlength=len(Outcome)).tolist()):
            self.numbers[number] += count

    def take(self, counted: Mapping[str, int]) -> None:
        """Add earlier counts in the form of :attr:`by_outcome`."""
        for name, count in counted.items():
            self.numbers[Outcome[name.upper()]] += count

    @property
    def by_outcome(self) -> dict[str, int]:
        """Counts by name, without zeros."""
        return {one.name.lower(): self.numbers[one] for one in Outcome if self.numbers[one]}

    @property
    def failures(self) -> int:
        """Rows that were done neither by this plan nor before."""
        return sum(self.numbers[one] for one in Outcome if one.is_failure)
