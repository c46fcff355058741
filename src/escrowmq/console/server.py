"""The console as a process, or as a thread beside a broker: listen, announce, serve until stopped."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from escrowmq.client.bus import Bus
from escrowmq.connecting import connect
from escrowmq.console.app import build
from escrowmq.console.core import Console
from escrowmq.console.guard import Guard
from escrowmq.console.limits import ConsoleSettings
from escrowmq.console.tokens import Tokens
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.server import Announce, Served, answer_until, listen_on, on_thread, stop_by_signal
from escrowmq.platform.listening import shown_address
from escrowmq.wire import Link

DEFAULT_LISTEN = "127.0.0.1:7790"


def serve(
    url: str,
    *,
    listen: str = DEFAULT_LISTEN,
    databases: Sequence[str] = (),
    plans: Path | None = None,
    settings: ConsoleSettings | None = None,
    insecure: bool = False,
    announce: Announce = lambda _: None,
) -> None:
    """Serve the console over the broker(s) at ``url`` until SIGTERM or SIGINT; call it from the main thread.
    ``databases`` are URLs of databases with EscrowMQ's tables, ``plans`` the folder of plans (None: the user's).
    ``announce`` is called once, when pages are served, with {"console": URL, "url": ``url``}. Raises Misuse(BAD_URL),
    Denied for an address that is not loopback without ``insecure``."""
    host, listening = listen_on(listen, insecure)

    async def main(console: Console) -> None:
        stopping = asyncio.Event()
        stop_by_signal(stopping)
        await _serve(console, listening, host, lambda at: announce({**at, "url": url}), stopping)

    with listening, ExitStack() as opened:
        engines = _open_engines(databases)
        console = Console(connect(url), url, settings or ConsoleSettings(), engines, plans)
        opened.callback(console.close)
        asyncio.run(main(console))


@contextmanager
def beside(
    connect: Callable[[str | None], Sequence[Link]],
    *,
    listen: str,
    url: str = "",
    databases: Sequence[str] = (),
    plans: Path | None = None,
    settings: ConsoleSettings | None = None,
    insecure: bool = False,
    tls: ssl.SSLContext | None = None,
    rights: bool = False,
) -> Iterator[dict[str, Any]]:
    """Serve the console over a broker of this process, on a separate thread, while the context lasts. Yields
    {"console": URL}. ``connect``, ``tls`` and ``rights``: see :func:`escrowmq.gateway.server.beside`."""
    host, listening = listen_on(listen, insecure, tls=tls is not None, rights=rights)
    console = Console(Bus(connect(None)), url, settings or ConsoleSettings(), _open_engines(databases), plans)

    async def main(announce: Announce, stopping: asyncio.Event) -> None:
        await _serve(console, listening, host, announce, stopping, tls)

    with listening, ExitStack() as opened:
        opened.callback(console.close)
        yield opened.enter_context(on_thread(main, "console"))


async def _serve(
    console: Console,
    listening: socket.socket,
    host: str,
    announce: Announce,
    stopping: asyncio.Event,
    tls: ssl.SSLContext | None = None,
) -> None:
    console.start()
    tokens = Tokens(listening.getsockname()[1])
    hosts = {host.lower(), *(name.lower() for name in console.settings.hosts)}
    app = Guard(build(console), console.settings, tokens, hosts)
    limits = GatewaySettings(max_connections=256)
    served = Served(app, limits, listening, host, tls)
    await answer_until(served, lambda at: announce({"console": at["http"]}), stopping)


def _open_engines(databases: Sequence[str]) -> Mapping[str, Any]:
    """Open an engine for each database, by its URL without the password."""
    if not databases:
        return {}
    from escrowmq.outbox.engines import open_engine

    engines = [open_engine(database) for database in databases]
    return {shown_address(engine.url.render_as_string(hide_password=False)): engine for engine in engines}
