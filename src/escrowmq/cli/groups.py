"""``escrowmq groups``: who consumes, how far they are, and who produces."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, admin_at
from escrowmq.cli.printing import duration, print_facts, print_json, print_table
from escrowmq.errors import Code, error
from escrowmq.settings import nearest

SHOWN_LEASES = 3
"""Leases of one member that a table shows."""

app = typer.Typer(no_args_is_help=True, help="Consumer groups and producer groups.")


@app.command("list")
def list_(
    producers: Annotated[bool, typer.Option("--producers", help="Producer groups instead of consumer groups.")] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List consumer groups with what waits for them, or producer groups with what they have undecided."""
    with admin_at(url) as admin:
        found: Sequence[Mapping[str, Any]] = admin.producers() if producers else admin.groups()
    if json:
        return print_json(found)
    if producers:
        return _print_producers(found)
    print_table(
        ("group", "topics", "tags", "order", ">waiting", ">leased", ">retrying", ">dead letters"),
        [
            (
                group["name"],
                ", ".join(group["topics"]),
                ", ".join(group["tags"]) or "all",
                "ordered" if group["ordered"] else "any",
                _sum(group, "waiting"),
                _sum(group, "leased"),
                _sum(group, "retrying"),
                group["dead_letters"],
            )
            for group in found
        ],
        "no consumer groups yet",
    )


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
        print_facts(
            {
                "group": name,
                "topics": ", ".join(group["topics"]),
                "tags": ", ".join(group["tags"]) or "all",
                "order": "ordered" if group["ordered"] else "any",
                "in doubt": "held" if group["in_doubt"] == "hold" else "redelivered",
                "dead letters": group["dead_letters"],
                "broker": group["broker"],
            }
        )
        columns = ("head", "floor", "next", "end", "waiting", *_states(group))
        print_table(
            ("topic", ">queue", *(f">{column}" for column in columns)),
            [(q["topic"], q["queue"], *(q[column] for column in columns)) for q in group["queues"]],
            "no queues yet",
        )


@app.command("members")
def members(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List who holds which messages of a consumer group; in doubt is what its consumer's old process may have done."""
    with admin_at(url) as admin:
        found = admin.members(name)
    if json:
        return print_json(found)
    print_table(
        ("member", "state", ">messages", ">in doubt", "holds", "broker"),
        [
            (
                member["instance"] or f"#{member['member']:x}",
                "unnamed" if member["instance"] is None else "fenced" if member["fenced"] else "joined",
                member["messages"],
                member["in_doubt"],
                _held(member["held"]),
                member["broker"],
            )
            for member in found
        ],
        "nobody holds anything",
    )


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
    """Where the first few leases stand."""
    shown = [f"{x['topic']}/{x['queue']} {x['first']}-{x['last']}" for x in leases[:SHOWN_LEASES]]
    return ", ".join(shown) + (f" and {len(leases) - SHOWN_LEASES} more" if len(leases) > SHOWN_LEASES else "")


def _print_producers(groups: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        ("producer group", "kind", ">to ask", ">open", ">parked", ">oldest open"),
        [
            (
                group["group"],
                "transactional" if group["transactional"] else "plain",
                group["members"],
                group["open"],
                group["parked"],
                _age(group.get("oldest_us")),
            )
            for group in groups
        ],
        "no producer groups yet",
    )


_FIXED = {"queue_id", "topic", "queue", "head", "end", "floor", "next", "waiting"}


def _states(group: Mapping[str, Any]) -> list[str]:
    """The broker's names of what else a message can be for a group."""
    return [name for name in (group["queues"][0] if group["queues"] else {}) if name not in _FIXED]


def _sum(group: Mapping[str, Any], name: str) -> int:
    return sum(queue.get(name, 0) for queue in group["queues"])


def _age(time_us: int | None) -> str | None:
    return duration(max(time.time() - time_us / 1e6, 0)) if time_us else None
