"""Metrics and health of a command, served while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from escrowmq.errors import Code, error

Metrics = Annotated[
    str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow --metrics an address that other machines can reach.")]


@contextmanager
def serve_metrics(
    address: str | None, insecure: bool, collector: Callable[[], Any], health: Callable[[], Mapping[str, Any]]
) -> Iterator[str | None]:
    """Serve a collector made by ``collector``, and ``health``, at ``HOST:PORT``. Yields the URL, or None without an
    address. Raises Misuse for an address that is invalid, in use, or reachable by others without ``insecure``."""
    if address is None:
        yield None
        return
    from prometheus_client import CollectorRegistry

    from escrowmq.broker.serving.http import HttpServer
    from escrowmq.platform.listening import check_address, parse_address, shown

    host, port = parse_address(address)
    check_address(host, insecure)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector())
    try:
        server = HttpServer(host, port, registry, health)
    except OSError as problem:
        raise error(Code.BAD_URL, f"cannot listen on {address}: {problem}", "is the port in use?") from None
    try:
        yield f"http://{shown(host)}:{server.port}"
    finally:
        server.close()
