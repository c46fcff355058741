"""``escrowmq groups`` and ``escrowmq writers``: consumer groups, producer groups, and writers of numbered batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from escrowmq.cli.options import App, Brokers, Operation, broker_time, parse_seconds, time_option
from escrowmq.cli.printing import Columns, age, ago, duration, moment, notice, print_facts, print_json, print_rows
from escrowmq.errors import Code, error
from escrowmq.model import FOREVER
from escrowmq.settings import nearest

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin

Name = Annotated[str, Argument(metavar="GROUP", help="The consumer group.")]
SHOWN_LEASES = 3
"""Leases per member that a table shows."""

_PRODUCERS: Columns = {
    "producer group": "group",
    "kind": lambda group: group.get("kind", "transactional" if group["transactional"] else "plain") or "",
    "check-back": lambda group: _check_back(group),
    ">connected": "members",
    ">open": "open",
    ">parked": "parked",
}

app = App("Consumer groups and producer groups.")


@app.command("list")
def list_(
    brokers: Brokers, producers: bool = Option(False, "--producers", help="Producer groups instead of consumer groups.")
) -> None:
    """List consumer groups with their backlog, or producer groups with their undecided transactions."""
    with brokers.admin() as admin:
        found = admin.producers() if producers else admin.groups()
        now_us = broker_time(admin) if producers and not brokers.json else 0
    if producers:
        oldest: Columns = {">oldest open": lambda group: age(group.get("oldest_us"), now_us)}
        return print_rows(found, brokers.json, _PRODUCERS | oldest, "no producer groups yet")
    columns: Columns = {
        "group": "name",
        "topics": lambda group: ", ".join(group["topics"]),
        "tags": lambda group: ", ".join(group["tags"]) or "all",
        "order": lambda group: "ordered" if group["ordered"] else "any",
        ">waiting": lambda group: _sum(group, "waiting"),
        ">leased": lambda group: _sum(group, "leased"),
        ">retrying": lambda group: _sum(group, "retrying"),
        ">dead letters": "dead_letters",
        "paused": _describe_pause,
    }
    print_rows(found, brokers.json, columns, "no consumer groups yet")


@dataclass
class _Changes:
    """New settings of a consumer group; the names are those of ``GroupChanges``."""

    topics: list[str] | None = Option(None, "--topic", "-t", help="All topics of the new subscription. Repeatable.")
    tags: str | None = Option(None, help="Such as 'a || b'; '*' is all.")
    ordered: bool | None = Option(None, "--ordered/--any-order", help="Messages of a key one by one.")
    in_doubt: str | None = Option(None, help="What happens to a silent member's messages: redeliver or hold.")
    start: str | None = Option(None, help="In topics new to it: earliest or latest.")
    redelivery: str | None = Option(None, help="3x5min, rocketmq, forever, a list such as 10s,1min, or broker.")
    max_attempts: int | None = Option(None, min=1, help="Deliveries until a message is a dead letter.")
    retry_backoff: float | None = time_option(None, "--retry-backoff", "Before the second delivery; doubles.")
    retry_backoff_max: float | None = time_option(None, "--retry-backoff-max", "Before a delivery, at most.")


@app.command("alter")
def alter(operation: Operation, changes: _Changes, name: Name) -> None:
    """Change a consumer group's subscription or redelivery. Omitted options remain unchanged.

    Running consumers follow the new subscription; new ones must specify it.
    """
    given: dict[str, Any] = vars(changes) | {"topics": changes.topics or None}
    with operation.admin() as admin:
        found = admin.alter_group(name, why=operation.why, **given)
    if operation.json:
        return print_json(found)
    for group in found:
        print_facts({"group": name, **_subscription(group), "broker": group["broker"]})


@dataclass
class _Rules:
    """New settings of a producer group; the names are those of ``ProducersChanges``."""

    kind: str | None = Option(None, help="Which messages it serves: plain, transactional or mixed.")
    transaction_timeout: float | None = time_option(None, "--transaction-timeout", "Before the first check.")
    check_interval: float | None = time_option(None, "--check-interval", "Between two checks, such as 30s.")
    check_max: int | None = Option(None, min=1, help="Checks of one transaction.")
    checks_exhausted: str | None = Option(None, help="What follows the last: park or rollback.")
    reset: list[str] | None = Option(None, help="An option by its name: back to the broker's setting. Repeatable.")


@app.command("alter-producers")
def alter_producers(
    operation: Operation,
    rules: _Rules,
    name: str = Argument(..., metavar="GROUP", help="The producer group; it is made if it does not exist."),
) -> None:
    """Change a producer group's kind and check-back rules. Omitted options remain unchanged.

    --kind plain repairs a group under which messages were prepared by mistake.
    """
    given: dict[str, Any] = vars(rules) | {"reset": [rule.replace("-", "_") for rule in rules.reset or ()]}
    with operation.admin(make=True) as admin:
        found = admin.alter_producers(name, why=operation.why, **given)
    if operation.json:
        return print_json(found)
    for altered in found:
        own = [f"{rule} {value}" for rule, value in altered.items() if rule not in ("group", "broker")]
        typer.echo(f"{altered['broker']}: producer group {name} has its own rules: {', '.join(own) or 'none'}")


@app.command("show")
def show(brokers: Brokers, name: Name) -> None:
    """Show a consumer group: its subscription and limits, and its offset in every queue."""
    from escrowmq.client.altering import limit_words

    with brokers.admin() as admin:
        groups: Sequence[Mapping[str, Any]] = admin.groups()
    found = [group for group in groups if group["name"] == name]
    if not found:
        hint = nearest(name, [group["name"] for group in groups]) or None
        raise error(Code.UNKNOWN_GROUP, f"no consumer group {name!r}", hint)
    if brokers.json:
        return print_json(found)
    for group in found:
        facts = {"group": name, **_subscription(group), "dead letters": group["dead_letters"]}
        if words := _describe_pause(group):
            since = moment(group.get("paused_us"))
            facts["delivery"] = f"paused{'' if words == 'yes' else ' for ' + words} since {since}"
        if words := limit_words(group):
            facts["limits"] = words
        print_facts({**facts, "broker": group["broker"]})
        columns: Columns = {
            "queue": lambda queue: f"{queue['topic']}/{queue['queue']}",
            ">stored": lambda queue: _offsets(queue["head"], queue["end"]),
            ">settled before": "floor",
            ">waiting": "waiting",
            **{f">{state}": state for state in _count_names(group)},
        }
        print_rows(group["queues"], False, columns, "no queues yet")


@app.command("members")
def members(brokers: Brokers, name: Name) -> None:
    """List the connected consumers of a group, and its members with their messages, in doubt or not."""
    with brokers.admin() as admin:
        found, now_us = admin.members(name), 0 if brokers.json else broker_time(admin)
    columns: Columns = {
        "member": lambda member: member["instance"] or f"#{member['member']:x}",
        "state": lambda member: "unnamed" if member["instance"] is None else "fenced" if member["fenced"] else "joined",
        ">messages": "messages",
        ">in doubt": "in_doubt",
        "holds": lambda member: _format_leases(member["held"]),
        "connected from": lambda member: member.get("address", "-") or "the broker's process",
        "heard": lambda member: ago(member.get("heard_us"), now_us),
        "broker": "broker",
    }
    print_rows(found, brokers.json, columns, "no consumer is connected, and none holds anything")


@app.command("fence")
def fence(
    operation: Operation,
    name: str = Argument(..., metavar="GROUP", help='The consumer group, made with in_doubt="hold".'),
    instance: str = Argument(..., metavar="INSTANCE", help="The silent member."),
) -> None:
    """Return a silent member's messages to its group, and fence its process.

    Its messages are redelivered to others, flagged as repeats; its late acknowledgements are rejected.
    """
    with operation.admin() as admin:
        messages = admin.fence(name, instance, why=operation.why)
    if operation.json:
        return print_json({"group": name, "instance": instance, "messages": messages})
    typer.echo(f"{instance} is fenced; {messages} messages went back to {name}")


@dataclass
class _Start:
    """Where a group continues, and in which queues."""

    to: str | None = Option(None, help="earliest, end, a time (2026-01-31T09:30), or how long ago (2h).")
    offset: int | None = Option(None, min=0, help="An offset of the --queue.")
    by: int | None = Option(None, help="This many messages in each queue: --by=-100 is backward, --by 100 is forward.")
    topic: str | None = Option(None, "--topic", "-t", help="In this topic only.")
    queue: int | None = Option(None, "--queue", "-q", min=0, help="In this queue of the topic only.")

    def given(self, admin: Admin) -> dict[str, Any]:
        """Return the arguments of ``reset_group``."""
        to = None if self.to is None else _parse_start(self.to, admin)
        return {"to": to, "offset": self.offset, "shift": self.by, "topic": self.topic, "queue": self.queue}


@app.command("reset")
def reset(
    operation: Operation,
    start: _Start,
    name: Name,
    force: bool = Option(False, "--force", help="Also messages that members hold, in a group made with in_doubt=hold."),
    dry_run: bool = Option(False, "--dry-run", help="Show the result, and change nothing."),
) -> None:
    """Set the offsets of a consumer group: it receives earlier messages again, or skips messages.

    Running consumers continue from there. Their leased messages of these queues are redelivered; acknowledgements of
    those are rejected.
    """
    if (start.to is not None) + (start.offset is not None) + (start.by is not None) != 1:
        raise error(Code.BAD_ARGUMENT, "where to? give one of --to, --offset and --by")
    with operation.admin() as admin:
        moves = admin.reset_group(name, **start.given(admin), force=force, dry_run=dry_run, why=operation.why)
    columns: Columns = {
        "queue": lambda move: f"{move['topic']}/{move['queue']}",
        ">was at": "was",
        ">continues at": "now",
        ">again": "again",
        ">skipped": "skipped",
        ">held": "leased",
        ">dead letters again": "dead",
        "broker": "broker",
    }
    print_rows(moves, operation.json, columns, "no queues yet")
    if not operation.json:
        notice(f"{name} {'would continue' if dry_run else 'continues'}: {_total(moves)}")


def _total(moves: Sequence[Mapping[str, Any]]) -> str:
    again, passed = (sum(move[name] for move in moves) for name in ("again", "skipped"))
    dead = sum(move["dead"] for move in moves)
    return f"{again + dead:,} messages again, {passed:,} skipped"


def _parse_start(text: str, admin: Admin) -> str | datetime:
    """Parse the start position for a group. Raises Misuse(BAD_ARGUMENT)."""
    if text in ("earliest", "latest", "end"):
        return "latest" if text == "end" else text
    if text[:1].isdigit() and text[-1:].isalpha() and "T" not in text:
        past = parse_seconds(text, "--to")
        return datetime.fromtimestamp(broker_time(admin) / 1e6 - past, UTC)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        hint = "earliest, end, a time such as 2026-01-31T09:30, or how long ago, such as 2h"
        raise error(Code.BAD_ARGUMENT, f"--to: {text!r} is not a start position", hint) from None
    return found.astimezone() if found.tzinfo is None else found


Topics = Annotated[list[str] | None, Option("--topic", "-t", help="This topic only; all unless given. Repeatable.")]


@app.command("pause")
def pause(operation: Operation, name: Name, topics: Topics = None) -> None:
    """Pause delivery to a consumer group.

    Consumers may still acknowledge leased messages; a pause counts as no attempt.
    """
    with operation.admin() as admin:
        _show(name, admin.pause_group(name, topics, why=operation.why), operation.json)


@app.command("resume")
def resume(operation: Operation, name: Name, topics: Topics = None) -> None:
    """Resume delivery to a consumer group."""
    with operation.admin() as admin:
        _show(name, admin.resume_group(name, topics, why=operation.why), operation.json)


def _show(name: str, found: Sequence[Mapping[str, Any]], json: bool) -> None:
    if json:
        return print_json(found)
    for one in found:
        held = f"; its consumers hold {one['leased']:,} messages" if one["leased"] else ""
        typer.echo(f"{one['broker']}: {name} {paused_words(one['all'], one['topics'])}{held}")


def paused_words(everything: bool, topics: Sequence[str]) -> str:
    """Describe which part of a group is paused."""
    if everything:
        return "is paused"
    return f"is paused for {', '.join(topics)}" if topics else "receives messages"


@dataclass
class _Limits:
    """Limits of a consumer group; the names are those of ``Admin.limit_group``."""

    rate: float | None = Option(None, "--rate", help="Messages per second.")
    in_flight: int | None = Option(None, "--in-flight", min=1, help="Messages that its consumers hold.")
    in_flight_per_key: int | None = Option(None, "--per-key", min=1, help="Messages of one key that they hold.")


@app.command("limit")
def limit(
    operation: Operation, limits: _Limits, name: Name, none: bool = Option(False, "--none", help="Remove all limits.")
) -> None:
    """Limit what a consumer group receives. The given limits replace all earlier ones.

    Consumers beyond a limit wait. Of several brokers each enforces an equal share.
    """
    from escrowmq.client.altering import limit_words

    given = vars(limits)
    if none == any(value is not None for value in given.values()):
        raise error(Code.BAD_ARGUMENT, "which limits? give --rate, --in-flight, --per-key, or only --none")
    with operation.admin() as admin:
        found: Sequence[Mapping[str, Any]] = admin.limit_group(name, **given, why=operation.why)
    if operation.json:
        return print_json(found)
    for one in found:
        words = limit_words({"limits": one}) or "no limits"
        typer.echo(f"{one['broker']}: {name} has {words}; its consumers hold {one['leased']:,} messages")


@app.command("delete")
def delete(
    operation: Operation,
    name: Name,
    force: bool = Option(False, "--force", help="Also while consumers wait for messages or hold some."),
) -> None:
    """Delete a consumer group with its offsets, retries and dead letters.

    The messages remain. A later group of this name is new and starts where its first consumer specifies.
    """
    with operation.admin() as admin:
        found = admin.delete_group(name, force=force, why=operation.why)
    if operation.json:
        return print_json(found)
    for one in found:
        counts = (
            f"with {one['dead_letters']:,} dead letters, {one['retrying']:,} retries and {one['leased']:,} held "
            "messages"
        )
        typer.echo(f"{one['broker']}: {name} is deleted {counts}")


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
        "tags": ", ".join(group["tags"]) or "all",
        "order": "ordered" if group["ordered"] else "any",
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


def _sum(group: Mapping[str, Any], name: str) -> int:
    return sum(queue.get(name, 0) for queue in group["queues"])


writers = App("Writers of numbered batches: Spark queries, and batch writes under a write_id.")


@writers.command("list")
def list_writers(brokers: Brokers) -> None:
    """List writers with their last batch, longest idle first.

    A writer whose producer group is idle for the broker's producer_expiration is forgotten automatically.
    """
    with brokers.admin() as admin:
        found = sorted(admin.writers(), key=lambda writer: int(writer["used_us"]))
        now_us = 0 if brokers.json else broker_time(admin)
    columns: Columns = {
        "writer": "writer",
        "producer group": "group",
        ">last batch": "batch",
        ">decided": lambda writer: ago(writer["decided_us"], now_us),
        ">used": lambda writer: ago(writer["used_us"], now_us),
        ">undecided": lambda writer: writer["open"] + writer["parked"],
        ">connected": "members",
    }
    print_rows(found, brokers.json, columns, "no writers yet")


@writers.command("forget")
def forget(
    operation: Operation,
    writer: str = Argument(..., metavar="WRITER", help="As listed, or the query's id, or the write_id it was made of."),
) -> None:
    """Delete a writer and its producer group. It fails while the writer has undecided transactions.

    If it writes again, its next batch is stored even if it repeats the last one.
    """
    with operation.admin() as admin:
        found = admin.forget_writer(writer, why=operation.why)
    if operation.json:
        return print_json(found)
    for one in found:
        typer.echo(f"{one['broker']}: forgot producer group {one['group']} and its {one['sessions']} sessions")
