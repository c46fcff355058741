"""``escrowmq groups``: list consumer and producer groups, show their progress, list and fence members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, admin_at
from escrowmq.cli.printing import Columns, age, print_facts, print_json, print_rows
from escrowmq.errors import Code, error
from escrowmq.settings import nearest

SHOWN_LEASES = 3
"""Leases per member that a table shows."""

_PRODUCERS: Columns = {
    "producer group": "group",
    "kind": lambda group: "transactional" if group["transactional"] else "plain",
    ">to ask": "members",
    ">open": "open",
    ">parked": "parked",
    ">oldest open": lambda group: age(group.get("oldest_us")),
}

app = typer.Typer(no_args_is_help=True, help="Consumer groups and producer groups.")


@app.command("list")
def list_(
    producers: Annotated[bool, typer.Option("--producers", help="Producer groups instead of consumer groups.")] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List consumer groups with what waits for them, or producer groups with what they have undecided."""
    with admin_at(url) as admin:
        found = admin.producers() if producers else admin.groups()
    if producers:
        return print_rows(found, json, _PRODUCERS, "no producer groups yet")
    columns: Columns = {
        "group": "name",
        "topics": lambda group: ", ".join(group["topics"]),
        "tags": _tags,
        "order": _order,
        ">waiting": lambda group: _sum(group, "waiting"),
        ">leased": lambda group: _sum(group, "leased"),
        ">retrying": lambda group: _sum(group, "retrying"),
        ">dead letters": "dead_letters",
    }
    print_rows(found, json, columns, "no consumer groups yet")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show a consumer group: its subscription, and how far it is in every queue."""
    with admin_at(url) as admin:
        everyone: Sequence[Mapping[str, Any]] = admin.groups()
    found = [group for group in everyone if group["name"] == name]
    if not found:
        hint = nearest(name, [group["name"] for group in everyone]) or None
        raise error(Code.UNKNOWN_GROUP, f"no consumer group {name!r}", hint)
    if json:
        return print_json(found)
    for group in found:
        in_doubt = "held" if group["in_doubt"] == "hold" else "redelivered"
        facts = {"group": name, "topics": ", ".join(group["topics"]), "tags": _tags(group), "order": _order(group)}
        print_facts({**facts, "in doubt": in_doubt, "dead letters": group["dead_letters"], "broker": group["broker"]})
        counts = ("queue", "head", "floor", "next", "end", "waiting", *_states(group))
        columns: Columns = {"topic": "topic", **{f">{column}": column for column in counts}}
        print_rows(group["queues"], json, columns, "no queues yet")


@app.command("members")
def members(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List who holds which messages of a consumer group; in doubt is what its consumer's old process may have done."""
    with admin_at(url) as admin:
        found = admin.members(name)
    columns: Columns = {
        "member": lambda member: member["instance"] or f"#{member['member']:x}",
        "state": lambda member: "unnamed" if member["instance"] is None else "fenced" if member["fenced"] else "joined",
        ">messages": "messages",
        ">in doubt": "in_doubt",
        "holds": lambda member: _held(member["held"]),
        "broker": "broker",
    }
    print_rows(found, json, columns, "nobody holds anything")


@app.command("fence")
def fence(
    name: Annotated[str, typer.Argument(metavar="GROUP", help='The consumer group, made with in_doubt="hold".')],
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="The silent member.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Give what a silent member holds back to its group, and shut its process out.

    Its messages are delivered to others, flagged as repeats; its late acknowledgements are refused.
    """
    with admin_at(url) as admin:
        messages = admin.fence(name, instance)
    if json:
        return print_json({"group": name, "instance": instance, "messages": messages})
    typer.echo(f"{instance} is fenced; {messages} messages went back to {name}")


def _held(leases: Sequence[Mapping[str, Any]]) -> str:
    """The offsets of the first few leases."""
    shown = [f"{x['topic']}/{x['queue']} {x['first']}-{x['last']}" for x in leases[:SHOWN_LEASES]]
    return ", ".join(shown) + (f" and {len(leases) - SHOWN_LEASES} more" if len(leases) > SHOWN_LEASES else "")


_FIXED = {"queue_id", "topic", "queue", "head", "end", "floor", "next", "waiting"}


def _states(group: Mapping[str, Any]) -> list[str]:
    """The other counts per queue that the broker sends, by name."""
    return [name for name in (group["queues"][0] if group["queues"] else {}) if name not in _FIXED]


def _tags(group: Mapping[str, Any]) -> str:
    return ", ".join(group["tags"]) or "all"


def _order(group: Mapping[str, Any]) -> str:
    return "ordered" if group["ordered"] else "any"


def _sum(group: Mapping[str, Any], name: str) -> int:
    return sum(queue.get(name, 0) for queue in group["queues"])
