"""The RocketMQ gateway as a process: two ports, the service, and an orderly end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from escrowmq.client.aio import AsyncBus
from escrowmq.errors import Code, Misuse
from escrowmq.gateway.callers import Callers, Connect
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.rocketmq.access_keys import AccessKeys
from escrowmq.gateway.rocketmq.endpoints import Endpoints
from escrowmq.gateway.rocketmq.mapping import MAX_BODY
from escrowmq.gateway.rocketmq.protocol import service_grpc
from escrowmq.gateway.rocketmq.service import MessagingService
from escrowmq.gateway.server import aconnect_as, has_rights, on_thread, stop_by_signal
from escrowmq.platform.listening import check_address, is_loopback, parse_address, shown
from escrowmq.platform.state import state_folder
from escrowmq.wire import Link
from escrowmq.wire.credential import Credential

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Time (s) for calls in flight to finish when the gateway stops."""
MAX_REQUEST_BYTES = MAX_BODY + (1 << 20)
"""Size of one gRPC message: a body of 4 MiB and its properties."""

Announce = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RocketmqOptions:
    """Options of the gateway. ``listen`` and ``second`` are HOST:PORT; ``advertise`` the host that routes name
    (None: the one by which a client reaches this server); ``fifo`` names groups, or prefixes that end in ``*``, whose
    messages come in order; ``keys`` is the file of access keys; ``certificate`` and ``key`` are PEM files."""

    listen: str = "127.0.0.1:8081"
    second: str = "127.0.0.1:8082"
    advertise: str | None = None
    fifo: Sequence[str] = ()
    keys: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False
    state: Path | None = None


def serve(
    url: str,
    options: RocketmqOptions,
    *,
    settings: GatewaySettings | None = None,
    announce: Announce = lambda _: None,
) -> None:
    """Serve RocketMQ clients over the broker(s) at ``url`` until SIGTERM or SIGINT; call it from the main thread.

    ``announce`` is called once, when calls are accepted, with {"rocketmq": "HOST:PORT", "second": "HOST:PORT"}. Raises
    Misuse(BAD_URL, BAD_SETTING), and Denied for an address beyond loopback, unless there are TLS and a broker with
    access rights, or ``insecure`` is set.
    """
    hosts = _hosts(options)
    public = not options.insecure and not all(map(is_loopback, hosts))
    rights = public and options.certificate is not None and has_rights(url)
    _check_hosts(options, rights)

    async def main() -> None:
        stopping = asyncio.Event()
        stop_by_signal(stopping)
        has_credential = Credential.choose(None, None).is_set
        callers = partial(_open_callers, partial(aconnect_as, url), settings or GatewaySettings(), has_credential)
        await serve_until(callers, options, announce, stopping)

    asyncio.run(main())


@contextmanager
def beside(
    connect: Callable[[str | None], Sequence[Link]],
    options: RocketmqOptions,
    *,
    settings: GatewaySettings | None = None,
    rights: bool = False,
) -> Iterator[dict[str, Any]]:
    """Serve RocketMQ clients over a broker of this process, on a separate thread, while the context lasts. Yields
    {"rocketmq", "second"}. ``connect`` and ``rights``: see :func:`escrowmq.gateway.server.beside`."""
    _check_hosts(options, rights)

    async def open_bus(token: str | None) -> AsyncBus:
        return AsyncBus(await asyncio.to_thread(connect, token))

    callers = partial(_open_callers, open_bus, settings or GatewaySettings(), rights)
    with on_thread(lambda announce, stopping: serve_until(callers, options, announce, stopping), "rocketmq") as facts:
        yield facts


def _hosts(options: RocketmqOptions) -> list[str]:
    return [parse_address(one)[0] for one in (options.listen, options.second)]


def _check_hosts(options: RocketmqOptions, rights: bool) -> None:
    for host in _hosts(options):
        check_address(host, options.insecure, tls=options.certificate is not None, rights=rights)


async def _open_callers(connect: Connect, settings: GatewaySettings, has_credential: bool) -> Callers:
    return Callers(connect, settings, {}, await connect(None), has_credential=has_credential)


async def serve_until(
    open_callers: Callable[[], Awaitable[Callers]],
    options: RocketmqOptions,
    announce: Announce,
    stopping: asyncio.Event,
) -> None:
    """Serve until ``stopping``; then end waiting receives empty, finish calls in flight and close the connections."""
    keys = None if options.keys is None else AccessKeys.read(options.keys)
    callers = await open_callers()
    logging.getLogger("grpc._cython.cygrpc").addFilter(_WithoutGarbage())
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=callers.own.settings.max_requests,
    )
    try:
        ports = tuple(_add_port(server, address, options) for address in (options.listen, options.second))
        state = options.state or state_folder() / f"rocketmq-{hashlib.sha256(repr(ports).encode()).hexdigest()[:16]}"
        endpoints = Endpoints((ports[0], ports[1]), state, options.advertise)
        service = MessagingService(callers, endpoints, keys, partial(is_fifo, options.fifo))
        service_grpc.add_MessagingServiceServicer_to_server(service, server)
        await server.start()
        renewing = asyncio.create_task(service.renewing.run())
        hosts = map(shown, _hosts(options))
        announce(
            {name: f"{host}:{port}" for name, host, port in zip(("rocketmq", "second"), hosts, ports, strict=True)}
        )
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({renewing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        logger.info("stopping")
        if renewing.done():
            renewing.result()  # it ends by an error only: leases are not renewed any more
        for task in (renewing, waiting):
            task.cancel()
        service.clients.close()
        await callers.end_waiting()
    finally:
        await server.stop(GRACE_SECONDS)
        await callers.close()


class _WithoutGarbage(logging.Filter):
    """Drops what gRPC logs, a traceback each, about requests that are no messages of the protocol."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], DecodeError)


def is_fifo(patterns: Sequence[str], group: str) -> bool:
    """Return whether a group gets its messages in order: ``patterns`` has its name, or a prefix that ends in ``*``."""
    return any(group.startswith(one[:-1]) if one.endswith("*") else group == one for one in patterns)


def _add_port(server: Any, address: str, options: RocketmqOptions) -> int:
    host, port = parse_address(address)
    target = f"{shown(host)}:{port}"
    try:
        if options.certificate is None or options.key is None:
            return int(server.add_insecure_port(target))
        return int(server.add_secure_port(target, _credentials(options.certificate, options.key)))
    except RuntimeError as problem:
        raise Misuse(Code.BAD_URL, f"cannot listen on {target}: {problem}", "is the port in use?") from None


def _credentials(certificate: Path, key: Path) -> Any:
    """Return TLS credentials that follow the files: gRPC asks at each handshake."""
    last: list[bytes] = []

    def read() -> Any:
        pair = [key.read_bytes(), certificate.read_bytes()]
        if pair == last:
            return None
        last[:] = pair
        return grpc.ssl_server_certificate_configuration([(pair[0], pair[1])])

    try:
        initial = read()
    except OSError as problem:
        raise Misuse(Code.BAD_SETTING, f"the certificate cannot be read: {problem}") from None

    def fetch() -> Any:
        try:
            return read()
        except OSError:
            return None  # half-renewed files: the certificate stays as it is

    return grpc.dynamic_ssl_server_credentials(initial, fetch)
