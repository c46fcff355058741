"""The console as a process, or as a thread beside a broker: listen, announce, serve until stopped."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from escrowmq.client.bus import Bus
from escrowmq.connecting import links
from escrowmq.console.app import build
from escrowmq.console.core import Console
from escrowmq.console.guard import Guard
from escrowmq.console.limits import ConsoleSettings
from escrowmq.console.sessions import Make, Sessions
from escrowmq.console.tokens import Tokens
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.server import Announce, Served, answer_until, has_rights, listen_on, on_thread, stop_by_signal
from escrowmq.platform.listening import is_exposed, is_loopback, parse_address, shown_address
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
    tls: ssl.SSLContext | None = None,
    announce: Announce = lambda _: None,
) -> None:
    """Serve the console over the broker(s) at ``url`` until SIGTERM or SIGINT; call it from the main thread.
    ``databases`` are URLs of databases with EscrowMQ's tables, ``plans`` the folder of plans (None: the user's).
    ``tls``: the TLS settings of the console. ``announce`` is called once, when pages are served, with {"console": URL,
    "url": ``url``}. Raises Misuse(BAD_URL), and Denied for an address beyond loopback, unless there are TLS and a
    broker with access rights, or ``insecure`` is set."""
    settings = settings or ConsoleSettings()
    is_served = not url.startswith("file:")
    is_local = is_loopback(parse_address(listen)[0])
    rights = not is_local and not insecure and tls is not None and is_served and has_rights(url)
    host, listening = listen_on(listen, insecure, tls=tls is not None, rights=rights)
    needs_login = (rights or None) if is_served else False
    connect = partial(_connect_as, url) if is_served else lambda _: links(url, {})

    async def main(run: _Run) -> None:
        stopping = asyncio.Event()
        stop_by_signal(stopping)
        await run.until(lambda at: announce({**at, "url": url}), stopping)

    with listening, ExitStack() as opened:
        make = _opening(connect, url, settings, databases, plans, opened)
        sessions = Sessions(make, settings, needs_login=needs_login)
        opened.callback(sessions.close)
        exposed = is_exposed(host, tls=tls is not None, rights=rights)
        asyncio.run(main(_Run(sessions, settings, listening, host, tls, exposed)))


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
    {"console": URL}. ``connect``, ``tls`` and ``rights``: see :func:`escrowmq.gateway.server.beside`. With ``rights``
    each page needs a login."""
    host, listening = listen_on(listen, insecure, tls=tls is not None, rights=rights)
    settings = settings or ConsoleSettings()
    with listening, ExitStack() as opened:
        make = _opening(lambda token: connect(token if rights else None), url, settings, databases, plans, opened)
        sessions = Sessions(make, settings, needs_login=rights)
        opened.callback(sessions.close)
        exposed = is_exposed(host, tls=tls is not None, rights=rights)
        run = _Run(sessions, settings, listening, host, tls, exposed)
        yield opened.enter_context(on_thread(run.until, "console"))


def _connect_as(url: str, token: str) -> Sequence[Link]:
    return links(url, {"token": token})


@dataclass
class _Run:
    """How one console is served."""

    sessions: Sessions
    settings: ConsoleSettings
    listening: socket.socket
    host: str
    tls: ssl.SSLContext | None
    is_exposed: bool

    async def until(self, announce: Announce, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``."""
        self.sessions.start()
        tokens = Tokens(self.listening.getsockname()[1], secure=self.tls is not None)
        hosts = {self.host.lower(), *(name.lower() for name in self.settings.hosts)}
        app = Guard(build(self.sessions, self.settings, is_exposed=self.is_exposed), self.settings, tokens, hosts)
        served = Served(app, GatewaySettings(max_connections=256), self.listening, self.host, self.tls)
        watching = asyncio.create_task(self.sessions.watch())
        try:
            await answer_until(served, lambda at: announce({"console": at["http"]}), stopping)
        finally:
            watching.cancel()


def _opening(
    connect: Callable[[str], Sequence[Link]],
    url: str,
    settings: ConsoleSettings,
    databases: Sequence[str],
    plans: Path | None,
    opened: ExitStack,
) -> Make:
    """Return a function that makes the console of a token; all of them share the databases."""
    engines = _open_engines(databases)
    for engine in engines.values():
        opened.callback(engine.dispose)
    return lambda token: Console(Bus(connect(token)), url, settings, engines, plans, is_open=not token)


def _open_engines(databases: Sequence[str]) -> Mapping[str, Any]:
    """Open an engine for each database, by its URL without the password."""
    if not databases:
        return {}
    from escrowmq.outbox.engines import open_engine

    engines = [open_engine(database) for database in databases]
    return {shown_address(engine.url.render_as_string(hide_password=False)): engine for engine in engines}
