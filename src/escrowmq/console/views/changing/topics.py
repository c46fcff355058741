"""Changes to a topic: more queues, its own retention, deletion."""

from __future__ import annotations

from typing import Any, Literal

from escrowmq.console.asked import Answer, Page, Params, Redirect
from escrowmq.console.core import Console
from escrowmq.console.views.changing.groups import check_typed, reason
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.settings import BYTES, SECONDS, parse_quantity

ROOM = "/topics"


def alter(console: Console, params: Params) -> Answer:
    """Add queues to a topic or set its own retention; empty fields change nothing."""
    name = _name(params)
    changes: dict[str, Any] = {}
    if params.form_text("queues") is not None:
        changes["queues"] = params.form_number("queues", 0)
    if (kept := params.form_text("retention")) is not None:
        changes["retention"] = _parse_quantity("retention", kept, SECONDS)
    if (size := params.form_text("retention_size")) is not None:
        most = _parse_quantity("retention_size", size, BYTES)
        changes["retention_size"] = most if most == "broker" else int(most)
    if not changes:
        raise error(Code.BAD_ARGUMENT, "nothing is to be changed", "go back, and say what")
    console.admin.alter_topic(name, why=reason(params), **changes)
    return Redirect(f"{ROOM}/{name}")


def preview(console: Console, params: Params) -> Page:
    """Preview the deletion of a topic."""
    name = _name(params)
    previews = list(console.admin.delete_topic(name, check=True, force=True))
    groups = sorted({group for one in previews for group in one["groups"]})
    sums = {
        count: sum(int(one[count]) for one in previews)
        for count in ("messages", "delayed", "rolled_back", "dead_letters")
    }
    return Page("topic_delete.html", f"Delete {name}", {"name": name, "groups": groups, "sums": sums}, ROOM)


def delete(console: Console, params: Params) -> Answer:
    """Delete a topic after its name was typed."""
    name = _name(params)
    check_typed(params, name)
    console.admin.delete_topic(name, force=params.form_value("force") == "yes", why=reason(params))
    return Redirect(ROOM)


def _name(params: Params) -> str:
    return check_name(params.places["topic"], Code.BAD_TOPIC_NAME)


def _parse_quantity(name: str, text: str, unit: str) -> float | Literal["broker"]:
    """Parse a time or a size, or ``broker``. Raises Misuse(BAD_ARGUMENT)."""
    if text == "broker":
        return "broker"
    try:
        return parse_quantity(text, unit)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{name.replace('_', ' ')}: {problem}") from None
