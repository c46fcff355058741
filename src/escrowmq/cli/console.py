"""``escrowmq console``: the web console over brokers and databases, for operators."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, LogJson, LogLevel, Url, start_log
from escrowmq.cli.plan import PlansFolder
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.cli.serve import Insecure, Listen, ReadyJson
from escrowmq.platform.descriptors import raise_descriptor_limit

Databases = Annotated[
    list[str] | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        envvar="ESCROWMQ_DATABASE_URL",
        help="A database with EscrowMQ's tables; may be given again. A password can stand in the environment variable "
        "instead, where ps does not show it.",
        show_default=False,
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host", metavar="NAME", help="A name under which browsers ask for it, besides localhost; may be given again."
    ),
]


def console(
    url: Url = DEFAULT_URL,
    database: Databases = None,
    listen: Listen = "127.0.0.1:7790",
    host: Hosts = None,
    plans: PlansFolder = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
) -> None:
    """Serve the web console until SIGTERM or Ctrl-C: pending work, its causes, and operations on it.

    With --json one line is printed on standard output once pages are served:
    {"console": "http://127.0.0.1:7790", "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.console import ConsoleSettings, serve

    start_log(log_level, log_json)

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            notice(f"the console of {ready['url']} is at {ready['console']}; Ctrl-C stops it")

    raise_descriptor_limit()
    serve(
        url,
        listen=listen,
        databases=database or (),
        plans=plans,
        settings=ConsoleSettings(hosts=tuple(host or ())),
        insecure=insecure,
        announce=announce,
    )
