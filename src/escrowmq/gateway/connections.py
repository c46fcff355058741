"""One HTTP connection: deadlines for request headers and for reading responses, and the connection limit."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from escrowmq.gateway.limits import GatewaySettings
from escrowmq.platform.descriptors import connection_share

_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER with a timeout of zero: reset the connection on close."""


class BoundedProtocol(H11Protocol):
    """A connection that is closed when an expected read or write takes too long.

    1. ``header_timeout``: from the opening, or from the first byte after a response, until the headers of a request are
       complete. (Between a response and the next byte uvicorn's keep-alive of 5 s applies; a body has the deadline of
       :mod:`escrowmq.gateway.admission`.)
    2. ``answer_timeout``: until the client has read what was written.
    3. Above the connection limit, the connection that has waited longest for a request is closed, else the new one.
    """

    def __init__(self, *arguments: Any, settings: GatewaySettings, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._settings = settings
        self._header_deadline: asyncio.TimerHandle | None = None
        self._read_deadline: asyncio.TimerHandle | None = None
        self.waiting_since: float | None = None
        """Start of the wait for headers (loop clock); None while a request is processed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and wait for its first request."""
        super().connection_made(transport)
        # Paused: data is unsent; resumed: all is sent. With TLS asyncio pauses at the limit, not above it.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0, low=0)
        self._expect_headers()
        most = min(self._settings.max_connections, connection_share())
        if len(self.connections) > most:
            others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
            silent = [one for one in others if one.waiting_since is not None]
            min(silent, key=lambda one: one.waiting_since or 0.0, default=self).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines of a closed connection."""
        self._cancel_header_deadline()
        self._cancel_read_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; the first byte of a new request starts its deadline."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_headers()
        else:
            self._cancel_header_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request after a complete response."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE and self.waiting_since is None:
            self.waiting_since = self.loop.time()

    def pause_writing(self) -> None:
        """Start the deadline for the client to read the response."""
        super().pause_writing()
        if self._read_deadline is None:
            self._read_deadline = self.loop.call_later(self._settings.answer_timeout, self.drop)

    def resume_writing(self) -> None:
        """Cancel that deadline: all data is sent."""
        self._cancel_read_deadline()
        super().resume_writing()

    def drop(self) -> None:
        """Reset the connection and discard its unsent data."""
        self.connections.discard(self)
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _expect_headers(self) -> None:
        if self._header_deadline is None:
            if self.waiting_since is None:
                self.waiting_since = self.loop.time()
            self._header_deadline = self.loop.call_later(self._settings.header_timeout, self.drop)

    def _cancel_header_deadline(self) -> None:
        self.waiting_since = None
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None
