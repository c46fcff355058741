"""Listings that come whole: by a part of the name, and by pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from escrowmq.console.asked import Asked

AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Narrowed:
    """One page of a listing: ``count`` fit of ``all``; this page begins at ``start`` of those."""

    rows: Sequence[dict[str, Any]]
    wanted: str
    start: int
    count: int
    all: int

    @property
    def next(self) -> int | None:
        """Where the next page begins."""
        after = self.start + AT_ONCE
        return after if after < self.count else None

    @property
    def previous(self) -> int | None:
        """Where the page before begins."""
        return max(self.start - AT_ONCE, 0) if self.start else None


def by_name(rows: Sequence[dict[str, Any]], asked: Asked) -> Narrowed:
    """Return the rows whose name has the wanted letters in it, a page of them."""
    wanted = asked.text("name") or ""
    fitting = [row for row in rows if wanted.lower() in str(row["name"]).lower()]
    start = asked.number("start", 0)
    return Narrowed(fitting[start : start + AT_ONCE], wanted, start, len(fitting), len(rows))
