"""``escrowmq writers``: list or forget writers of numbered batches (Spark queries, named batch writes)."""

from __future__ import annotations

import typer
from typer import Argument

from escrowmq.cli.options import App, Brokers, Operation, broker_time
from escrowmq.cli.printing import Columns, ago, print_json, print_rows

app = App("Writers of numbered batches: Spark queries, and batch writes under a write_id.")


@app.command("list")
def list_(brokers: Brokers) -> None:
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


@app.command("forget")
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
