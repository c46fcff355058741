"""``escrowmq serve``: a broker on the network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.gateway import Ask, beside
from escrowmq.cli.options import Insecure, ReadyJson
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.errors import Code, error
from escrowmq.settings import BrokerSettings

SWITCH_SECONDS = 0.001
"""How long a thread of the broker may keep the interpreter from another that has a request or an answer in hand."""


def serve(
    folder: Annotated[Path, typer.Option("--folder", "-d", help="The data folder; made if it is not there.")] = Path(
        "escrow-data"
    ),
    listen: Annotated[
        str, typer.Option("--listen", "-l", metavar="HOST:PORT", help="Where to listen; port 0: any free one.")
    ] = "127.0.0.1:7700",
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Serve the HTTP gateway here too (see escrowmq gateway)."),
    ] = None,
    ask: Ask = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A TOML file with tables \\[broker], \\[gateway] and \\[check_back.GROUP]."),
    ] = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
    *,
    overrides: dict[str, Any],
) -> None:
    """Serve a data folder until SIGTERM or Ctrl-C; both stop it cleanly.

    With --json one line is printed on standard output once the broker answers:
    {"url": "escrow://127.0.0.1:7700", "metrics": null, "folder": "data", "shard": 1, "epoch": 1, "pid": 1},
    and "http" and "asks" with --http.
    Exit code 6 when a write or sync of the log failed.
    """
    from escrowmq.broker.serving.serve import serve as run

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            metrics_at = f", metrics at {ready['metrics']}" if ready["metrics"] else ""
            http_at = f", HTTP at {ready['http']}" if "http" in ready else ""
            notice(f"serving {ready['folder']} at {ready['url']}{metrics_at}{http_at}; Ctrl-C stops it")

    if ask and http is None:
        raise error(Code.BAD_ARGUMENT, "--ask is for the HTTP gateway", "add --http HOST:PORT")
    sys.setswitchinterval(SWITCH_SECONDS)
    status = run(
        folder,
        listen=listen,
        metrics=metrics,
        settings=BrokerSettings.load(config, overrides),
        insecure=insecure,
        announce=announce,
        beside=None if http is None else beside(http, ask, config, insecure),
    )
    if status:
        raise typer.Exit(Exit.CORRUPT)
