"""``escrowmq audit``: compare both sides of a run, by id, with Spark."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json, Master
from escrowmq.cli.printing import console, notice, print_json


def audit(
    folder: Annotated[Path, typer.Argument(help="A run folder, as `escrowmq demo` leaves one.")],
    json: Json = False,
    page: Annotated[bool, typer.Option(help="Also draw report.html.")] = True,
    master: Master = None,
) -> None:
    """Compare orders, broker log and consumers' databases of a run by id and content; name every difference.

    Writes verdict.json and report.html into the folder. Exit code 1 when the sides do not agree.
    """
    from escrowmq.demo.screen import show_verdict
    from escrowmq.pipeline.audit import run

    with Console(stderr=True).status("audit") as status:
        audited = run if master is None else partial(run, master=master)
        verdict = audited(folder, progress=lambda text: status.update(f"audit: {text}"), page=page)
    if json:
        print_json(verdict.to_json())
    else:
        show_verdict(console(), verdict)
        notice(f"{folder / 'verdict.json'}" + (f"  {folder / 'report.html'}" if page else ""))
    if not verdict.agrees:
        raise typer.Exit(Exit.FINDING)
