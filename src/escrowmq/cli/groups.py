"""``escrowmq groups``: who consumes, how far they are, and who produces."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, admin_at
from escrowmq.cli.printing import duration, print_facts, print_json, print_table
from escrowmq.errors import Code, error
from escrowmq.settings import nearest

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
        everyone = admin.groups()
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


def _print_producers(groups: list[dict[str, Any]]) -> None:
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


def _states(group: dict[str, Any]) -> list[str]:
    """The broker's names of what else a message can be for a group."""
    return [name for name in (group["queues"][0] if group["queues"] else {}) if name not in _FIXED]


def _sum(group: dict[str, Any], name: str) -> int:
    return sum(queue.get(name, 0) for queue in group["queues"])


def _age(time_us: int | None) -> str | None:
    return duration(max(time.time() - time_us / 1e6, 0)) if time_us else None
