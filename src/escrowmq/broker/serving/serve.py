"""A broker as a process: open the folder, listen, announce, wait for a signal, stop cleanly."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.serving.brokers import Broker, BrokerAlone, BrokerNode, Replication, check_advertised
from escrowmq.broker.serving.http import HttpServer
from escrowmq.broker.serving.lean.listening import listen_tcp, listen_unix
from escrowmq.broker.serving.lean.server import LeanServer
from escrowmq.broker.serving.metrics import registry
from escrowmq.broker.serving.service import Service
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.platform.disk import Disk, RealDisk
from escrowmq.platform.listening import check_address, parse_address, shown
from escrowmq.platform.signals import stop_signals
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Link

logger = logging.getLogger(__name__)

Beside = Callable[[Link], AbstractContextManager[dict[str, Any]]]
"""Something that runs beside a served broker, over a link inside this process; it gives what ``announce`` is to say of it."""

WAKE_SECONDS = 0.2

LEAN_PORT_AWAY = 100
"""Without another word the lean carrier's port is so far above Flight's, so that several brokers can have neighbouring ports."""

STOPPED_BY_FAULT = 1
"""Exit code when the shard stopped by a failed write or sync."""


def serve(
    folder: Path,
    *,
    listen: str = "127.0.0.1:7700",
    metrics: str | None = None,
    lean: bool = True,
    lean_port: int | None = None,
    lean_socket: Path | None = None,
    settings: BrokerSettings | None = None,
    insecure: bool = False,
    announce: Callable[[dict[str, Any]], None] = lambda _: None,
    stop: threading.Event | None = None,
    beside: Beside | None = None,
    disk: Callable[[Path], Disk] = RealDisk,
    replication: Replication | None = None,
) -> int:
    """Serve ``folder`` until SIGTERM, SIGINT or ``stop``; the exit code: 0 after a clean stop.

    ``listen`` and ``metrics`` are HOST:PORT, port 0 for any free one (None: no HTTP). Small requests are taken on a port of the same host,
    too, unless not ``lean``: on ``lean_port`` (0: any free one; None: 100 above, or any free one if that is taken), and at the path ``lean_socket``. ``announce`` is called once, when
    requests are taken, with {"url", "metrics" (URL or None), "lean" ({"port", "socket"} or None), "folder", "shard", "epoch"}. A shard that stops by a
    fault keeps answering ``health`` and refusing the rest until it is told to stop; the exit code is then 1. ``beside``, which gets a link, is
    entered when requests are taken, and left before the broker stops. ``disk`` is for tests: what the folder is read and written through.
    ``replication``: the log is shared with other brokers, and the folder has a copy of it; this one refuses calls until it leads. It comes back as a
    follower after a fault, and ends only by one that does not pass, which is raised then.

    Raises Misuse(BAD_URL, FOLDER_IN_USE, ...), Denied for an address that is not loopback without ``insecure``, Corrupt; with ``replication`` what
    ended the node: Misuse(BAD_SETTING), Rejected(UNKNOWN_TOPIC), Denied, Corrupt.
    """
    host, port = parse_address(listen)
    check_address(host, insecure)
    http_address = parse_address(metrics) if metrics is not None else None
    if http_address is not None:
        check_address(http_address[0], insecure)
    for address in ((host, port), http_address):  # before the folder is made
        if address is not None and address[1]:
            with _listening(*address):
                listen_tcp(*address).close()
    folder, settings = Path(folder), settings or BrokerSettings()
    broker: Broker = BrokerAlone(folder, settings, disk)
    if replication is not None:
        check_advertised(host, replication)
        broker = BrokerNode(folder, settings, disk, replication)
    stopping = stop if stop is not None else threading.Event()
    # What runs ends first, and connections are closed after that: every request is answered before.
    with stop_signals(stopping.set), ExitStack() as listening, ExitStack() as running:
        calls = broker.begin(running)
        with _listening(host, port):
            service = Service(calls, host, port, insecure=insecure)
        listening.callback(service.stop)
        lean_at = _serve_lean(calls, service, host, port, lean_port, lean_socket, listening) if lean else None
        metrics_url = None
        if http_address is not None:
            numbers = registry(lambda: calls.action("stats", {}), broker.stand)
            with _listening(*http_address):
                http = HttpServer(*http_address, numbers, lambda: calls.action("health", {}))
            listening.callback(http.close)
            metrics_url = f"http://{shown(http_address[0])}:{http.port}"
        url = f"escrow://{shown(host)}:{service.port}"
        broker.listening(url, [service.port, *([lean_at["port"]] if lean_at is not None else [])], running)
        more = running.enter_context(beside(broker.link())) if beside is not None else {}
        shard, epoch = calls.identity
        facts = {"url": url, "metrics": metrics_url, "lean": lean_at, "folder": str(folder)}
        announce({**facts, "shard": shard, "epoch": epoch, **more})
        # Not without a time limit: the system may hand a signal to a thread of Flight's, and Python then runs the handler
        # only when this thread wakes.
        while not (stopping.wait(WAKE_SECONDS) or broker.ended):
            pass
        logger.info("stopping")
    if isinstance(broker.failure, EscrowError):
        raise broker.failure
    return STOPPED_BY_FAULT if broker.failed else 0


def _serve_lean(
    calls: Dispatcher,
    service: Service,
    host: str,
    flight_port: int,
    port: int | None,
    path: Path | None,
    listening: ExitStack,
) -> dict[str, Any]:
    """Serve the lean carrier until ``listening`` ends, in the room of Flight's calls; where it is, as ``hello`` tells it."""
    listeners = []
    try:
        with _listening(host, port or 0):
            listeners.append(_lean_listener(host, flight_port, port))
        if path is not None:
            with _listening(str(path)):
                listeners.append(listen_unix(path))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if path is not None:
        listening.callback(path.unlink, missing_ok=True)
    server = LeanServer(calls, service.room, listeners, version("escrowmq"))
    listening.callback(server.stop)
    at = {"port": listeners[0].getsockname()[1], "socket": str(path.absolute()) if path is not None else None}
    calls.beside["hello"] = lambda: {"lean": at}
    calls.beside["stats"] = server.numbers
    server.start()
    return at


def _lean_listener(host: str, flight_port: int, port: int | None) -> socket.socket:
    if port is not None:
        return listen_tcp(host, port)
    wanted = flight_port + LEAN_PORT_AWAY if flight_port else 0
    try:
        return listen_tcp(host, wanted if wanted < 1 << 16 else 0)
    except OSError as problem:
        logger.info("port %d is taken (%s): small requests are taken on another one", wanted, problem)
        return listen_tcp(host, 0)


@contextmanager
def _listening(host: str, port: int | None = None) -> Iterator[None]:
    """Around what listens: raises Misuse(BAD_URL) if the port, or without one the path, cannot be had."""
    try:
        yield
    except (pa.ArrowException, OSError) as problem:
        at, hint = (
            (f"{shown(host)}:{port}", "is the port in use?") if port is not None else (host, "is the folder there?")
        )
        raise Misuse(Code.BAD_URL, f"cannot listen on {at}: {problem}", hint) from None
