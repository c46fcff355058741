"""The goals of small transactions, most of them ratios between peers of one run, and what a run had instead."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from works import (
    BATCHES_100,
    BATCHES_1000,
    BATCHES_2000,
    FLIGHT,
    ONE,
    PROCESSES,
    SEEN,
    SEEN_BESIDE,
    THREADS_64,
)

OURS, ONE_WAY, EMBEDDED = "EscrowMQ", 'EscrowMQ, confirm="oneway"', "EscrowMQ, embedded"
ROCKET, MINI, POSTGRES = "RocketMQ", "FastMiniMQ", "PostgreSQL outbox"
TWO_SYNCS = "two syncs + "
UNITS = {
    "p50_ms": " ms",
    "p99_ms": " ms",
    "rate": "/s",
    "server_us": " µs",
    "written_per_body_byte": " bytes per body byte",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of ours and its bound: a number, a multiple of a peer's figure, or of the time of two syncs more than
    the number."""

    works: tuple[str, ...]
    """The best of them counts."""
    key: str
    bound: float
    least: bool = True
    """At least the bound, or at most."""
    of: str = ""
    """The peer whose figure is multiplied; :data:`TWO_SYNCS`; empty: the bound is the number itself."""
    ours: str = OURS


GOALS = (
    Goal((ONE,), "p50_ms", 0.9, least=False, of=ROCKET),
    Goal((ONE,), "p50_ms", 0.5, least=False, of=ROCKET, ours=ONE_WAY),
    Goal((ONE,), "p50_ms", 0.4, least=False, of=TWO_SYNCS, ours=EMBEDDED),
    Goal((SEEN,), "p50_ms", 1.0, least=False, of=ROCKET),
    Goal((SEEN_BESIDE,), "p99_ms", 10.0, least=False),
    Goal((THREADS_64,), "rate", 15_000),
    Goal((THREADS_64,), "rate", 5.0, of=ROCKET),
    Goal((THREADS_64,), "rate", 1.5, of=MINI),
    Goal((BATCHES_100,), "rate", 80_000),
    Goal((BATCHES_100,), "rate", 1.0, of=POSTGRES),
    Goal((PROCESSES,), "rate", 3.0, of=ROCKET),
    Goal((FLIGHT,), "rate", 60_000),
    Goal((FLIGHT,), "rate", 2.0, of=MINI),
    Goal((THREADS_64,), "server_us", 50.0, least=False),
    Goal((BATCHES_1000, BATCHES_2000), "rate", 300_000),
    Goal((ONE,), "written_per_body_byte", 6.0, least=False),
    Goal((THREADS_64,), "written_per_body_byte", 1.25, least=False),
    Goal((BATCHES_1000, BATCHES_2000), "written_per_body_byte", 1.1, least=False),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal beside what a run had."""

    work: str
    wanted: str
    had: str
    met: bool | None
    """None: a figure that it needs was not measured."""


def verdicts(content: dict[str, Any], entries: list[dict[str, Any]]) -> list[Verdict]:
    """Of every goal, in order; ``entries`` as by ``figures.summary``."""
    by_name = {(one["work"], one["peer"]): one["rounds"] for one in entries if one["rounds"]}
    return [_verdict(goal, by_name, content["sync_ms"]) for goal in GOALS]


def _verdict(goal: Goal, by_name: dict[tuple[str, str], Any], sync_ms: list[float]) -> Verdict:
    found = [(work, by_name[work, goal.ours]) for work in goal.works if (work, goal.ours) in by_name]
    name = " or ".join(goal.works) if goal.ours == OURS else f"{goal.works[0]} ({goal.ours.partition(', ')[2]})"
    wanted = _wanted(goal)
    if not found:
        return Verdict(name, wanted, "not measured", None)
    best = max if goal.least else min
    work, mine = best(found, key=lambda one: _median(one[1], goal.key))
    value = _median(mine, goal.key)
    had = _text(value, goal.key)
    bound = goal.bound
    if goal.of == TWO_SYNCS:
        if not sync_ms:
            return Verdict(name, wanted, had, None)
        bound += 2 * statistics.median(sync_ms)
        had = f"{had}; two syncs + 0.4 ms were {_text(bound, goal.key)}"
    elif goal.of:
        theirs = by_name.get((work, goal.of))
        if not theirs or not _median(theirs, goal.key):
            return Verdict(name, wanted, f"{had}; {goal.of} not measured", None)
        ratio = value / _median(theirs, goal.key)
        each = [mine[one][goal.key] / theirs[one][goal.key] for one in mine if one in theirs and theirs[one][goal.key]]
        spread = f" ({min(each):.2f} to {max(each):.2f})" if len(each) > 1 else ""
        had = f"{ratio:.2f} ×{spread}: {had} to {_text(_median(theirs, goal.key), goal.key)}"
        value = ratio
    return Verdict(name, wanted, had, value >= bound if goal.least else value <= bound)


def _median(rounds: dict[Any, dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in rounds.values())


def _wanted(goal: Goal) -> str:
    sign = "≥" if goal.least else "≤"
    what = {"p50_ms": "p50 ", "p99_ms": "p99 ", "server_us": "broker's processor time "}.get(goal.key, "")
    if goal.of == TWO_SYNCS:
        return f"{what}{sign} {TWO_SYNCS}{goal.bound:g} ms"
    if goal.of:
        return f"{what}{sign} {goal.bound:g} × {goal.of}"
    return f"{what}{sign} {goal.bound:,.10g}{UNITS[goal.key]}"


def _text(value: float, key: str) -> str:
    return f"{value:,.0f}{UNITS[key]}" if value >= 100 else f"{value:.2f}{UNITS[key]}"
