"""The gateway as a process, or as a thread beside a broker: listen, announce, serve until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import uvicorn

from escrowmq.client.aio import AsyncBus
from escrowmq.connecting import aconnect, links
from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.gateway.addresses import Address
from escrowmq.gateway.admission import Admission
from escrowmq.gateway.app import build
from escrowmq.gateway.callers import Callers, Connect
from escrowmq.gateway.connections import BoundedProtocol
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.platform.disk import SHORTAGE
from escrowmq.platform.listening import check_address, is_loopback, parse_address, shown
from escrowmq.wire import Link, ask
from escrowmq.wire.actions.rights import WHOAMI
from escrowmq.wire.credential import Credential

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5
"""Time (s) for requests in flight to finish when the gateway stops."""
START_SECONDS = 30.0
MAX_HEADER_BYTES = 64 << 10
BACKLOG = 1024
"""Backlog of the listening socket."""
ACCEPTED_AT_ONCE = 32
"""Number of connections accepted at once before the connection limit is enforced. (asyncio accepts its whole backlog in
one go; without descriptors it fails and logs as many times.)"""

Announce = Callable[[dict[str, Any]], None]


def serve(
    url: str,
    *,
    listen: str = "127.0.0.1:7780",
    addresses: Mapping[str, Address] | None = None,
    settings: GatewaySettings | None = None,
    insecure: bool = False,
    tls: ssl.SSLContext | None = None,
    announce: Announce = lambda _: None,
) -> None:
    """Serve HTTP over the broker(s) at ``url`` until SIGTERM or SIGINT; call it from the main thread. ``announce`` is
    called once, when requests are accepted, with {"http": URL, "url": ``url``, "asks": [groups]}. ``tls``: the TLS
    settings of the HTTP server. Raises Misuse(BAD_URL), and Denied for an address beyond loopback, unless there are TLS
    and a broker with access rights, or ``insecure`` is set."""

    async def main() -> None:
        stopping = asyncio.Event()
        stop_by_signal(stopping)
        run = _Run(host, addresses, settings, insecure, tls, Credential.choose(None, None).is_set)
        await run.until(partial(aconnect_as, url), listening, lambda at: announce({**at, "url": url}), stopping)

    is_public = not insecure and not is_loopback(parse_address(listen)[0])
    rights = is_public and tls is not None and has_rights(url)
    host, listening = listen_on(listen, insecure, tls=tls is not None, rights=rights)
    with listening:
        asyncio.run(main())


async def aconnect_as(url: str, token: str | None) -> AsyncBus:
    """Connect with a token: "" stands for none, None for the credential of this process."""
    return await aconnect(url, **({} if token is None else {"token": token}))


def has_rights(url: str) -> bool:
    """Return whether the brokers at ``url`` have a rights file. Raises EscrowError if they do not respond."""
    for link in links(url, {"token": ""}):
        try:
            ask(link, WHOAMI({}), START_SECONDS)
            return False  # it answers anybody
        except EscrowError as problem:
            if problem.code is not Code.UNAUTHENTICATED:
                raise
        finally:
            link.close()
    return True


def stop_by_signal(stopping: asyncio.Event) -> None:
    """Set the event on SIGTERM and SIGINT, in the main thread's loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


@contextmanager
def beside(
    connect: Callable[[str | None], Sequence[Link]],
    *,
    listen: str,
    addresses: Mapping[str, Address] | None = None,
    settings: GatewaySettings | None = None,
    insecure: bool = False,
    tls: ssl.SSLContext | None = None,
    rights: bool = False,
) -> Iterator[dict[str, Any]]:
    """Serve HTTP over a broker of this process, on a separate thread, while the context lasts. Yields {"http", "asks"}.

    ``connect`` returns links for a token ("": for none; None: for the credential of this process); they are closed at
    the end. ``rights``: whether the broker has a rights file.
    """
    host, listening = listen_on(listen, insecure, tls=tls is not None, rights=rights)

    async def open_bus(token: str | None) -> AsyncBus:
        return AsyncBus(await asyncio.to_thread(connect, token))

    async def main(announce: Announce, stopping: asyncio.Event) -> None:
        await _Run(host, addresses, settings, insecure, tls, rights).until(open_bus, listening, announce, stopping)

    with listening, on_thread(main, "gateway") as facts:
        yield facts


@contextmanager
def on_thread(
    main: Callable[[Announce, asyncio.Event], Coroutine[Any, Any, None]], name: str
) -> Iterator[dict[str, Any]]:
    """Run ``main`` in an event loop on a separate thread while the context lasts. Yields the announcement of ``main``
    and finally sets its event. Raises the error of ``main`` if it fails before announcing."""
    started: Future[dict[str, Any]] = Future()
    ends: list[Callable[[], object]] = []

    async def run() -> None:
        stopping = asyncio.Event()
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stopping.set))
        await main(started.set_result, stopping)

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as problem:
            if started.done():
                logger.error("the %s stopped", name, exc_info=problem)
            else:  # the caller reports it
                started.set_exception(problem)

    thread = threading.Thread(target=work, name=f"escrowmq-{name}", daemon=True)
    thread.start()
    try:
        try:
            facts = started.result(START_SECONDS)
        except TimeoutError:
            raise Unknown(Code.TIMED_OUT, f"the {name} did not start") from None
        yield facts
    finally:
        for end in ends:
            with contextlib.suppress(RuntimeError):  # the loop has already stopped
                end()
        thread.join()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals and the order of stopping to this module."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@dataclass
class _Run:
    """How one gateway is served."""

    host: str
    addresses: Mapping[str, Address] | None
    settings: GatewaySettings | None
    insecure: bool
    tls: ssl.SSLContext | None
    has_credential: bool

    async def until(
        self, connect: Connect, listening: socket.socket, announce: Announce, stopping: asyncio.Event
    ) -> None:
        """Serve until ``stopping``; then end waiting receives empty, finish work in flight and close the buses."""
        settings, addresses = self.settings or GatewaySettings(), self.addresses or {}
        callers = Callers(connect, settings, addresses, await connect(None), has_credential=self.has_credential)
        try:
            app = Admission(build(callers), settings, self.host, self.insecure or self.tls is not None)
            served = Served(app, settings, listening, self.host, self.tls)
            facts = {"asks": sorted(addresses)}
            await answer_until(served, lambda at: announce(at | facts), stopping, callers.end_waiting)
        finally:
            await callers.close()


class Served(NamedTuple):
    """An ASGI application, its limits, and where it is served."""

    app: Any
    settings: GatewaySettings
    listening: socket.socket
    host: str
    tls: ssl.SSLContext | None = None


async def answer_until(
    served: Served, announce: Announce, stopping: asyncio.Event, closing: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Serve an application until ``stopping``. ``announce`` is called with {"http": URL} once requests are
    accepted. At the end ``closing`` releases waiting requests, and requests in flight finish."""
    asyncio.get_running_loop().set_exception_handler(_on_loop_problem)
    listening = served.listening
    server = make_server(served.app, served.settings, served.tls)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    waiting = asyncio.create_task(stopping.wait())
    try:
        await _wait_until_started(server, serving)
        listening.listen(BACKLOG)
        scheme = "http" if served.tls is None else "https"
        announce({"http": f"{scheme}://{shown(served.host)}:{listening.getsockname()[1]}"})
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        logger.info("stopping")
        waiting.cancel()
        if closing is not None:
            await closing()
        server.should_exit = True
        await serving


def _on_loop_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log one line, not a traceback, for each connection that cannot be accepted: asyncio retries after a second."""
    if isinstance(problem := context.get("exception"), OSError) and problem.errno in SHORTAGE:
        logger.info("no connection can be accepted: %s", problem)
    else:
        loop.default_exception_handler(context)


async def _wait_until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise Unknown(Code.CLOSED, "the HTTP server did not start")
        await asyncio.sleep(0.005)


def make_server(app: Any, settings: GatewaySettings, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Return the HTTP server for an application; it does not change the process's signal handlers."""
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(BoundedProtocol, settings=settings)),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=GRACE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    config.ssl = tls  # which loads a renewed certificate; uvicorn's own context is made once
    return _Server(config)


def listen_on(listen: str, insecure: bool, *, tls: bool = False, rights: bool = False) -> tuple[str, socket.socket]:
    """Return the host of ``HOST:PORT`` and a listening socket. Raises Misuse(BAD_URL); Denied beyond loopback without
    TLS and access rights."""
    host, port = parse_address(listen)
    check_address(host, insecure, tls=tls, rights=rights)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as problem:
        raise Misuse(Code.BAD_URL, f"cannot listen on {shown(host)}:{port}: {problem}", "is the port in use?") from None
    # Headers and body of a response are two writes: without TCP_NODELAY the second waits 40 ms for a delayed
    # acknowledgement. Connections inherit it; asyncio sets it only for sockets with an explicit protocol.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return host, listening
