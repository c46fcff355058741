"""Consumer groups: their progress in each queue, and the leases of their members."""

from __future__ import annotations

import itertools
from typing import Any

from escrowmq.client.altering import limit_words
from escrowmq.console.asked import Page, Params
from escrowmq.console.core import Console
from escrowmq.console.views import narrowing
from escrowmq.console.views.overview import Figure, figure
from escrowmq.errors import Code, error
from escrowmq.message.names import check_name
from escrowmq.overview.standing import sum_readers

ROOM = "/groups"
COUNTS = ("waiting", "leased", "retrying", "dead", "acked", "filtered", "discarded", "expired", "skipped")
MOST_QUEUES = 500
"""Maximum number of queues on a group's page."""


def groups(console: Console, params: Params) -> Page:
    """List all consumer groups."""
    listed = console.admin.groups()
    found: dict[str, dict[str, Any]] = {}
    for row in listed:
        entry = found.setdefault(
            row["name"], {"name": row["name"], "topics": set(), "paused": False, **dict.fromkeys(COUNTS, 0)}
        )
        entry["topics"] |= set(row["topics"])
        entry["paused"] = entry["paused"] or bool(row.get("paused"))
        for queue in row["queues"]:
            for count in COUNTS:
                entry[count] += int(queue.get(count, 0))  # type: ignore[call-overload]
    last = console.sampler.last()
    known = last.groups.by_name if last is not None and last.groups is not None else {}
    for name, entry in found.items():
        entry["lag"] = entry["waiting"] + entry["leased"] + entry["retrying"]
        entry["lag_seconds"] = known[name].lag_seconds if name in known else None
    rows = sorted(found.values(), key=lambda entry: str(entry["name"]))
    narrowed = narrowing.by_name(rows, params)
    values = {"narrowed": narrowed, "missing": listed.missing, "readers": [*sum_readers(console.admin.standing())]}
    return Page("groups.html", "Consumer groups", values, ROOM, live=10)


def _figures(console: Console, name: str) -> list[Figure]:
    """Return the charts of a group: its lag in messages and seconds, and how fast it acknowledges."""
    seen = {one.groups.at: one.groups for one in console.sampler.samples() if one.groups is not None}
    found = [(at, one.by_name[name]) for at, one in seen.items() if name in one.by_name]
    if not found:
        return []
    times, numbers = [at for at, _ in found], [one for _, one in found]
    rates: list[float | None] = [None]
    for (before, first), (at, second) in itertools.pairwise(found):
        grown = None if first.acked is None or second.acked is None else second.acked - first.acked
        rates.append(None if grown is None or grown < 0 else grown / max(at - before, 1e-3))
    return [
        figure(times, [one.lag for one in numbers], "lag", "messages"),
        figure(times, [one.lag_seconds for one in numbers], "lag: age of the oldest", "time"),
        figure(times, rates, "acknowledged", "a second"),
    ]


def group(console: Console, params: Params) -> Page:
    """Show one consumer group at all brokers."""
    name = check_name(params.places["group"], Code.BAD_GROUP_NAME)
    admin = console.admin
    listed = admin.groups()
    found: list[Any] = [row for row in listed if row["name"] == name]
    if not found:
        raise error(Code.UNKNOWN_GROUP, f"there is no consumer group {name}")
    queues = [{**queue, "broker": row["broker"]} for row in found for queue in row["queues"]]
    values = {
        "name": name,
        "group": found[0],
        "found": found,
        "queues": queues[:MOST_QUEUES],
        "left_out": max(len(queues) - MOST_QUEUES, 0),
        "totals": {count: sum(int(queue[count]) for queue in queues) for count in COUNTS},
        "paused": any(row.get("paused") or row.get("paused_topics") for row in found),
        "figures": _figures(console, name),
        "limits": [{"broker": row["broker"], "words": limit_words(row)} for row in found],
        "members": admin.members(name),
        "missing": listed.missing,
    }
    return Page("group.html", f"Consumer group {name}", values, ROOM, live=10)
