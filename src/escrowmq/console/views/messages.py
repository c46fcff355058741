"""One stored message: its position, its properties, its body."""

from __future__ import annotations

from typing import Any

from escrowmq.console.asked import Download, Page, Params
from escrowmq.console.bodies import shown
from escrowmq.console.core import Console
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.wire import ReadRequest, read_schema

ROOM = "/topics"


def message(console: Console, params: Params) -> Page:
    """Show the message at a position of a topic."""
    found = _requested_message(console, params)
    body = found["body"]
    values = {"message": found, "body": None if body is None else shown(body, params.text("as"))}
    return Page("message.html", f"Message {found['topic']}/{found['queue']}/{found['offset']}", values, ROOM)


def body(console: Console, params: Params) -> Download:
    """Return a message's body as a file."""
    found = _requested_message(console, params)
    if found["body"] is None:
        raise error(Code.DAMAGED, f"the body is damaged: {found['damaged']}")
    return Download(f"{found['topic']}-{found['queue']}-{found['offset']}.bin", found["body"])


def at(console: Console, number: int, topic: str, queue: int, offset: int) -> dict[str, Any] | None:
    """Return the stored message at a position of a broker, with its properties as a mapping; None if there is none."""
    request: ReadRequest = {
        "source": topic,
        "queue": queue,
        "start": offset,
        "end": offset + 1,
        "columns": read_schema(topic, damaged=True).names,
    }
    rows = console.rows(number, request)
    if not rows:
        return None
    found = rows[0]
    identity = found.get("message_id")
    return {
        **found,
        "topic": topic,
        "queue": queue,
        "offset": offset,
        "broker": console.addresses[number],
        "message_id": identity.hex() if isinstance(identity, bytes) else identity,
        "properties": dict(found.get("properties") or []),
    }


def _requested_message(console: Console, params: Params) -> dict[str, Any]:
    topic = check_name(params.places["topic"], Code.BAD_TOPIC_NAME)
    queue, offset = params.number("queue", 0), params.number("offset", 0)
    number = console.number_of(params.text("broker"))
    found = at(console, number, topic, queue, offset)
    if found is None:
        text = f"there is no message at {topic}/{queue}/{offset}"
        raise error(Code.NOT_FOUND, text, "retention removed it, or the queue has not come so far")
    return found
