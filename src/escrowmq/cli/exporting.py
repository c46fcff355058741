"""Metrics and health of a command, served while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typer import Option

from escrowmq.errors import Code, error


@dataclass
class MetricsOptions:
    """Metrics and health of a command."""

    metrics: str | None = Option(None, metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
    insecure: bool = Option(False, "--insecure", help="Allow --metrics an address that other machines can reach.")

    @contextmanager
    def serve(
        self, collector: Callable[[], Any], health: Callable[[], Mapping[str, Any]] = lambda: {"status": "ok"}
    ) -> Iterator[str | None]:
        """Serve a collector made by ``collector``, and ``health``. Yields the URL, or None without ``--metrics``.
        Raises Misuse for an address that is invalid, in use, or reachable by others without ``--insecure``."""
        if self.metrics is None:
            yield None
            return
        from prometheus_client import CollectorRegistry

        from escrowmq.broker.serving.http import HttpServer
        from escrowmq.platform.listening import check_address, parse_address, shown

        host, port = parse_address(self.metrics)
        check_address(host, self.insecure)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector())
        try:
            server = HttpServer(host, port, registry, health)
        except OSError as problem:
            raise error(Code.BAD_URL, f"cannot listen on {self.metrics}: {problem}", "is the port in use?") from None
        try:
            yield f"http://{shown(host)}:{server.port}"
        finally:
            server.close()
