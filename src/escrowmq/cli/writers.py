"""``escrowmq writers``: list or forget writers of numbered batches (Spark queries, named batch writes)."""

from __future__ import annotations

from typing import Annotated

import typer

from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, admin_at, broker_time
from escrowmq.cli.printing import Columns, ago, print_json, print_rows

app = typer.Typer(
    no_args_is_help=True, help="Writers of numbered batches: Spark queries, and batch writes under a write_id."
)


@app.command("list")
def list_(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """List writers with their last batch, longest idle first.

    A writer whose producer group is idle for the broker's producer_expiration is forgotten automatically.
    """
    with admin_at(url) as admin:
        found = sorted(admin.writers(), key=lambda writer: int(writer["used_us"]))
        now_us = 0 if json else broker_time(admin)
    columns: Columns = {
        "writer": "writer",
        "producer group": "group",
        ">last batch": "batch",
        ">decided": lambda writer: ago(writer["decided_us"], now_us),
        ">used": lambda writer: ago(writer["used_us"], now_us),
        ">undecided": lambda writer: writer["open"] + writer["parked"],
        ">connected": "members",
    }
    print_rows(found, json, columns, "no writers yet")


@app.command("forget")
def forget(
    writer: Annotated[
        str, typer.Argument(metavar="WRITER", help="As listed, or the query's id, or the write_id it was made of.")
    ],
    why: Why = None,
    url: Url = DEFAULT_URL,
    json: Json = False,
) -> None:
    """Delete a writer and its producer group. It fails while the writer has undecided transactions.

    If it writes again, its next batch is stored even if it repeats the last one.
    """
    with admin_at(url) as admin:
        found = admin.forget_writer(writer, why=why)
    if json:
        return print_json(found)
    for one in found:
        typer.echo(f"{one['broker']}: forgot producer group {one['group']} and its {one['sessions']} sessions")
