"""``escrowmq sweep``: settle orders that are over and give back stock without an order, over sharded databases, with Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json, Master, seconds
from escrowmq.cli.printing import notice, print_json, print_table
from escrowmq.errors import Code, error


def sweep(
    orders: Annotated[
        list[str],
        typer.Option("--orders", metavar="URL", help="A database of orders; once for every shard, in their order."),
    ],
    products: Annotated[str, typer.Option("--products", metavar="URL", help="The database of products and freezes.")],
    unpaid_after: Annotated[
        str, typer.Option("--unpaid-after", metavar="TIME", help="Unpaid orders are over so long after their pay_by.")
    ] = "0s",
    orphan_after: Annotated[
        str, typer.Option("--orphan-after", metavar="TIME", help="A freeze so old should have its order.")
    ] = "10min",
    only: Annotated[str | None, typer.Option("--only", help="One of the sweeps: orders, freezes.")] = None,
    tables: Annotated[
        Path | None, typer.Option("--tables", metavar="FILE", help="JSON: names of tables and columns that differ.")
    ] = None,
    shard_by: Annotated[
        str | None,
        typer.Option(
            "--shard-by",
            metavar="COLUMN",
            help="Of freezes: orders are in shard crc32(COLUMN) modulo shards. Without it all shards are asked.",
        ),
    ] = None,
    events: Annotated[
        str | None, typer.Option("--events", metavar="TOPIC", help="Tell of timed out orders by the outbox.")
    ] = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Time unpaid orders out, release the freezes of paid ones as sold, give back stock that was frozen without an order.

    To be run every some minutes; may be killed, and run twice at once. Exit code 1 if something could not be settled; the next run tries again.
    """
    from escrowmq.pipeline.session import local_session
    from escrowmq.pipeline.sweeps import Books, Databases, Swept, sweep_freezes, sweep_orders

    if only not in (None, "orders", "freezes"):
        raise error(Code.BAD_ARGUMENT, f"--only {only}", "orders or freezes")
    books = Books() if tables is None else Books.read(tables)
    books = replace(books, shard_by=shard_by or books.shard_by, events=events or books.events)
    databases = Databases(tuple(orders), products)
    unpaid, orphan = seconds(unpaid_after, "--unpaid-after") or 0.0, seconds(orphan_after, "--orphan-after") or 0.0
    books.check(databases.orders, databases.products)  # before Spark starts
    done: dict[str, Swept] = {}
    with local_session("escrowmq sweep", master=master, rows=1000) as spark:
        if only != "freezes":
            done["orders"] = sweep_orders(spark, databases, books=books, unpaid_seconds=unpaid)
        if only != "orders":
            done["freezes"] = sweep_freezes(spark, databases, books=books, orphan_seconds=orphan)
    if json:
        print_json({name: swept.to_json() for name, swept in done.items()})
    else:
        rows = [(name, act, count) for name, swept in done.items() for act, count in swept.acts.items()]
        print_table(("sweep", "what", ">count"), rows, "nothing to do")
        for swept in done.values():
            for trans_id, problem in swept.alerts:
                notice(f"{trans_id}: {problem}")
    if any(swept.failed for swept in done.values()):
        raise typer.Exit(Exit.FINDING)
