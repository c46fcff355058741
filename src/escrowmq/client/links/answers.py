"""What the brokers that are there answered, and who of several is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from escrowmq.client.links.presence import Missing
from escrowmq.errors import Code, Overloaded

T = TypeVar("T")
Row = TypeVar("Row")


@dataclass(slots=True)
class Answers(Generic[T]):
    """One answer per broker that is there, by its number, and those that did not answer."""

    found: list[tuple[int, T]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def values(self) -> list[T]:
        """The answers."""
        return [answer for _, answer in self.found]


class Listing(list[Row]):
    """What the brokers that are there answered, and in ``missing`` those of several that are away, with the reason."""

    def __init__(self, rows: Iterable[Row] = (), missing: Sequence[Missing] = ()) -> None:
        super().__init__(rows)
        self.missing: list[Missing] = list(missing)


class Count(int):
    """How many at the brokers that are there, and in ``missing`` those of several that are away, with the reason."""

    missing: list[Missing]

    def __new__(cls, count: int, missing: Sequence[Missing] = ()) -> Count:
        made = super().__new__(cls, count)
        made.missing = list(missing)
        return made


def away(missing: Sequence[Missing], what: str) -> Overloaded:
    """The error of what cannot be done without the brokers that are missing."""
    reasons = "; ".join(f"{one['broker']}: {one['reason']}" for one in missing)
    return Overloaded(Code.BROKER_AWAY, f"{what}; away: {reasons}", "run it again when that broker is back")
