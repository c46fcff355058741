"""Dead letters: by group, by pages, and one of them in full."""

from __future__ import annotations

from typing import Any

from escrowmq.client.admin.dead_letters import last_attempts
from escrowmq.console.asked import Asked, Page
from escrowmq.console.bodies import shown
from escrowmq.console.core import Console
from escrowmq.console.views import messages
from escrowmq.console.views.transactions import seconds
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.wire.actions import dead_letters as actions
from escrowmq.wire.actions import standing

ROOM = "/dead-letters"
CAUSES = 20
"""The most causes of a group that are listed one by one."""


def groups(console: Console, asked: Asked) -> Page:
    """Return the consumer groups that have dead letters, and why."""
    page = console.page(actions.SUMMARY({"causes": CAUSES, "samples": 1}), "groups", asked.text("after"))
    values = {"page_rows": page, "first": asked.text("after") is None}
    return Page("dead_groups.html", "Dead letters", values, ROOM, live=10)


def letters(console: Console, asked: Asked) -> Page:
    """Return the dead letters of a group: their causes, and one by one by pages."""
    name = check_name(asked.places["group"], Code.BAD_GROUP_NAME)
    cause, topic, older = asked.text("cause"), asked.text("topic"), asked.text("older")
    request = actions.List(group=name)
    chosen: dict[str, Any] = {"group": name}
    if cause is not None:
        request["cause"] = chosen["cause"] = cause
    if topic is not None:
        request["topic"] = chosen["topic"] = topic
    if older is not None:
        request["older_than"] = chosen["older_than"] = seconds(older, "older")
    page = console.page(actions.LIST(request), "dead_letters", asked.text("after"))
    summed = console.page(actions.SUMMARY({"group": name, "causes": CAUSES, "samples": 1}), "groups", None)
    values = {
        "name": name,
        "page_rows": page,
        "first": asked.text("after") is None,
        "summed": summed.rows,
        "total": sum(row["dead_letters"] for row in summed.rows),
        "filters": {"cause": cause or "", "topic": topic or "", "older": older or ""},
        "chosen": chosen,
    }
    return Page("dead_letters.html", f"Dead letters of {name}", values, ROOM)


def letter(console: Console, asked: Asked) -> Page:
    """One dead letter, with its message."""
    name = check_name(asked.places["group"], Code.BAD_GROUP_NAME)
    found = letter_at(console, name, asked)
    body = found["message"].get("body")
    place = standing.AskOfMessage(topic=found["topic"], queue=found["queue"], offset=found["offset"], history=True)
    stands = console.ask(console.number_of(found["broker"]), standing.OF_MESSAGE(place))
    values = {
        "name": name,
        "letter": found,
        "message": found["message"],
        "attempts": last_attempts(stands, name),
        "body": None if body is None else shown(body, asked.text("as")),
    }
    return Page("dead_letter.html", f"Dead letter of {name}", values, ROOM)


def letter_at(console: Console, group: str, asked: Asked) -> dict[str, Any]:
    """Return the dead letter at a place, with its ``message``. Raises Misuse(NOT_FOUND)."""
    topic, queue, offset = asked.text("topic") or "", asked.number("queue", 0), asked.number("offset", 0)
    number = console.number_of(asked.text("broker"))
    items: list[actions.Item] = [{"topic": topic, "queue": queue, "offset": offset}]
    found = console.ask(number, actions.LIST({"group": group, "items": items}))["dead_letters"]
    if not found:
        hint = "it was retried or discarded meanwhile; look at the group's dead letters"
        raise error(Code.NOT_FOUND, f"{group} has no dead letter at {topic}/{queue}/{offset} now", hint)
    message = messages.at(console, number, topic, queue, offset)
    return {**found[0], "broker": console.addresses[number], "message": message or {}}
