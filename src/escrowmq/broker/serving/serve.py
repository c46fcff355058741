"""A broker as a process: open the folder, listen, announce, wait for a signal, stop cleanly."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from escrowmq.broker.calls import Calls
from escrowmq.broker.embedded import lent_link, open_engine
from escrowmq.broker.serving.http import HttpServer
from escrowmq.broker.serving.metrics import registry
from escrowmq.broker.serving.service import Service
from escrowmq.errors import Code, Misuse
from escrowmq.platform.listening import check_address, parse_address, shown
from escrowmq.platform.signals import stop_signals
from escrowmq.settings import BrokerSettings
from escrowmq.wire import Link

logger = logging.getLogger(__name__)

Beside = Callable[[Link], AbstractContextManager[dict[str, Any]]]
"""Something that runs beside a served broker, over a link inside this process; it gives what ``announce`` is to say of it."""

WAKE_SECONDS = 0.2

STOPPED_BY_FAULT = 1
"""Exit code when the shard stopped by a failed write or sync."""


def serve(
    folder: Path,
    *,
    listen: str = "127.0.0.1:7700",
    metrics: str | None = None,
    settings: BrokerSettings | None = None,
    insecure: bool = False,
    announce: Callable[[dict[str, Any]], None] = lambda _: None,
    stop: threading.Event | None = None,
    beside: Beside | None = None,
) -> int:
    """Serve ``folder`` until SIGTERM, SIGINT or ``stop``; the exit code: 0 after a clean stop.

    ``listen`` and ``metrics`` are HOST:PORT, port 0 for any free one (None: no HTTP). ``announce`` is called once, when
    requests are taken, with {"url", "metrics" (URL or None), "folder", "shard", "epoch"}. A shard that stops by a
    fault keeps answering ``health`` and refusing the rest until it is told to stop; the exit code is then 1. ``beside`` is
    entered when requests are taken, and left before the broker stops.

    Raises Misuse(BAD_URL, FOLDER_IN_USE, ...), Denied for an address that is not loopback without ``insecure``, Corrupt.
    """
    host, port = parse_address(listen)
    check_address(host, insecure)
    http_address = parse_address(metrics) if metrics is not None else None
    if http_address is not None:
        check_address(http_address[0], insecure)
    stopping = stop if stop is not None else threading.Event()
    with stop_signals(stopping.set), ExitStack() as listening:
        engine = open_engine(Path(folder), settings or BrokerSettings())
        calls = Calls(engine)
        with ExitStack() as running:  # ends first: every request is answered before the connections are closed
            running.callback(calls.close)
            running.callback(engine.stop)
            running.callback(calls.give_back)
            engine.start()
            with _listening(host, port):
                service = Service(calls, host, port, insecure=insecure)
            listening.callback(service.stop)
            metrics_url = None
            if http_address is not None:
                numbers = registry(lambda: calls.action("stats", {}))
                with _listening(*http_address):
                    http = HttpServer(*http_address, numbers, lambda: calls.action("health", {}))
                listening.callback(http.close)
                metrics_url = f"http://{shown(http_address[0])}:{http.port}"
            more = running.enter_context(beside(lent_link(Path(folder), calls))) if beside is not None else {}
            announce(
                {
                    "url": f"escrow://{shown(host)}:{service.port}",
                    "metrics": metrics_url,
                    "folder": str(folder),
                    "shard": engine.log.shard,
                    "epoch": engine.log.epoch,
                    **more,
                }
            )
            # Not without a time limit: the system may hand a signal to a thread of Flight's, and Python then runs the handler
            # only when this thread wakes.
            while not stopping.wait(WAKE_SECONDS):
                pass
            logger.info("stopping")
    return STOPPED_BY_FAULT if engine.shard.failure is not None else 0


@contextmanager
def _listening(host: str, port: int) -> Iterator[None]:
    """Around what listens: raises Misuse(BAD_URL) if the port cannot be had."""
    try:
        yield
    except (pa.ArrowException, OSError) as problem:
        raise Misuse(Code.BAD_URL, f"cannot listen on {shown(host)}:{port}: {problem}", "is the port in use?") from None
