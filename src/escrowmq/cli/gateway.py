"""``escrowmq gateway``: HTTP over a broker; and the options with which ``escrowmq serve`` runs one in its own process."""

from __future__ import annotations

import os
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from escrowmq.cli.options import DEFAULT_URL, Insecure, ReadyJson, Url
from escrowmq.cli.printing import notice, print_json_line
from escrowmq.errors import Code, error
from escrowmq.wire import Link

Ask = Annotated[
    list[str] | None,
    typer.Option("--ask", metavar="GROUP=URL", help="Where check-backs of a producer group go; may be given again."),
]


def gateway(
    url: Url = DEFAULT_URL,
    listen: Annotated[
        str, typer.Option("--listen", "-l", metavar="HOST:PORT", help="Where to listen; port 0: any free one.")
    ] = "127.0.0.1:7780",
    ask: Ask = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with tables \\[gateway] and \\[check_back.GROUP].")
    ] = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
) -> None:
    """Serve HTTP over a broker, for those who cannot hold a connection, until SIGTERM or Ctrl-C; both stop it cleanly.

    With --json one line is printed on standard output once requests are taken:
    {"http": "http://127.0.0.1:7780", "asks": ["shop"], "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.gateway import serve

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            notice(f"serving {ready['http']} for {ready['url']}; see {ready['http']}/docs; Ctrl-C stops it")

    serve(url, listen=listen, insecure=insecure, announce=announce, **_configured(config, ask))


def beside(listen: str, ask: list[str] | None, config: Path | None, insecure: bool) -> Any:
    """What ``escrowmq serve --http`` runs beside its broker: a function of a link. Raises Misuse for bad options."""
    from escrowmq.gateway import beside as run_beside

    given = _configured(config, ask)

    def run(link: Link) -> AbstractContextManager[dict[str, Any]]:
        return run_beside([link], listen=listen, insecure=insecure, **given)

    return run


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
