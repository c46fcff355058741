"""``escrowmq report``: a page with pictures of what a broker or a data folder holds, drawn by Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from escrowmq.cli.options import DEFAULT_URL, Json, Master, Url
from escrowmq.cli.printing import notice, print_json


def report(
    url: Url = DEFAULT_URL,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for report.html and report.json.")] = Path(),
    json: Json = False,
    master: Master = None,
) -> None:
    """Volumes, decision latency, check-backs, what waits and trends, as report.html and report.json.

    A data folder (--url file:FOLDER) is only read, and may be in use.
    """
    from escrowmq.pipeline.report import report as measured
    from escrowmq.pipeline.report import write_report

    with Console(stderr=True).status("report") as status:
        found = measured(url, master=master, progress=lambda text: status.update(f"report: {text}"))
        write_report(out, found)
    if json:
        print_json(found.to_json())
    else:
        notice(f"{out / 'report.html'}  {out / 'report.json'}")
