"""The databases: the outbox of each, and its pending work by cause."""

from __future__ import annotations

from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.overview.sources import Sources
from escrowmq.overview.values import Cause, DatabaseStands

ROOM = "/databases"


def databases(console: Console, params: Params) -> Page:
    """Show the outbox of each database, and its pending work."""
    console.require_view()
    sources = Sources(console.bus, list(console.engines.values()))
    stands: list[DatabaseStands] = []
    causes: list[Cause] = []
    if sources.engines:
        from escrowmq.overview.waits.databases import find_database_causes

        causes = find_database_causes(sources, stands)
    causes.sort(key=lambda cause: (not cause.needs_person, -cause.count))
    values = {"stands": stands, "causes": causes, "links": {}, "missing": sources.missing}
    return Page("databases.html", "Databases", values, ROOM, live=5)
