"""Look for anything: a message id, a key, a transaction, a business key; one timeline each, and why it waits."""

from __future__ import annotations

from escrowmq import overview
from escrowmq.console.asked import Asked, Page
from escrowmq.console.core import Console

ROOM = "/find"
BAD = {"dead", "parked", "refused", "damaged", "expired", "failed", "nacked", "stuck", "discarded", "fenced"}
"""Events that are marked."""


def find(console: Console, asked: Asked) -> Page:
    """Show the search results, newest first."""
    wanted = asked.text("q")
    if wanted is None:
        return Page("find.html", "Find", {"found": None, "searched": "", "bad": BAD}, ROOM)
    found = overview.timeline(console.bus, wanted, list(console.engines.values()))
    return Page("find.html", "Find", {"found": found, "searched": wanted, "bad": BAD}, ROOM)
