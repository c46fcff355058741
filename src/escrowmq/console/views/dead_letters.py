"""Dead letters: by group, in pages, and one in full."""

from __future__ import annotations

from typing import Any

from escrowmq.client.admin.dead_letters import last_attempts
from escrowmq.console.asked import Page, Params
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
"""Number of causes shown per group."""


def groups(console: Console, params: Params) -> Page:
    """Show the consumer groups with dead letters, and the causes."""
    page = console.page(actions.SUMMARY({"causes": CAUSES, "samples": 1}), "groups", params.text("after"))
    values = {"page_rows": page, "first": params.text("after") is None}
    return Page("dead_groups.html", "Dead letters", values, ROOM, live=10)


def letters(console: Console, params: Params) -> Page:
    """Show the dead letters of a group: causes, and pages of single ones."""
    name = check_name(params.places["group"], Code.BAD_GROUP_NAME)
    cause, topic, older = params.text("cause"), params.text("topic"), params.text("older")
    request = actions.List(group=name)
    chosen: dict[str, Any] = {"group": name}
    if cause is not None:
        request["cause"] = chosen["cause"] = cause
    if topic is not None:
        request["topic"] = chosen["topic"] = topic
    if older is not None:
        request["older_than"] = chosen["older_than"] = seconds(older, "older")
    page = console.page(actions.LIST(request), "dead_letters", params.text("after"))
    summed = console.page(actions.SUMMARY({"group": name, "causes": CAUSES, "samples": 1}), "groups", None)
    values = {
        "name": name,
        "page_rows": page,
        "first": params.text("after") is None,
        "summed": summed.rows,
        "total": sum(row["dead_letters"] for row in summed.rows),
        "filters": {"cause": cause or "", "topic": topic or "", "older": older or ""},
        "chosen": chosen,
        "retried": params.text("retried"),
        "why": params.text("why") or "",
    }
    return Page("dead_letters.html", f"Dead letters of {name}", values, ROOM)


def letter(console: Console, params: Params) -> Page:
    """Show one dead letter with its message."""
    name = check_name(params.places["group"], Code.BAD_GROUP_NAME)
    found = letter_at(console, name, params)
    body = found["message"].get("body")
    place = standing.AskOfMessage(topic=found["topic"], queue=found["queue"], offset=found["offset"], history=True)
    stands = console.ask(console.number_of(found["broker"]), standing.OF_MESSAGE(place))
    values = {
        "name": name,
        "letter": found,
        "message": found["message"],
        "attempts": last_attempts(stands, name),
        "body": None if body is None else shown(body, params.text("as")),
    }
    return Page("dead_letter.html", f"Dead letter of {name}", values, ROOM)


def letter_at(console: Console, group: str, params: Params) -> dict[str, Any]:
    """Return the dead letter at a position, with its ``message``. Raises Misuse(NOT_FOUND)."""
    topic, queue, offset = params.text("topic") or "", params.number("queue", 0), params.number("offset", 0)
    number = console.number_of(params.text("broker"))
    items: list[actions.Item] = [{"topic": topic, "queue": queue, "offset": offset}]
    found = console.ask(number, actions.LIST({"group": group, "items": items}))["dead_letters"]
    if not found:
        hint = "it was retried or discarded meanwhile; look at the group's dead letters"
        raise error(Code.NOT_FOUND, f"{group} has no dead letter at {topic}/{queue}/{offset} now", hint)
    message = messages.at(console, number, topic, queue, offset)
    return {**found[0], "broker": console.addresses[number], "message": message or {}}
