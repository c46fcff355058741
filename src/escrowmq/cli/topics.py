"""``escrowmq topics``: list, create, alter and delete topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from typer import Argument, Option

from escrowmq.cli.options import App, Brokers, Operation, size_option, time_option
from escrowmq.cli.printing import Columns, duration, notice, print_facts, print_json, print_rows, size
from escrowmq.errors import Code, EscrowError, error
from escrowmq.wire.actions.topics import Retention

app = App("Topics and their queues.")

Name = Annotated[str, Argument(help="The topic's name.")]


@app.command("list")
def list_(brokers: Brokers) -> None:
    """List topics with the offsets of each queue (first and next)."""
    with brokers.admin() as admin:
        topics = admin.topics()
    if brokers.json:
        return print_json(topics)
    columns: Columns = {
        "topic": lambda row: row[0]["name"],
        ">queue": lambda row: row[1]["queue"],
        ">first offset": lambda row: row[1]["head"],
        ">next offset": lambda row: row[1]["end"],
        ">messages": lambda row: row[1]["end"] - row[1]["head"],
        ">size": lambda row: size(row[1].get("bytes", 0)),
        "keeps": lambda row: _describe_retention(row[0]),
        "broker": lambda row: row[0]["broker"],
    }
    if len({topic["broker"] for topic in topics}) < 2:
        del columns["broker"]
    if not any(map(_describe_retention, topics)):
        del columns["keeps"]
    rows: list[Any] = [(topic, queue) for topic in topics for queue in topic["queues"]]
    print_rows(rows, False, columns, "no topics yet")


def _describe_retention(topic: Retention) -> str:
    """Describe a topic's own retention; empty if it has none."""
    age = duration(topic["retention"]) if "retention" in topic else ""
    bound = f"{size(topic['retention_size'])} a queue" if "retention_size" in topic else ""
    return ", ".join(filter(None, (age, bound)))


@app.command("create")
def create(
    brokers: Brokers,
    name: Name,
    queues: int | None = Option(None, min=1, help="How many queues; the broker's default if not given."),
    may_exist: bool = Option(False, "--may-exist", help="No error if it is there; add queues if it has fewer."),
) -> None:
    """Create a topic, or add queues to it with --may-exist."""
    with brokers.admin(make=True) as admin:
        made = admin.create_topic(name, queues, may_exist=may_exist)
    if brokers.json:
        print_json(made)
    else:
        notice(f"topic {name}: {made[0]['queues']} queues" + (f", at {len(made)} brokers" if len(made) > 1 else ""))


@app.command("alter")
def alter(
    operation: Operation,
    name: Name,
    retention: Any = time_option(
        None, "--retention", "How long messages stay, such as 7d; broker: as its setting says.", word="broker"
    ),
    retention_size: Any = size_option(
        None, "--retention-size", "What each queue keeps at most, such as 10GB; broker: any size.", word="broker"
    ),
    queues: int | None = Option(None, min=1, help="How many queues; never fewer than it has."),
) -> None:
    """Change a topic's retention or number of queues. Omitted options remain unchanged.

    Messages beyond the retention are deleted at once; groups that had not consumed them count them as expired. Adding
    queues changes the queue of a key's messages.
    """
    changes = {"queues": queues, "retention": retention, "retention_size": retention_size}
    with operation.admin() as admin, _expect_existing():
        found = admin.alter_topic(name, why=operation.why, **changes)
    if operation.json:
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
        raise error(problem.code, problem.message, "`escrowmq topics list` shows the existing topics") from None


@app.command("delete")
def delete(
    operation: Operation,
    name: Name,
    force: bool = Option(False, "--force", help="Roll back undecided transactions; remove it from its groups."),
    dry_run: bool = Option(False, "--dry-run", help="Delete nothing: show what would be deleted."),
) -> None:
    """Delete a topic and all its messages. This cannot be undone.

    Without --force it fails while half messages are undecided or a group consumes it. Afterwards only escrowmq topics
    create can create a topic of this name, which is a new one.
    """
    with operation.admin() as admin, _expect_existing():
        found = admin.delete_topic(name, force=force, check=dry_run, why=operation.why)
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
    print_rows(found, operation.json, columns, "no such topic")
