"""``/metrics``, ``/healthz`` and ``/readyz`` on a small WSGI server, for Prometheus and process supervisors."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_JSON = "application/json"

logger = logging.getLogger(__name__)

Health = Callable[[], Mapping[str, str]]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds after which a silent client is given up, and its thread with it

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class HttpServer:
    """The server, on a thread of its own. ``health`` gives the answer of the ``health`` action."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        self._registry = registry
        self._health = health
        self._server = make_server(host, port, self._answer, _Server, _Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="escrowmq-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            code, content_type, body = self._page(environ.get("REQUEST_METHOD", ""), environ.get("PATH_INFO", ""))
        except Exception as problem:  # a stopped broker has no numbers
            code, content_type, body = 500, "text/plain; charset=utf-8", f"{problem}\n".encode()
        start_response(
            f"{code} {HTTPStatus(code).phrase}", [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        )
        return [body]

    def _page(self, method: str, path: str) -> tuple[int, str, bytes]:
        if method not in ("GET", "HEAD"):
            return 405, _JSON, b"{}"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        health = self._health()
        body = json.dumps(health).encode()
        if path == "/healthz":  # alive: restarting it would not help a full disk, but it does help a stopped shard
            return 503 if health["status"] == "stopped" else 200, _JSON, body
        if path == "/readyz":  # ready to take messages
            return 200 if health["status"] == "ok" else 503, _JSON, body
        return 404, _JSON, b"{}"
