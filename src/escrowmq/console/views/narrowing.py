"""Filters by name, and pages, for complete listings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from escrowmq.console.asked import Params

AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Narrowed:
    """One page of a listing: ``count`` of ``all`` rows match; this page begins at ``start`` of those."""

    rows: Sequence[dict[str, Any]]
    wanted: str
    start: int
    count: int
    all: int

    @property
    def next(self) -> int | None:
        """Start of the next page."""
        after = self.start + AT_ONCE
        return after if after < self.count else None

    @property
    def previous(self) -> int | None:
        """Start of the previous page."""
        return max(self.start - AT_ONCE, 0) if self.start else None


def by_name(rows: Sequence[dict[str, Any]], params: Params) -> Narrowed:
    """Return a page of the rows whose name contains the requested text."""
    wanted = params.text("name") or ""
    matching = [row for row in rows if wanted.lower() in str(row["name"]).lower()]
    start = params.number("start", 0)
    return Narrowed(matching[start : start + AT_ONCE], wanted, start, len(matching), len(rows))
