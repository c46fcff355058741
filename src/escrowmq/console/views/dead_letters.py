"""Dead letters: by group, by pages, and one of them in full."""

from __future__ import annotations

from typing import Any

from escrowmq.console.asked import Asked, Page
from escrowmq.console.bodies import shown
from escrowmq.console.core import Console
from escrowmq.console.views import messages
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.wire.actions import dead_letters as actions
from escrowmq.wire.actions import topics
from escrowmq.wire.values import LARGEST_NUMBER

ROOM = "/dead-letters"


def groups(console: Console, asked: Asked) -> Page:
    """The consumer groups that have dead letters."""
    listed = console.admin.groups()
    counts: dict[str, int] = {}
    for row in listed:
        counts[row["name"]] = counts.get(row["name"], 0) + row["dead_letters"]
    rows = [{"name": name, "dead": dead} for name, dead in sorted(counts.items()) if dead]
    values = {"rows": rows, "groups": len(counts), "missing": listed.missing}
    return Page("dead_groups.html", "Dead letters", values, ROOM, live=10)


def letters(console: Console, asked: Asked) -> Page:
    """The dead letters of a group."""
    name = check_name(asked.places["group"], Code.BAD_GROUP_NAME)
    page = console.page(actions.LIST({"group": name}), "dead_letters", asked.text("after"))
    values = {"name": name, "page_rows": page, "first": asked.text("after") is None}
    return Page("dead_letters.html", f"Dead letters of {name}", values, ROOM)


def letter(console: Console, asked: Asked) -> Page:
    """One dead letter, with its message."""
    name = check_name(asked.places["group"], Code.BAD_GROUP_NAME)
    found = letter_at(console, name, asked)
    body = found["message"].get("body")
    values = {
        "name": name,
        "letter": found,
        "message": found["message"],
        "body": None if body is None else shown(body, asked.text("as")),
    }
    return Page("dead_letter.html", f"Dead letter of {name}", values, ROOM)


def letter_at(console: Console, group: str, asked: Asked) -> dict[str, Any]:
    """The dead letter at a place, with its ``message``. Raises Misuse(NOT_FOUND)."""
    topic, queue, offset = asked.text("topic") or "", asked.number("queue", 0), asked.number("offset", 0)
    number = console.number_of(asked.text("broker"))
    request = actions.List(group=group, limit=1)
    queue_id = _queue_id(console, number, topic, queue)
    if offset:
        request["after"] = [queue_id, offset - 1]
    elif queue_id:
        request["after"] = [queue_id - 1, LARGEST_NUMBER]
    found = console.ask(number, actions.LIST(request))["dead_letters"]
    if not found or (found[0]["topic"], found[0]["queue"], found[0]["offset"]) != (topic, queue, offset):
        hint = "it was retried or discarded meanwhile; look at the group's dead letters"
        raise error(Code.NOT_FOUND, f"{group} has no dead letter at {topic}/{queue}/{offset} now", hint)
    message = messages.at(console, number, topic, queue, offset)
    return {**found[0], "broker": console.addresses[number], "message": message or {}}


def _queue_id(console: Console, number: int, topic: str, queue: int) -> int:
    """The number of a topic's queue among all of a broker's."""
    for row in console.ask(number, topics.LIST({}))["topics"]:
        if row["name"] == topic:
            for one in row["queues"]:
                if one["queue"] == queue:
                    return int(one["queue_id"])
    raise error(Code.UNKNOWN_TOPIC, f"there is no queue {topic}/{queue}")
