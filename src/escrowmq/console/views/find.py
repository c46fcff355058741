"""Search for a message id, a key, a transaction or a business key: one timeline each, and why it waits."""

from __future__ import annotations

from escrowmq import overview
from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console

ROOM = "/find"
BAD = {"dead", "parked", "refused", "damaged", "expired", "failed", "nacked", "stuck", "discarded", "fenced"}
"""Events that are highlighted."""


def find(console: Console, params: Params) -> Page:
    """Show the results, newest first."""
    console.require_view()
    wanted = params.text("q")
    if wanted is None:
        return Page("find.html", "Find", {"found": None, "searched": "", "bad": BAD}, ROOM)
    found = overview.timeline(console.bus, wanted, list(console.engines.values()))
    return Page("find.html", "Find", {"found": found, "searched": wanted, "bad": BAD}, ROOM)
