"""Messages entered, confirmed and effective per second, counted by the databases for the report."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import sqlalchemy as sa

from escrowmq_lab.chaos.books import business, confirmed, effects
from escrowmq_lab.chaos.check.reading import Engines
from escrowmq_lab.databases import snapshot

SECOND = 1_000_000

Seconds = dict[int, int]
"""Rows by second since 1970."""


@dataclass(slots=True)
class Flow:
    """Rows by mode and second, by the wall clock of the node that wrote them."""

    business: dict[str, Seconds] = field(default_factory=dict)
    confirmed: dict[str, Seconds] = field(default_factory=dict)
    effects: dict[str, Seconds] = field(default_factory=dict)

    def to_json(self) -> dict[str, dict[str, Seconds]]:
        """Return plain values."""
        return {"business": self.business, "confirmed": self.confirmed, "effects": self.effects}


def read_flow(producers: Engines, consumers: Engines) -> Flow:
    """Count the rows. Errors are SQLAlchemy's."""
    return Flow(_count(producers, business), _count(producers, confirmed), _count(consumers, effects))


def _count(engines: Engines, table: sa.Table) -> dict[str, Seconds]:
    second = (table.c.at_us // SECOND).label("second")
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for engine in engines.values():
        with snapshot(engine) as connection:
            for row in connection.execute(sa.select(table.c.mode, second, sa.func.count()).group_by("mode", second)):
                counts[row[0]][int(row[1])] += row[2]
    return {mode: dict(sorted(seconds.items())) for mode, seconds in sorted(counts.items())}
