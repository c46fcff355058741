"""Transactions: a listing with filters, and one in full."""

from __future__ import annotations

from typing import Any

from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.errors import Code, error
from escrowmq.settings import SECONDS, parse_quantity
from escrowmq.wire.actions import transactions as actions

ROOM = "/transactions"
STATES = ("undecided", "open", "parked", "committed", "rolled_back", "expired")


PLANNABLE = ("undecided", "open", "parked")
"""States that an operator can still change."""


def transactions(console: Console, params: Params) -> Page:
    """List transactions by state, producer group and age, in the order of their prepare."""
    state, group, older = params.text("state"), params.text("group"), params.text("older")
    request: dict[str, Any] = {}
    if state is not None and state != "all":
        request["state"] = state
    if group is not None:
        request["group"] = group
    if older is not None:
        request["older_than"] = seconds(older, "older")
    page = console.page(actions.LIST(request), "transactions", params.text("after"))  # type: ignore[arg-type]
    filters = {"state": state or "all", "group": group or "", "older": older or ""}
    plannable = {**request} if state in PLANNABLE else {}
    values = {
        "plannable": plannable,
        "page_rows": page,
        "filters": filters,
        "states": STATES,
        "first": params.text("after") is None,
    }
    return Page("transactions.html", "Transactions", values, ROOM)


def transaction(console: Console, params: Params) -> Page:
    """Show one transaction: its messages, its history, possible operations."""
    identity = params.places["id"]
    found = console.admin.transaction(identity)
    return Page("transaction.html", f"Transaction {found['id']}", {"found": found}, ROOM)


def seconds(text: str, name: str) -> float:
    """Parse a duration such as ``5min``. Raises Misuse(BAD_ARGUMENT)."""
    try:
        return parse_quantity(text, SECONDS)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{name}: {problem}") from None
