"""``escrowmq demo``: a shop under fire, and the audit's verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from escrowmq.cli.failures import Exit


def demo(
    orders: Annotated[
        Path | None, typer.Option(help="Real orders: a .parquet or .csv file of invoice lines; else made-up ones.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the run here; else in a new folder demo-run.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many orders to make up.")] = 2000,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many orders.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes up the same orders.")] = 1,
    shop_kills: Annotated[int, typer.Option(min=0, help="Kill the shop between its commit and the COMMIT.")] = 4,
    broker_kills: Annotated[int, typer.Option(min=0, help="Kill the broker.")] = 2,
    service_kills: Annotated[int, typer.Option(min=0, help="Kill each consumer between its commit and its ack.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Orders placed at the same time.")] = 24,
    audit: Annotated[bool, typer.Option(help="Compare all sides with Spark at the end.")] = True,
) -> None:
    """Run a shop, a cart service and a points service on a broker, kill them all, and audit the result.

    Exit code 1 when the audit finds anything lost, repeated, altered, leaked or undecided.
    """
    from escrowmq.demo.director import run
    from escrowmq.demo.options import DemoOptions

    verdict = run(
        DemoOptions(
            folder=folder,
            orders=orders,
            count=count,
            limit=limit,
            seed=seed,
            shop_kills=shop_kills,
            broker_kills=broker_kills,
            service_kills=service_kills,
            threads=threads,
            audit=audit,
        )
    )
    if verdict is not None and not verdict.settled:
        raise typer.Exit(Exit.FINDING)
