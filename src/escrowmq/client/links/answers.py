"""Answers of the reachable brokers, the names of missing ones, and an action that waits for a broker that is
away."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from escrowmq.client.lanes.returning import rest
from escrowmq.client.links.presence import Attendance, Missing
from escrowmq.errors import AWAY, Code, EscrowError, Overloaded, Unknown
from escrowmq.platform.backoff import Backoff
from escrowmq.wire import Call, Link, ask
from escrowmq.wire.actions.action import Answer

TRY_SECONDS = 5.0
"""How long one of several brokers may be silent to one try of an action that is quickly done."""
_LOST = frozenset({Code.DISCONNECTED})

T = TypeVar("T")
Row = TypeVar("Row")


@dataclass(slots=True)
class Answers(Generic[T]):
    """One answer per broker that is there, by its number, and those that did not answer."""

    found: list[tuple[int, T]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def values(self) -> list[T]:
        """The answers, in the order of the brokers."""
        return [answer for _, answer in self.found]


class Listing(list[Row]):
    """Answers of the reachable brokers, and in ``missing`` those of several that are away, with the reason."""

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
    """Return Overloaded(BROKER_AWAY) for ``what`` cannot be done without the brokers that are missing; names them with
    the reasons."""
    reasons = "; ".join(f"{one['broker']}: {one['reason']}" for one in missing)
    return Overloaded(Code.BROKER_AWAY, f"{what}; away: {reasons}", "run it again when that broker is back")


def patient_action(
    link: Link,
    call: Call[Answer],
    deadline: float,
    attendance: Attendance | None = None,
    *,
    longest: float = TRY_SECONDS,
) -> Answer:
    """Run an action that may be repeated, and return its answer. While the broker is away it is repeated until
    ``deadline`` (monotonic seconds), then Unknown(TIMED_OUT) is raised.

    With an ``attendance``, of one of several brokers, it is given up with Overloaded(BROKER_AWAY) once that broker
    counts as away, and one try takes no longer than ``longest`` seconds.
    """
    backoff = Backoff(0.02, 1.0)
    again, most = (_LOST, inf) if attendance is None else (AWAY, longest)
    while True:
        left = deadline - time.monotonic()
        if attendance is not None and attendance.away:
            raise attendance.refusal()
        try:
            return ask(link, call, min(max(left, 0.001), most))
        except EscrowError as problem:
            if problem.code not in again:
                raise
            if attendance is not None:
                attendance.suspect()
            pause = backoff.failed()
            if left <= pause:
                raise _unanswered(link, call, problem) from problem
        rest(link, pause)


def _unanswered(link: Link, call: Call[Answer], problem: EscrowError) -> Unknown:
    hint = None
    if call.reads_only:
        hint = "it was a question only: nothing was changed; is a broker running there (escrowmq serve)?"
    return Unknown(Code.TIMED_OUT, f"{link.address}: {problem.message}", hint)
