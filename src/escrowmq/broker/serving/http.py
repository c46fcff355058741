"""``/metrics``, ``/healthz`` and ``/readyz`` on a small WSGI server, for Prometheus and process supervisors."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from escrowmq.errors import Code, Denied
from escrowmq.platform.listening import accepts_host_name, host_name
from escrowmq.rights import Access, Guard, Need

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"

logger = logging.getLogger(__name__)

Health = Callable[[], Mapping[str, str]]


MAX_CONNECTIONS = 32
"""Open connections; each has a thread. Over it the oldest is closed: a page takes milliseconds."""
LONGEST_SECONDS = 10.0
"""From a connection's opening to its end, however its bytes drip."""
_NO_DESCRIPTOR_SECONDS = 0.1
"""Before the next look when no connection can be accepted, which would otherwise be tried without a pause."""


class _Server(ThreadingMixIn, WSGIServer):
    """Ends connections that are too old or too many. All of it runs on the thread of ``serve_forever``, but
    :meth:`shutdown_request`."""

    daemon_threads = True

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments, **named)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection, and close the oldest of too many. Raises OSError, after a moment, when the
        process has no descriptor left."""
        try:
            connection, address = super().get_request()
        except OSError:
            self._end_overdue()
            time.sleep(_NO_DESCRIPTOR_SECONDS)
            raise
        with self._lock:
            self._open[connection] = time.monotonic()
            surplus = list(self._open)[:-MAX_CONNECTIONS]
        for one in surplus:
            self._end(one)
        return connection, address

    def service_actions(self) -> None:
        """Close connections that are open for too long. Called every half second, and after every connection."""
        self._end_overdue()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered or failed."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the failure of a connection for debugging only: its client left early."""
        logger.debug("a connection failed: %s", client_address, exc_info=True)

    def _end_overdue(self) -> None:
        before = time.monotonic() - LONGEST_SECONDS
        with self._lock:
            overdue = [connection for connection, began in self._open.items() if began < before]
        for connection in overdue:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Shut a connection down that is too old or one too many, and stop counting it. That wakes the thread that
        waits for it, which closes it."""
        with self._lock:
            self._open.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = LONGEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class HttpServer:
    """The server, on a thread of its own. ``health`` gives the answer of the ``health`` action."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        health: Health,
        tls: ssl.SSLContext | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._host = host
        self._registry = registry
        self._health = health
        self._guard = guard
        self._server = make_server(host, port, self._answer, _Server, _Handler)
        if tls is not None:  # the handshake runs on the connection's own thread
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="escrowmq-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and close the listening socket."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            asked = environ.get("HTTP_HOST", "")
            if asked and not accepts_host_name(host_name(asked), self._host):
                code, content_type, body = (
                    421,
                    _TEXT,
                    b"this server has another name: ask for the address that it listens at\n",
                )
            else:
                path = environ.get("PATH_INFO", "")
                self._check(path, environ.get("HTTP_AUTHORIZATION", ""), environ.get("REMOTE_ADDR", ""))
                code, content_type, body = self._page(environ.get("REQUEST_METHOD", ""), path)
        except Denied as problem:
            code = 401 if problem.code is Code.UNAUTHENTICATED else 403
            content_type, body = _TEXT, f"{problem}\n".encode()
        except Exception as problem:  # a stopped broker has no numbers
            code, content_type, body = 500, _TEXT, f"{problem}\n".encode()
        start_response(
            f"{code} {HTTPStatus(code).phrase}", [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        )
        return [body]

    def _check(self, path: str, authorization: str, source: str) -> None:
        """Raise Denied unless the request's token has the right to view; after a delay if many from ``source`` were
        wrong. ``/healthz`` and ``/readyz`` are open to all."""
        if self._guard is None or path in ("/healthz", "/readyz"):
            return
        scheme, _, token = authorization.partition(" ")
        try:
            caller = self._guard.enter(token if scheme.lower() == "bearer" else "", (), source, lambda: None)
        except Denied:
            time.sleep(self._guard.failures.delay(source))  # this connection's own thread
            raise
        try:
            self._guard.check(caller, (Need(Access.VIEW),))
        finally:
            self._guard.leave(caller)

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
            return 200 if health["status"] in ("ok", "damaged") else 503, _JSON, body
        return 404, _JSON, b"{}"
