"""Outcomes of the rows of a plan: one number a row, in columns, and how many there are of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Outcomes: TypeAlias = npt.NDArray[np.uint8]


class Outcome(IntEnum):
    """One row's outcome: the number that is stored, and the sentence that a person reads. A dry run says the same of
    what would happen."""

    sentence: str

    def __new__(cls, number: int, sentence: str = "") -> Outcome:
        made = int.__new__(cls, number)
        made._value_ = number
        made.sentence = sentence
        return made

    NONE = 0, "nothing was done to it yet"
    DONE = 1, "this plan did it"
    ALREADY = 2, "somebody had done it, or had settled it, before"
    CHANGED = 3, "it is another death now than the one in the plan, or it stands otherwise: nothing was done"
    CONFLICT = 4, "it was decided the other way: nothing was done"
    DAMAGED = 5, "the log is damaged under it: nothing was done"
    GONE = 6, "it is not there any more: it left with the log's retention, or its topic or group was deleted"
    REFUSED = 7, "the broker refused it"

    @property
    def is_failure(self) -> bool:
        """Whether a run counts it for ``stop_after``: neither done by this plan, nor done before."""
        return self > Outcome.ALREADY


def all_of(outcome: Outcome, rows: int) -> Outcomes:
    """So many rows that all came to the same."""
    return np.full(rows, outcome, np.uint8)


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the frozen set, by its number there, and what there is to say of it."""

    row: int
    outcome: str
    about: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"row": self.row, "outcome": self.outcome, "about": dict(self.about)}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows came to which outcome (by its name in lower case), with some rows of each."""

    plan: str
    rows: int
    at_us: int
    by_outcome: Mapping[str, int]
    samples: tuple[Sample, ...] = ()
    handled: int = 0
    """Rows that runs have dealt with before: a dry run looks at the others."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
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
        """Add what :attr:`by_outcome` once gave."""
        for name, count in counted.items():
            self.numbers[Outcome[name.upper()]] += count

    @property
    def by_outcome(self) -> dict[str, int]:
        """Those that occur, by name."""
        return {one.name.lower(): self.numbers[one] for one in Outcome if self.numbers[one]}

    @property
    def failures(self) -> int:
        """Rows that neither this plan nor anybody before did."""
        return sum(self.numbers[one] for one in Outcome if one.is_failure)
