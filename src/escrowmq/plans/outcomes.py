"""Outcome of each row of a plan, as one number per row, and counts of outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
        """Return whether a run counts it for ``stop_after``: neither done by this plan nor before."""
        return self > Outcome.ALREADY


def all_of(outcome: Outcome, rows: int) -> Outcomes:
    """Return the same outcome for a number of rows."""
    return np.full(rows, outcome, np.uint8)


def count_outcomes(outcomes: Outcomes) -> dict[str, int]:
    """Count outcomes by name (in lower case), without zeros."""
    counted = np.bincount(outcomes, minlength=len(Outcome)).tolist()
    return {one.name.lower(): counted[one] for one in Outcome if counted[one]}


def add_counts(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Add counts by name, in the order of the outcomes."""
    names = [one.name.lower() for one in Outcome]
    return {name: first.get(name, 0) + second.get(name, 0) for name in names if name in first or name in second}


def count_failures(counts: Mapping[str, int]) -> int:
    """Count the rows that were done neither by this plan nor before."""
    return sum(count for name, count in counts.items() if Outcome[name.upper()].is_failure)


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the frozen set: its number there, its outcome and its columns."""

    row: int
    outcome: str
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of rows by outcome (its name in lower case), with sample rows of each."""

    plan: str
    rows: int
    at_us: int
    by_outcome: Mapping[str, int]
    samples: list[Sample] = field(default_factory=list)
    handled: int = 0
    """Rows that earlier runs processed: a dry run covers only the others."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)
