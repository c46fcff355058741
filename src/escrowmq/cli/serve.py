"""``escrowmq serve`` and ``escrowmq gateway``: a broker on the network, and HTTP over brokers, in its process or another."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, LogJson, LogLevel, Url, start_log
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.errors import Code, error
from escrowmq.platform.arena import use_own_pool
from escrowmq.platform.descriptors import raise_descriptor_limit
from escrowmq.settings import BrokerSettings

if TYPE_CHECKING:
    from escrowmq.broker.serving.serve import Beside
    from escrowmq.wire import Link

SWITCH_SECONDS = 0.001
"""How long a thread of the broker may keep the interpreter from another that has a request or an answer in hand."""

Listen = Annotated[
    str, typer.Option("--listen", "-l", metavar="HOST:PORT", help="Where to listen; port 0: any free one.")
]
Ask = Annotated[
    list[str] | None,
    typer.Option("--ask", metavar="GROUP=URL", help="Where check-backs of a producer group go; may be given again."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without TLS and credentials.")]
ReadyJson = Annotated[bool, typer.Option("--json", help="When ready, one JSON line with the addresses.")]


def serve(
    folder: Annotated[Path, typer.Option("--folder", "-d", help="The data folder; made if it is not there.")] = Path(
        "escrow-data"
    ),
    listen: Listen = "127.0.0.1:7700",
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
    ] = None,
    lean: Annotated[
        bool, typer.Option("--lean/--no-lean", help="Take small requests on a plain socket, too (docs/lean.md).")
    ] = True,
    lean_port: Annotated[
        int | None,
        typer.Option(
            "--lean-port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Where: 0: any free port. Unless given, 100 above the port of --listen.",
        ),
    ] = None,
    lean_socket: Annotated[
        Path | None, typer.Option("--lean-socket", metavar="PATH", help="And on a Unix socket, for this user alone.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Serve the HTTP gateway here too (see escrowmq gateway)."),
    ] = None,
    ask: Ask = None,
    console: Annotated[
        str | None,
        typer.Option("--console", metavar="HOST:PORT", help="Serve the console here too (see escrowmq console)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A TOML file with tables \\[broker], \\[gateway] and \\[check_back.GROUP]."),
    ] = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
    *,
    overrides: dict[str, Any],
) -> None:
    """Serve a data folder until SIGTERM or Ctrl-C; both stop it cleanly.

    With --json one line is printed on standard output once the broker answers:
    {"url": "escrow://127.0.0.1:7700", "metrics": null, "lean": {"port": 7800, "socket": null}, "folder": "data", "shard": 1,
    "epoch": 1, "pid": 1},
    and "http" and "asks" with --http, "console" with --console.
    Exit code 6 when a write or sync of the log failed.
    """
    from escrowmq.broker.serving.serve import serve as run

    start_log(log_level, log_json)

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            metrics_at = f", metrics at {ready['metrics']}" if ready["metrics"] else ""
            http_at = f", HTTP at {ready['http']}" if "http" in ready else ""
            http_at += f", the console at {ready['console']}" if "console" in ready else ""
            lean_at = f", small requests at port {ready['lean']['port']}" if ready["lean"] else ""
            notice(f"serving {ready['folder']} at {ready['url']}{lean_at}{metrics_at}{http_at}; Ctrl-C stops it")

    if ask and http is None:
        raise error(Code.BAD_ARGUMENT, "--ask is for the HTTP gateway", "add --http HOST:PORT")
    beside: list[Beside] = []
    if http is not None:
        from escrowmq.gateway import beside as run_gateway

        configured = _configured(config, ask)
        beside.append(lambda link: run_gateway([link], listen=http, insecure=insecure, **configured))
    if console is not None:
        from escrowmq.console import beside as run_console

        beside.append(lambda link: run_console([link], listen=console, insecure=insecure))
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_descriptor_limit()
    use_own_pool()
    status = run(
        folder,
        listen=listen,
        metrics=metrics,
        lean=lean,
        lean_port=lean_port,
        lean_socket=lean_socket,
        settings=BrokerSettings.load(config, overrides),
        insecure=insecure,
        announce=announce,
        beside=_all_of(beside) if beside else None,
    )
    if status:
        raise typer.Exit(Exit.CORRUPT)


def _all_of(beside: list[Beside]) -> Beside:
    """Several things that run beside a broker, as one; what each announces is announced together."""

    @contextmanager
    def run(link: Link) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            facts: dict[str, Any] = {}
            for one in beside:
                facts |= stack.enter_context(one(link))
            yield facts

    return run


def gateway(
    url: Url = DEFAULT_URL,
    listen: Listen = "127.0.0.1:7780",
    ask: Ask = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with tables \\[gateway] and \\[check_back.GROUP].")
    ] = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
) -> None:
    """Serve HTTP over a broker, for those who cannot hold a connection, until SIGTERM or Ctrl-C; both stop it cleanly.

    With --json one line is printed on standard output once requests are taken:
    {"http": "http://127.0.0.1:7780", "asks": ["shop"], "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.gateway import serve as run

    start_log(log_level, log_json)

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            notice(f"serving {ready['http']} for {ready['url']}; see {ready['http']}/docs; Ctrl-C stops it")

    raise_descriptor_limit()
    run(url, listen=listen, insecure=insecure, announce=announce, **_configured(config, ask))


def _configured(config: Path | None, ask: list[str] | None) -> dict[str, Any]:
    """Addresses and limits from the file's tables and the flags."""
    from escrowmq.gateway import GatewaySettings, read_addresses

    tables: dict[str, Any] = {}
    if config is not None:
        try:
            tables = tomllib.loads(config.read_text())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise error(Code.BAD_SETTING, f"cannot read {config}: {problem}") from problem
    return {
        "addresses": read_addresses(ask or (), tables.get("check_back")),
        "settings": GatewaySettings.of(tables.get("gateway", {})),
    }
