"""``escrowmq console``: the web console over brokers and databases, for operators."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from typer import Option

from escrowmq.cli.options import DEFAULT_URL, PASSWORD, ServerLogOptions, Url
from escrowmq.cli.plan import PlansFolder
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.cli.serve import Insecure, Listen, ReadyJson
from escrowmq.platform.descriptors import raise_descriptor_limit


@dataclass
class _Console:
    """The sources of the web console, and its addresses."""

    database: list[str] | None = Option(
        None,
        "--database-url",
        metavar="URL",
        envvar="ESCROWMQ_DATABASE_URL",
        help="A database with EscrowMQ's tables; may be given again." + PASSWORD,
    )
    host: list[str] | None = Option(
        None, metavar="NAME", help="A name that browsers use for it, besides localhost; may be given again."
    )
    plans: PlansFolder = None
    insecure: Insecure = False


def console(
    options: _Console,
    log: ServerLogOptions,
    url: Url = DEFAULT_URL,
    listen: Listen = "127.0.0.1:7790",
    json: ReadyJson = False,
) -> None:
    """Serve the web console until SIGTERM or Ctrl-C: pending work, its causes, and operations on it.

    With --json one line is printed on standard output once pages are served:
    {"console": "http://127.0.0.1:7790", "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.console import ConsoleSettings, serve

    log.start()

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            notice(f"the console of {ready['url']} is at {ready['console']}; Ctrl-C stops it")

    raise_descriptor_limit()
    serve(
        url,
        listen=listen,
        databases=options.database or (),
        plans=options.plans,
        settings=ConsoleSettings(hosts=tuple(options.host or ())),
        insecure=options.insecure,
        announce=announce,
    )
