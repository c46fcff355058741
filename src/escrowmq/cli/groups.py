"""``escrowmq groups``: list consumer and producer groups, show their progress, list and fence members.

``group_acts.py`` has the operations on a whole group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from escrowmq.cli import group_acts
from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, admin_at, broker_time, seconds
from escrowmq.cli.printing import Columns, age, duration, moment, print_facts, print_json, print_rows
from escrowmq.errors import Code, error
from escrowmq.model import FOREVER
from escrowmq.settings import nearest

SHOWN_LEASES = 3
"""Leases per member that a table shows."""

_PRODUCERS: Columns = {
    "producer group": "group",
    "kind": lambda group: group.get("kind", "transactional" if group["transactional"] else "plain") or "",
    "check-back": lambda group: _check_back(group),
    ">to ask": "members",
    ">open": "open",
    ">parked": "parked",
}

app = typer.Typer(no_args_is_help=True, help="Consumer groups and producer groups.")


@app.command("list")
def list_(
    producers: Annotated[bool, typer.Option("--producers", help="Producer groups instead of consumer groups.")] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List consumer groups with their backlog, or producer groups with their undecided transactions."""
    with admin_at(url) as admin:
        found = admin.producers() if producers else admin.groups()
        now_us = broker_time(admin) if producers and not json else 0
    if producers:
        oldest: Columns = {">oldest open": lambda group: age(group.get("oldest_us"), now_us)}
        return print_rows(found, json, _PRODUCERS | oldest, "no producer groups yet")
    columns: Columns = {
        "group": "name",
        "topics": lambda group: ", ".join(group["topics"]),
        "tags": _tags,
        "order": _order,
        ">waiting": lambda group: _sum(group, "waiting"),
        ">leased": lambda group: _sum(group, "leased"),
        ">retrying": lambda group: _sum(group, "retrying"),
        ">dead letters": "dead_letters",
        "paused": _describe_pause,
    }
    print_rows(found, json, columns, "no consumer groups yet")


@app.command("alter")
def alter(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    topics: Annotated[
        list[str] | None, typer.Option("--topic", "-t", help="All topics that it is to have. Repeatable.")
    ] = None,
    tags: Annotated[str | None, typer.Option("--tags", help="Such as 'a || b'; '*' is all.")] = None,
    ordered: Annotated[bool | None, typer.Option("--ordered/--any-order", help="Messages of a key one by one.")] = None,
    in_doubt: Annotated[
        str | None, typer.Option("--in-doubt", help="What becomes of a silent member's messages: redeliver or hold.")
    ] = None,
    start: Annotated[str | None, typer.Option("--start", help="In topics new to it: earliest or latest.")] = None,
    redelivery: Annotated[
        str | None,
        typer.Option(
            "--redelivery",
            help="3x5min, rocketmq, forever, a list such as 10s,1min, or broker: as the settings say.",
        ),
    ] = None,
    attempts: Annotated[
        int | None, typer.Option("--max-attempts", min=1, help="Deliveries until a message is a dead letter.")
    ] = None,
    backoff: Annotated[str | None, typer.Option("--retry-backoff", help="Before the second delivery; doubles.")] = None,
    longest: Annotated[str | None, typer.Option("--retry-backoff-max", help="Before a delivery, at most.")] = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Change a consumer group's subscription or redelivery. Omitted options remain unchanged.

    Running consumers follow the new subscription; new ones must specify it.
    """
    changes: dict[str, Any] = {
        "topics": topics or None,
        "tags": tags,
        "ordered": ordered,
        "in_doubt": in_doubt,
        "start": start,
        "redelivery": redelivery,
        "max_attempts": attempts,
        "retry_backoff": seconds(backoff, "--retry-backoff"),
        "retry_backoff_max": seconds(longest, "--retry-backoff-max"),
    }
    with admin_at(url) as admin:
        found = admin.alter_group(name, why=why, **changes)
    if json:
        return print_json(found)
    for group in found:
        print_facts({"group": name, **_subscription(group), "broker": group["broker"]})


@app.command("alter-producers")
def alter_producers(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The producer group; it is made if it does not exist.")],
    kind: Annotated[
        str | None, typer.Option("--kind", help="Which messages it serves: plain, transactional or mixed.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--transaction-timeout", help="Before the first question, such as 60s.")
    ] = None,
    interval: Annotated[
        str | None, typer.Option("--check-interval", help="Between two questions, such as 30s.")
    ] = None,
    count: Annotated[int | None, typer.Option("--check-max", min=1, help="Questions about one transaction.")] = None,
    exhausted: Annotated[
        str | None, typer.Option("--checks-exhausted", help="What follows the last: park or rollback.")
    ] = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", help="An option by its name: back to the broker's setting. Repeatable."),
    ] = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Change a producer group's kind and check-back rules. Omitted options remain unchanged.

    --kind plain repairs a group under which messages were prepared by mistake.
    """
    rules: dict[str, Any] = {
        "kind": kind,
        "transaction_timeout": seconds(timeout, "--transaction-timeout"),
        "check_interval": seconds(interval, "--check-interval"),
        "check_max": count,
        "checks_exhausted": exhausted,
        "reset": [rule.replace("-", "_") for rule in reset or ()],
    }
    with admin_at(url, make=True) as admin:
        found = admin.alter_producers(name, why=why, **rules)
    if json:
        return print_json(found)
    for altered in found:
        has = {rule: value for rule, value in altered.items() if rule not in ("group", "broker")}
        words = ", ".join(f"{rule} {value}" for rule, value in has.items()) or "nothing"
        typer.echo(f"{altered['broker']}: producer group {name} has of its own: {words}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Show a consumer group: its subscription, and its offset in every queue."""
    with admin_at(url) as admin:
        everyone: Sequence[Mapping[str, Any]] = admin.groups()
    found = [group for group in everyone if group["name"] == name]
    if not found:
        hint = nearest(name, [group["name"] for group in everyone]) or None
        raise error(Code.UNKNOWN_GROUP, f"no consumer group {name!r}", hint)
    if json:
        return print_json(found)
    for group in found:
        facts = {"group": name, **_subscription(group), "dead letters": group["dead_letters"]}
        if words := _describe_pause(group):
            since = moment(group.get("paused_us"))
            facts["handed out"] = f"nothing{'' if words == 'yes' else ' of ' + words}: paused since {since}"
        print_facts({**facts, "broker": group["broker"]})
        columns: Columns = {
            "queue": lambda queue: f"{queue['topic']}/{queue['queue']}",
            ">stored": lambda queue: _offsets(queue["head"], queue["end"]),
            ">settled before": "floor",
            ">waiting": "waiting",
            **{f">{state}": state for state in _count_names(group)},
        }
        print_rows(group["queues"], json, columns, "no queues yet")


@app.command("members")
def members(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")],
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """List the members of a consumer group with their messages, in doubt or not."""
    with admin_at(url) as admin:
        found = admin.members(name)
    columns: Columns = {
        "member": lambda member: member["instance"] or f"#{member['member']:x}",
        "state": lambda member: "unnamed" if member["instance"] is None else "fenced" if member["fenced"] else "joined",
        ">messages": "messages",
        ">in doubt": "in_doubt",
        "holds": lambda member: _format_leases(member["held"]),
        "broker": "broker",
    }
    print_rows(found, json, columns, "nobody holds anything")


@app.command("fence")
def fence(
    name: Annotated[str, typer.Argument(metavar="GROUP", help='The consumer group, made with in_doubt="hold".')],
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="The silent member.")],
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Return a silent member's messages to its group, and fence its process.

    Its messages are redelivered to others, flagged as repeats; its late acknowledgements are rejected.
    """
    with admin_at(url) as admin:
        messages = admin.fence(name, instance, why=why)
    if json:
        return print_json({"group": name, "instance": instance, "messages": messages})
    typer.echo(f"{instance} is fenced; {messages} messages went back to {name}")


for _act in (group_acts.reset, group_acts.pause, group_acts.resume, group_acts.delete):
    app.command(_act.__name__)(_act)


def _check_back(group: Mapping[str, Any]) -> str:
    """Describe the group's own check-back rules: first check, interval, count and outcome; empty if there are none."""
    if not set(group.get("own", ())) - {"kind"}:
        return ""
    first, between = duration(group["transaction_timeout"]), duration(group["check_interval"])
    return f"{first}, {group['check_max']} x {between}, {group['checks_exhausted']}"


def _format_leases(leases: Sequence[Mapping[str, Any]]) -> str:
    """Format the offset ranges of the first few leases."""
    shown = [f"{x['topic']}/{x['queue']} {x['first']}-{x['last']}" for x in leases[:SHOWN_LEASES]]
    return ", ".join(shown) + (f" and {len(leases) - SHOWN_LEASES} more" if len(leases) > SHOWN_LEASES else "")


_FIXED = {"queue_id", "topic", "queue", "head", "end", "floor", "next", "waiting"}


def _count_names(group: Mapping[str, Any]) -> list[str]:
    """Return the names of further counts per queue that the broker sends, if any queue has them."""
    names = [name for name in (group["queues"][0] if group["queues"] else {}) if name not in _FIXED]
    return [name for name in names if any(queue.get(name) for queue in group["queues"])]


def _offsets(head: int, end: int) -> str:
    return f"{head:,}-{end - 1:,}" if end > head else "nothing"


def _subscription(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's subscription as facts."""
    from escrowmq.client.consuming.options import start_words

    return {
        "topics": ", ".join(group["topics"]),
        "tags": _tags(group),
        "order": _order(group),
        "in doubt": "held" if group["in_doubt"] == "hold" else "redelivered",
        "redelivery": _redelivery(group),
        "began at": start_words(group.get("start", "")),  # version 0.1.0 does not send this
    }


def _redelivery(group: Mapping[str, Any]) -> str:
    if "max_attempts" not in group:  # version 0.1.0
        return ""
    times = ", ".join(duration(delay) for delay in group["retry_delays"])
    if not times:
        times = f"{duration(group['retry_backoff'])}, doubled, at most {duration(group['retry_backoff_max'])}"
    attempts = group["max_attempts"]
    return f"after {times}; " + ("until a consumer succeeds" if attempts >= FOREVER else f"{attempts} deliveries")


def _describe_pause(group: Mapping[str, Any]) -> str:
    """Return "yes" if a group is paused, else its paused topics; empty if none (or the broker is older)."""
    return "yes" if group.get("paused") else ", ".join(group.get("paused_topics", ()))


def _tags(group: Mapping[str, Any]) -> str:
    return ", ".join(group["tags"]) or "all"


def _order(group: Mapping[str, Any]) -> str:
    return "ordered" if group["ordered"] else "any"


def _sum(group: Mapping[str, Any], name: str) -> int:
    return sum(queue.get(name, 0) for queue in group["queues"])
