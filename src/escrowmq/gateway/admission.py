"""Admission of HTTP requests: checks the headers before the body, then reads the body within the limits.

Rules:

1. A request for another host name, or from a page of another site, is rejected: a browser must not be an entry point
   (DNS rebinding to 127.0.0.1, or cross-site posts).
2. A body over ``max_request_bytes`` is rejected at its Content-Length or, if chunked, at the chunk that exceeds the
   limit. All requests together hold at most ``max_bytes_in_flight``. Memory is reserved before bytes are read.
3. A client that sends its body too slowly is dropped after ``body_timeout``.
4. The names and values of a body are counted before it is parsed: more than ``max_values`` are rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from escrowmq.errors import Code, Denied, EscrowError, Overloaded, Rejected
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.gateway.problems import problem_response
from escrowmq.platform.listening import host_name, is_loopback
from escrowmq.wire.bounded import check_json

_CLOSE = {"Connection": "close"}
"""Headers of a rejection whose body was not read: the connection cannot be reused."""

RAW_TYPE = "application/octet-stream"
JSON_TYPE = "application/json"
EVENT_TYPE = "application/cloudevents+json"
CONTENT_TYPES = (JSON_TYPE, RAW_TYPE, EVENT_TYPE)
"""Accepted content types. Browsers send them across sites only after a CORS preflight, which is not answered."""


class _UnsupportedBody(Rejected):
    """Unsupported content type or encoding of a body."""

    status = 415


class _BodyTimeout(Rejected):
    """Timeout while reading the body."""

    status = 408


class _ClientDisconnected(Exception):
    """Disconnect of the client while it sends its body."""


class Admission:
    """ASGI middleware that admits requests within the limits. ``host``: the host name or address listened on;
    ``insecure``: accept any Host header."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, host: str, insecure: bool) -> None:
        self._app = app
        self._settings = settings
        self._host = host.lower()
        self._insecure = insecure
        self.requests = 0
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit one request and pass it to the application, or send the rejection."""
        if scope["type"] != "http":
            return
        try:
            length = self._check(Headers(scope=scope))
        except EscrowError as problem:
            return await _refuse(problem, scope, receive, send)
        self.requests += 1
        held = [0]
        try:
            if length is not None:
                self._hold(length, held)
            async with asyncio.timeout(self._settings.body_timeout):
                body = b"" if length == 0 else await self._read(receive, length is None, held)
            if body and kind_of(Headers(scope=scope)) in (JSON_TYPE, EVENT_TYPE):
                check_json(body, most_bytes=self._settings.max_request_bytes, most_values=self._settings.max_values)
        except _ClientDisconnected:
            return
        except TimeoutError:
            slow = _BodyTimeout(Code.BAD_REQUEST, "the body did not come in time", "send it faster, or less at a time")
            await _refuse(slow, scope, receive, send)
        except EscrowError as problem:
            await _refuse(problem, scope, receive, send)
        else:
            await self._app(scope, _replay_body(body, receive), send)
        finally:
            self.requests -= 1
            self.bytes -= held[0]

    def _check(self, headers: Headers) -> int | None:
        """Check a request by its headers alone. Returns the body's length, None if chunked. Raises EscrowError."""
        self._check_origin(headers)
        length = self._read_length(headers)
        if length != 0 and (kind := kind_of(headers)) not in CONTENT_TYPES and not is_event(headers):
            raise _UnsupportedBody(
                Code.BAD_REQUEST, f"{kind!r:.100} is not taken", f"send {' or '.join(CONTENT_TYPES)}"
            )
        if self.requests >= self._settings.max_requests:
            raise Overloaded(Code.QUEUE_FULL, "too many requests are waiting at the gateway")
        return length

    async def _read(self, receive: Receive, undeclared: bool, held: list[int]) -> bytes:
        """Read the whole body. The HTTP server itself enforces a declared length."""
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientDisconnected
            chunk = message.get("body", b"")
            if undeclared and chunk:
                self._hold(len(chunk), held)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _hold(self, count: int, held: list[int]) -> None:
        most = self._settings.max_request_bytes
        if held[0] + count > most:
            raise Rejected(
                Code.BATCH_TOO_LARGE, f"the request's body is over the limit of {most} bytes", "send less at a time"
            )
        if self.bytes + count > self._settings.max_bytes_in_flight:
            raise Overloaded(Code.QUEUE_FULL, "the requests that wait at the gateway hold too many bytes")
        self.bytes += count
        held[0] += count

    def _read_length(self, headers: Headers) -> int | None:
        """Return the body's length from Content-Length; 0 without a body, None if chunked."""
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise _UnsupportedBody(Code.BAD_REQUEST, "compressed bodies are not taken", "send the body as it is")
        if "transfer-encoding" in headers:
            return None
        text = headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit()):
            raise Rejected(Code.BAD_REQUEST, "the Content-Length is not a number")
        return int(text[:20])

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if not self._insecure and (name := host_name(host)) != self._host and not is_loopback(name):
            raise Denied(Code.DENIED, f"this gateway is not {host!r:.100}", "ask for the address that it listens on")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Denied(
                Code.DENIED, "a page of another site may not ask", "call from a program, not from a browser's page"
            )


def kind_of(headers: Mapping[str, str]) -> str:
    """Return the content type of a request, without parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def is_event(headers: Mapping[str, str]) -> bool:
    """Return whether a request is a CloudEvent. Browsers send such a header, too, only after a preflight."""
    return "ce-specversion" in headers or kind_of(headers) == EVENT_TYPE


async def _refuse(problem: EscrowError, scope: Scope, receive: Receive, send: Send) -> None:
    await problem_response(problem, getattr(problem, "status", None), _CLOSE)(scope, receive, send)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function for the application: the whole body first, then further messages (the disconnect)."""
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return given.pop() if given else await receive()

    return replay
