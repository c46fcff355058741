"""The charts that the audit's page and the report's page share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from escrowmq.pipeline.pages import svg
from escrowmq.pipeline.pages.svg import AMBER, BLUE, GREEN, RED, SLATE, VIOLET, Series
from escrowmq.pipeline.timeline import LATENCY_STEPS

DECIDERS = {
    "producer": ("the producer", BLUE),
    "check": ("a check-back", GREEN),
    "operator": ("an operator", AMBER),
    "exhausted": ("checks exhausted", RED),
    "retention": ("expired", SLATE),
}
"""Who decides transactions: name and colour."""
HEIGHT = 220
"""Pixels of a chart of one series."""


def latency(named: Iterable[tuple[str, str, Mapping[int, int]]]) -> str:
    """Return an SVG histogram of decision latencies; "" if there are none. Each series is a name, a colour and the
    counts by step (see timeline.count_latencies)."""
    named = list(named)
    steps = [step for _, _, counts in named for step in counts]
    if not steps:
        return ""
    first, last = min(steps), max(steps) + 1
    shown = range(first, last)
    series = [Series(name, color, [counts.get(step, 0) for step in shown]) for name, color, counts in named]
    powers = range(math.ceil(first / LATENCY_STEPS), last // LATENCY_STEPS + 1)
    return svg.bars(
        "Latency of decisions",
        list(range(first, last + 1)),
        series,
        x_ticks=[(power * LATENCY_STEPS, _duration(10.0**power)) for power in powers],
        x_label="from durable half message to durable decision (logarithmic)",
        y_label="transactions (√ scale)",
        scale=math.sqrt,
    )


def in_escrow(begun: Sequence[int], ended: Iterable[Sequence[int]], seconds: float, **axes: Any) -> str:
    """Return an SVG chart of undecided transactions over time, from the numbers that began and ended in each bucket of
    ``seconds``. ``axes`` as in svg.lines."""
    left = [sum(values) for values in zip(*ended, strict=True)] or [0] * len(begun)
    held = [0, *(max(n, 0) for n in accumulate(a - b for a, b in zip(begun, left, strict=True)))]
    series = [Series("undecided", VIOLET, held, filled=True)]
    times = [n * seconds for n in range(len(held))]
    return svg.lines("In escrow", times, series, y_label="transactions", height=HEIGHT, **axes)


def _duration(microseconds: float) -> str:
    """Return a number of microseconds (a power of ten) as a text in the unit that makes it short: ``10 ms``."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} µs"
