"""Pending work grouped by cause: how much, since when, samples, and possible plans."""

from __future__ import annotations

from escrowmq import overview
from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.overview import Cause

ROOM = "/waiting"
SHOWN = 300
"""Maximum number of causes on the page, most urgent first."""


def waiting(console: Console, params: Params) -> Page:
    """Show all pending work."""
    console.require_view()
    found = overview.waiting(console.bus, list(console.engines.values()))
    parts = [
        (
            "Needs an operator",
            "Pending until an operator decides.",
            [one for one in found if one.needs_person],
        ),
        ("Continues without an operator", "Check it if it grows.", [one for one in found if not one.needs_person]),
    ]
    values = {
        "parts": [(heading, note, causes[:SHOWN], len(causes)) for heading, note, causes in parts],
        "any": bool(found),
        "missing": found.missing,
        "links": {id(cause): _link(cause) for cause in found},
    }
    return Page("waiting.html", "What waits", values, ROOM, live=5)


def _link(cause: Cause) -> str:
    """Return the page that lists the items of a cause."""
    if cause.kind == "dead":
        return f"/dead-letters/{cause.of}"
    if cause.kind == "lagging":
        return f"/groups/{cause.of}"
    if cause.kind in ("parked", "undecided"):
        return f"/transactions?group={cause.of}&state={'parked' if cause.kind == 'parked' else 'open'}"
    return ""
