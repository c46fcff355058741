"""``escrowmq dev``: a broker, the HTTP gateway and the console in one process, with nothing to configure."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, ServerLogOptions
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.cli.serve import SWITCH_SECONDS, ReadyJson, combine
from escrowmq.errors import Code, error
from escrowmq.platform.descriptors import raise_descriptor_limit
from escrowmq.platform.listening import is_loopback, parse_address
from escrowmq.settings import BrokerSettings

Address = Annotated[str, Option(metavar="HOST:PORT", help="Where it listens; port 0: any free one.")]


def dev(
    logging: ServerLogOptions,
    folder: Path = Option("escrow-data", "--folder", "-d", help="The data folder; made if it is not there."),
    listen: Address = "127.0.0.1:7700",
    http: Address = "127.0.0.1:7780",
    console: Address = "127.0.0.1:7790",
    json: ReadyJson = False,
) -> None:
    """Serve a broker, HTTP and the console for development, until Ctrl-C. Other machines cannot reach them.

    With --json one line is printed on standard output once all of them answer, as by `escrowmq serve --json`.
    """
    from escrowmq.broker.serving.serve import serve
    from escrowmq.console import beside as run_console
    from escrowmq.gateway import beside as run_gateway

    logging.start()
    for option, address in (("--listen", listen), ("--http", http), ("--console", console)):
        if not is_loopback(parse_address(address)[0]):
            hint = "escrowmq serve with TLS and access rights serves other machines (docs/security.md)"
            raise error(Code.BAD_ARGUMENT, f"{option} {address}: escrowmq dev is for this machine alone", hint)
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_descriptor_limit()
    services = combine(
        [
            lambda connect: run_gateway(connect, listen=http),
            lambda connect: run_console(connect, listen=console),
        ]
    )
    settings = BrokerSettings.load(None, {})
    if serve(folder, listen=listen, settings=settings, announce=print_json_line if json else _show, beside=services):
        raise typer.Exit(Exit.CORRUPT)


def _show(ready: dict[str, Any]) -> None:
    """Print the addresses, and commands to try."""
    url = "" if ready["url"] == DEFAULT_URL else f" --url {ready['url']}"
    lines = (
        f"EscrowMQ {version('escrowmq')}, data in {ready['folder']}; Ctrl-C stops it.",
        "",
        f"  Open     {ready['console']}",
        f"  HTTP     {ready['http']}/docs",
        f"  Clients  {ready['url']}",
        "",
        "Try in another terminal:",
        "",
        f'  escrowmq prepare orders "one book" --id o-1{url}',
        f"  escrowmq tail orders{url}",
        f"  escrowmq commit o-1{url}",
    )
    notice("\n".join(lines))
