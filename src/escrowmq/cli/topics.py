"""``escrowmq topics``: list and create."""

from __future__ import annotations

from typing import Annotated

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, admin_at
from escrowmq.cli.printing import notice, print_json, print_table

app = typer.Typer(no_args_is_help=True, help="Topics and their queues.")


@app.command("list")
def list_(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """List topics with what each queue holds (first and next offset)."""
    with admin_at(url) as admin:
        topics = admin.topics()
    if json:
        return print_json(topics)
    columns = ("topic", ">queue", ">first offset", ">next offset", ">messages", "broker")
    rows = [
        (topic["name"], queue["queue"], queue["head"], queue["end"], queue["end"] - queue["head"], topic["broker"])
        for topic in topics
        for queue in topic["queues"]
    ]
    shown = len(columns) if len({topic["broker"] for topic in topics}) > 1 else -1
    print_table(columns[:shown], [row[:shown] for row in rows], "no topics yet")


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
    """Create a topic, or give it more queues with --may-exist."""
    with admin_at(url, make=True) as admin:
        made = admin.create_topic(name, queues, may_exist=may_exist)
    if json:
        print_json(made)
    else:
        notice(f"topic {name}: {made[0]['queues']} queues" + (f", at {len(made)} brokers" if len(made) > 1 else ""))
