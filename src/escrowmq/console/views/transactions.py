"""Transactions: a listing with filters, and one of them in full."""

from __future__ import annotations

from typing import Any

from escrowmq.console.asked import Asked, Page
from escrowmq.console.core import Console
from escrowmq.errors import Code, error
from escrowmq.settings import SECONDS, parse_quantity
from escrowmq.wire.actions import transactions as actions

ROOM = "/transactions"
STATES = ("undecided", "open", "parked", "committed", "rolled_back", "expired")


PLANNABLE = ("undecided", "open", "parked")
"""States that a person can still change."""


def transactions(console: Console, asked: Asked) -> Page:
    """Return transactions by state, producer group and age, in the order of their prepare."""
    state, group, older = asked.text("state"), asked.text("group"), asked.text("older")
    request: dict[str, Any] = {}
    if state is not None and state != "all":
        request["state"] = state
    if group is not None:
        request["group"] = group
    if older is not None:
        request["older_than"] = seconds(older, "older")
    page = console.page(actions.LIST(request), "transactions", asked.text("after"))  # type: ignore[arg-type]
    filters = {"state": state or "all", "group": group or "", "older": older or ""}
    plannable = {**request} if state in PLANNABLE else {}
    values = {
        "plannable": plannable,
        "page_rows": page,
        "filters": filters,
        "states": STATES,
        "first": asked.text("after") is None,
    }
    return Page("transactions.html", "Transactions", values, ROOM)


def transaction(console: Console, asked: Asked) -> Page:
    """One transaction: its messages, what happened to it, what can be done."""
    identity = asked.places["id"]
    found = console.admin.transaction(identity)
    return Page("transaction.html", f"Transaction {found['id']}", {"found": found}, ROOM)


def seconds(text: str, name: str) -> float:
    """Return a duration as people write it (``5min``). Raises Misuse(BAD_ARGUMENT)."""
    try:
        return parse_quantity(text, SECONDS)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{name}: {problem}") from None
