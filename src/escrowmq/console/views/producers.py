"""Producer groups: undecided transactions and check-back rules."""

from __future__ import annotations

from typing import Any

from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.console.views import narrowing

ROOM = "/producers"


def producers(console: Console, params: Params) -> Page:
    """List all producer groups."""
    listed = console.admin.producers()
    rows: list[dict[str, Any]] = [{**row, "name": row["group"]} for row in listed]
    rows.sort(key=lambda row: (row["name"], row["broker"]))
    values = {"narrowed": narrowing.by_name(rows, params), "missing": listed.missing}
    return Page("producers.html", "Producer groups", values, ROOM, live=10)
