"""How many messages were entered, confirmed and had their effect, second by second: what the report draws, counted by
the databases.
"""

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
    """Rows by mode and second, of the wall clock of the node that wrote them."""

    business: dict[str, Seconds] = field(default_factory=dict)
    confirmed: dict[str, Seconds] = field(default_factory=dict)
    effects: dict[str, Seconds] = field(default_factory=dict)

    def to_json(self) -> dict[str, dict[str, Seconds]]:
        """Plain values."""
        return {"business": self.business, "confirmed": self.confirmed, "effects": self.effects}


def read_flow(producers: Engines, consumers: Engines) -> Flow:
    """Count it. Errors are SQLAlchemy's."""
    return Flow(_counted(producers, business), _counted(producers, confirmed), _counted(consumers, effects))


def _counted(engines: Engines, table: sa.Table) -> dict[str, Seconds]:
    second = (table.c.at_us // SECOND).label("second")
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for engine in engines.values():
        with snapshot(engine) as connection:
            for row in connection.execute(sa.select(table.c.mode, second, sa.func.count()).group_by("mode", second)):
                counts[row[0]][int(row[1])] += row[2]
    return {mode: dict(sorted(seconds.items())) for mode, seconds in sorted(counts.items())}
