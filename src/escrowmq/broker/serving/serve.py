"""A broker as a process: open the folder, listen, announce, wait for a signal, stop cleanly."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from escrowmq.broker.calls import Dispatcher
from escrowmq.broker.recording import recorded
from escrowmq.broker.serving.brokers import Broker, BrokerAlone, BrokerNode, Replication, check_advertised
from escrowmq.broker.serving.certificates import ServerCertificate
from escrowmq.broker.serving.http import HttpServer
from escrowmq.broker.serving.listening import listen_tcp, listen_unix
from escrowmq.broker.serving.metrics import registry
from escrowmq.broker.serving.server import Server
from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.platform.disk import Disk, RealDisk
from escrowmq.platform.listening import check_address, parse_address, shown
from escrowmq.platform.signals import hang_up_signal, notify, stop_signals
from escrowmq.rights import Guard
from escrowmq.rights.guard import NO_NUMBERS
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Link
from escrowmq.wire.actions.rights import RELOAD
from escrowmq.wire.credential import Credential

logger = logging.getLogger(__name__)

Connect = Callable[[str | None], Sequence[Link]]
"""Returns a link inside this process with the rights of a token; "" stands for none, None for the credential of this
process."""
Beside = Callable[[Connect], AbstractContextManager[dict[str, Any]]]
"""A service that runs in the process of a broker, over links inside it; the context yields additions to
``announce``."""

WAKE_SECONDS = 0.2
NOWHERE = "none"
"""What ``listen`` says where a Unix socket alone is listened at."""

STOPPED_BY_FAULT = 1
"""Exit code when the shard stopped by a failed write or sync."""


def serve(
    folder: Path,
    *,
    listen: str = "127.0.0.1:7700",
    path: Path | None = None,
    tls: ServerCertificate | None = None,
    rights: Path | None = None,
    metrics: str | None = None,
    settings: BrokerSettings | None = None,
    insecure: bool = False,
    announce: Callable[[dict[str, Any]], None] = lambda _: None,
    stop: threading.Event | None = None,
    beside: Beside | None = None,
    disk: Callable[[Path], Disk] = RealDisk,
    replication: Replication | None = None,
) -> int:
    """Serve ``folder`` until SIGTERM, SIGINT or ``stop``; the exit code: 0 after a clean stop.

    ``listen`` and ``metrics`` are HOST:PORT, port 0 for any free one (``metrics`` None: no HTTP). ``path``: also
    listen at a Unix socket, which this user alone can reach; with ``listen`` "none" at that alone. ``tls``: the
    certificate of TCP connections, metrics included. ``rights``: the rights file; without one everybody may do
    everything. ``announce`` is called once, when
    requests are taken, with {"url", "socket" (path or None), "metrics" (URL or None), "folder", "shard", "epoch"}. A
    shard that stops by a fault keeps answering ``health`` and refusing the rest until it is asked to stop; the exit
    code is then 1. ``beside``, which gets a function that connects, is entered when requests are taken, and left
    before the broker stops. ``disk`` is for tests: what the folder is read and written through. ``replication``: the
    log is shared with other brokers, and the folder has a copy of it; this one refuses calls until it leads. It comes
    back as a follower after a fault, and ends only by one that does not pass, which is raised then.

    Raises Misuse(BAD_URL, FOLDER_IN_USE, ...), Denied for an address that is not loopback without ``insecure``,
    Corrupt; with ``replication`` what ended the node: Misuse(BAD_SETTING), Rejected(UNKNOWN_TOPIC), Denied, Corrupt.
    """
    address = None if listen == NOWHERE else parse_address(listen)
    if address is None and path is None:
        raise Misuse(Code.BAD_URL, "the broker is to listen nowhere", "give --listen HOST:PORT, or --socket PATH")
    http_address = parse_address(metrics) if metrics is not None else None
    for one in (address, http_address):
        if one is not None:
            check_address(one[0], insecure, tls=tls is not None, rights=rights is not None)
    guard = Guard(rights) if rights is not None else None
    for one in (address, http_address):  # before the folder is made
        if one is not None and one[1]:
            with _listening(*one):
                listen_tcp(*one).close()
    folder, settings = Path(folder), settings or BrokerSettings()
    broker: Broker = BrokerAlone(folder, settings, disk)
    if replication is not None:
        check_advertised(address[0] if address is not None else "", replication)
        broker = BrokerNode(folder, settings, disk, replication)
    stopping = stop if stop is not None else threading.Event()
    # What runs ends first, and connections are closed after that: every request is answered before.
    with stop_signals(stopping.set), ExitStack() as listening, ExitStack() as running:
        calls = broker.begin(running)
        if tls is not None:
            tls.start()
            listening.callback(tls.stop)
        if guard is not None:
            _follow_rights(guard, calls, listening)
        context = tls.context if tls is not None else None
        url, server = _begin_server(calls, address, path, context, guard, listening)
        metrics_url = None
        if http_address is not None:
            numbers = registry(lambda: calls.action("stats", {}), broker.stand)
            with _listening(*http_address):
                http = HttpServer(*http_address, numbers, lambda: calls.action("health", {}), context, guard)
            listening.callback(http.close)
            scheme = "http" if context is None else "https"
            metrics_url = f"{scheme}://{shown(http_address[0])}:{http.port}"
        broker.listening(url, server.close_all, running)
        connect = partial(_connect, broker, guard)
        more = running.enter_context(beside(connect)) if beside is not None else {}
        shard, epoch = calls.identity
        at = str(path.absolute()) if path is not None else None
        facts = {"url": url, "socket": at, "metrics": metrics_url, "folder": str(folder)}
        announce({**facts, "shard": shard, "epoch": epoch, **more})
        notify(f"READY=1\nSTATUS=serving {folder} at {url}")
        # Not without a time limit: the system may hand a signal to another thread, and Python then runs the handler
        # only when this thread wakes.
        while not (stopping.wait(WAKE_SECONDS) or broker.ended):
            pass
        notify("STOPPING=1")
        logger.info("stopping")
    if isinstance(broker.failure, EscrowError):
        raise broker.failure
    return STOPPED_BY_FAULT if broker.failed else 0


def _begin_server(
    calls: Dispatcher,
    address: tuple[str, int] | None,
    path: Path | None,
    tls: ssl.SSLContext | None,
    guard: Guard | None,
    listening: ExitStack,
) -> tuple[str, Server]:
    """Start a server at a TCP ``address`` and a Unix socket ``path`` (None: without that), until ``listening`` ends.
    Returns the URL for clients, and the server."""
    listeners: list[socket.socket] = []
    url = ""
    try:
        if path is not None:
            with _listening(str(path)):
                listeners.append(listen_unix(path))
            url = f"escrow+unix://{path.absolute()}"
        if address is not None:
            with _listening(*address):
                listeners.append(listen_tcp(*address))
            scheme = "escrow" if tls is None else "escrows"
            url = f"{scheme}://{shown(address[0])}:{listeners[-1].getsockname()[1]}"
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if path is not None:
        listening.callback(path.unlink, missing_ok=True)
    server = Server(calls, listeners, version("escrowmq"), tls=tls, guard=guard)
    listening.callback(server.stop)
    calls.beside["stats"] = lambda: {**server.numbers(), **(guard.numbers() if guard is not None else NO_NUMBERS)}
    server.start()
    return url, server


def _connect(broker: Broker, guard: Guard | None, token: str | None) -> Sequence[Link]:
    """See :data:`Connect`. Raises Denied(UNAUTHENTICATED), Overloaded."""
    if token is None:
        token = Credential.choose(None, None).read()
        if token is None and guard is not None:
            return [broker.link(None, guard, is_nobody=True)]
    return [broker.link(token, guard)]


def _follow_rights(guard: Guard, calls: Dispatcher, listening: ExitStack) -> None:
    """Reload the rights file when it changes, until ``listening`` ends; each change is recorded as an operator
    action."""

    def record(new: str, old: str, by: str) -> None:
        engine = calls.engine
        if engine is not None:
            with recorded(engine, RELOAD, {"by": by}, rights=new, before=old) as done:
                done.ended = {"rights": new}

    guard.on_change = record
    guard.start()
    listening.callback(guard.stop)
    calls.beside["hello"] = lambda: {"rights": guard.rights.digest}
    listening.enter_context(hang_up_signal(guard.reload_soon))


@contextmanager
def _listening(host: str, port: int | None = None) -> Iterator[None]:
    """Context manager: turns an OSError of listening into Misuse(BAD_URL). Without a port, ``host`` is a path."""
    try:
        yield
    except OSError as problem:
        at, hint = (
            (f"{shown(host)}:{port}", "is the port in use?") if port is not None else (host, "is the folder there?")
        )
        raise Misuse(Code.BAD_URL, f"cannot listen on {at}: {problem}", hint) from None
