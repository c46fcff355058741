"""``escrowmq topics``: list, create, alter and delete topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, admin_at, broker_or, seconds, size
from escrowmq.cli.printing import Columns, duration, notice, print_facts, print_json, print_rows, print_table
from escrowmq.cli.printing import size as size_text
from escrowmq.errors import Code, EscrowError, error
from escrowmq.wire.actions.topics import Retention

app = typer.Typer(no_args_is_help=True, help="Topics and their queues.")


@app.command("list")
def list_(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """List topics with the offsets of each queue (first and next)."""
    with admin_at(url) as admin:
        topics = admin.topics()
    if json:
        return print_json(topics)
    columns = ["topic", ">queue", ">first offset", ">next offset", ">messages", ">size", "keeps", "broker"]
    rows = [
        [
            topic["name"],
            queue["queue"],
            queue["head"],
            queue["end"],
            queue["end"] - queue["head"],
            size_text(queue.get("bytes", 0)),
            _describe_retention(topic),
            topic["broker"],
        ]
        for topic in topics
        for queue in topic["queues"]
    ]
    hidden = set()
    if len({topic["broker"] for topic in topics}) < 2:
        hidden.add("broker")
    if not any(map(_describe_retention, topics)):
        hidden.add("keeps")
    shown = [at for at, name in enumerate(columns) if name not in hidden]
    print_table([columns[at] for at in shown], [[row[at] for at in shown] for row in rows], "no topics yet")


def _describe_retention(topic: Retention) -> str:
    """Describe a topic's own retention; empty if it has none."""
    words = []
    if "retention" in topic:
        words.append(duration(topic["retention"]))
    if "retention_size" in topic:
        words.append(f"{size_text(topic['retention_size'])} a queue")
    return ", ".join(words)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="The topic's name.")],
    queues: Annotated[
        int | None, typer.Option(min=1, help="How many queues; the broker's default if not said.")
    ] = None,
    may_exist: Annotated[
        bool, typer.Option("--may-exist", help="No error if it is there; add queues if it has fewer.")
    ] = False,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Create a topic, or add queues to it with --may-exist."""
    with admin_at(url, make=True) as admin:
        made = admin.create_topic(name, queues, may_exist=may_exist)
    if json:
        print_json(made)
    else:
        notice(f"topic {name}: {made[0]['queues']} queues" + (f", at {len(made)} brokers" if len(made) > 1 else ""))


@app.command("alter")
def alter(
    name: Annotated[str, typer.Argument(help="The topic's name.")],
    retention: Annotated[
        str | None,
        typer.Option("--retention", help="How long messages stay, such as 7d; broker: as its setting says."),
    ] = None,
    retention_size: Annotated[
        str | None,
        typer.Option("--retention-size", help="What each queue keeps at most, such as 10GB; broker: any size."),
    ] = None,
    queues: Annotated[int | None, typer.Option(min=1, help="How many queues; never fewer than it has.")] = None,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Change a topic's retention or number of queues. Omitted options remain unchanged.

    Messages beyond the retention are deleted at once; groups that had not consumed them count them as expired. Adding
    queues changes the queue of a key's messages.
    """
    with admin_at(url) as admin, _expect_existing():
        found = admin.alter_topic(
            name,
            why=why,
            queues=queues,
            retention=broker_or(seconds, retention, "--retention"),
            retention_size=broker_or(size, retention_size, "--retention-size"),
        )
    if json:
        return print_json(found)
    for topic in found:
        keeps = _describe_retention(topic) or "as the broker's settings say"
        print_facts({"topic": name, "queues": topic["queues"], "keeps": keeps, "broker": topic["broker"]})


@contextmanager
def _expect_existing() -> Iterator[None]:
    """Replace the hint of UNKNOWN_TOPIC, since creating the topic is not the remedy here."""
    try:
        yield
    except EscrowError as problem:
        if problem.code is not Code.UNKNOWN_TOPIC:
            raise
        raise error(problem.code, problem.message, "`escrowmq topics list` shows those that there are") from None


@app.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="The topic's name.")],
    force: Annotated[
        bool, typer.Option("--force", help="Roll back what is undecided, and take it from the groups that consume it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing: say what would go.")] = False,
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Delete a topic and all its messages. This cannot be undone.

    Without --force it fails while half messages are undecided or a group consumes it. Afterwards only escrowmq topics
    create can create a topic of this name, which is a new one.
    """
    with admin_at(url) as admin, _expect_existing():
        found = admin.delete_topic(name, force=force, check=dry_run, why=why)
    columns: Columns = {
        "topic": "name",
        "deleted": lambda topic: "yes" if topic["deleted"] else "no, it would be",
        ">queues": "queues",
        ">messages": "messages",
        ">delayed": "delayed",
        ">rolled back": "rolled_back",
        ">dead letters": "dead_letters",
        "groups": lambda topic: ", ".join(topic["groups"]),
    }
    print_rows(found, json, columns, "no such topic")
