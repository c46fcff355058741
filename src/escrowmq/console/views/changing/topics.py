"""Operations on a topic: more queues, a retention of its own, delete it."""

from __future__ import annotations

from typing import Any, Literal

from escrowmq.console.asked import Answer, Asked, Page, Redirect
from escrowmq.console.core import Console
from escrowmq.console.views.changing.groups import reason, typed
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.settings import BYTES, SECONDS, parse_quantity

ROOM = "/topics"


def alter(console: Console, asked: Asked) -> Answer:
    """Give a topic more queues or a retention of its own; empty fields change nothing."""
    name = _name(asked)
    changes: dict[str, Any] = {}
    if asked.said("queues") is not None:
        changes["queues"] = asked.counted("queues", 0)
    if (kept := asked.said("retention")) is not None:
        changes["retention"] = _quantity("retention", kept, SECONDS)
    if (size := asked.said("retention_size")) is not None:
        most = _quantity("retention_size", size, BYTES)
        changes["retention_size"] = most if most == "broker" else int(most)
    if not changes:
        raise error(Code.BAD_ARGUMENT, "nothing is to be changed", "go back, and say what")
    console.admin.alter_topic(name, why=reason(asked), **changes)
    return Redirect(f"{ROOM}/{name}")


def look(console: Console, asked: Asked) -> Page:
    """Preview a deletion: what would be lost with a topic."""
    name = _name(asked)
    would = list(console.admin.delete_topic(name, check=True, force=True))
    groups = sorted({group for one in would for group in one["groups"]})
    sums = {
        count: sum(int(one[count]) for one in would) for count in ("messages", "delayed", "rolled_back", "dead_letters")
    }
    return Page("topic_delete.html", f"Delete {name}", {"name": name, "groups": groups, "sums": sums}, ROOM)


def delete(console: Console, asked: Asked) -> Answer:
    """Delete a topic; its name was typed."""
    name = _name(asked)
    typed(asked, name)
    console.admin.delete_topic(name, force=asked.one("force") == "yes", why=reason(asked))
    return Redirect(ROOM)


def _name(asked: Asked) -> str:
    return check_name(asked.places["topic"], Code.BAD_TOPIC_NAME)


def _quantity(name: str, text: str, unit: str) -> float | Literal["broker"]:
    """Return a time or a size as people write it, or ``broker``. Raises Misuse(BAD_ARGUMENT)."""
    if text == "broker":
        return "broker"
    try:
        return parse_quantity(text, unit)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{name.replace('_', ' ')}: {problem}") from None
