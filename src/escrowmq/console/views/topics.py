"""Topics: stored messages of each, and its newest ones."""

from __future__ import annotations

from typing import Any

from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.console.views import narrowing
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.wire import ReadRequest, read_schema

ROOM = "/topics"
NEWEST = 25
"""Number of messages on a topic's page."""
_COLUMNS = ("offset", "key", "tag", "stored_us")
BODIES_BYTES = 8 << 20
"""Bytes read for previews of bodies; later messages have no preview."""


def topics(console: Console, params: Params) -> Page:
    """List all topics."""
    listed = console.admin.topics()
    found: dict[str, dict[str, Any]] = {}
    for row in listed:
        entry = found.setdefault(row["name"], {"name": row["name"], "queues": 0, "stored": 0, "ever": 0})
        entry["queues"] += len(row["queues"])
        entry["stored"] += sum(queue["end"] - queue["head"] for queue in row["queues"])
        entry["ever"] += sum(queue["end"] for queue in row["queues"])
    narrowed = narrowing.by_name(sorted(found.values(), key=lambda entry: str(entry["name"])), params)
    return Page("topics.html", "Topics", {"narrowed": narrowed, "missing": listed.missing}, ROOM)


def topic(console: Console, params: Params) -> Page:
    """Show one topic: its queues, and the messages of one of them."""
    name = check_name(params.places["topic"], Code.BAD_TOPIC_NAME)
    queues = console.admin.offsets(name)
    if not queues:
        raise error(Code.UNKNOWN_TOPIC, f"there is no topic {name}")
    broker, number = params.text("broker"), params.number("queue", 0)
    named = [q for q in queues if q["queue"] == number and broker in (None, q["broker"])]
    fullest = max(queues, key=lambda q: q["end"] - q["head"])
    chosen = named[0] if named and params.text("queue") else fullest
    end = min(params.number("before", chosen["end"]), chosen["end"])
    start = max(end - NEWEST, chosen["head"])
    rows = newest(console, name, chosen["broker"], chosen["queue"], start, end) if end > start else []
    values = {
        "name": name,
        "queues": queues,
        "missing": queues.missing,
        "chosen": chosen,
        "rows": rows,
        "before": start if start > chosen["head"] else None,
        "first": params.text("before") is None,
    }
    return Page("topic.html", f"Topic {name}", values, ROOM)


def newest(console: Console, name: str, broker: str, queue: int, start: int, end: int) -> list[dict[str, Any]]:
    """Return messages of one queue, newest first."""
    number = console.number_of(broker)
    request: ReadRequest = {"source": name, "queue": queue, "start": start, "end": end}
    damaged = read_schema(name, damaged=True).names[-1]
    rows = console.rows(number, {**request, "columns": [*_COLUMNS, damaged]})
    bodies: dict[int, bytes] = {}
    read = 0
    for batch in console.bus.router.links[number].read({**request, "columns": ["offset", "body", damaged]}):
        bodies |= {row["offset"]: row["body"] for row in batch.to_pylist()}
        read += batch.nbytes
        if read > BODIES_BYTES:
            break
    return [{**row, "body": bodies.get(row["offset"], b"")} for row in reversed(rows)]
