"""HTTP connections of the gateway: deadlines for headers and for taking answers, and a bound on their number."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from escrowmq.gateway.limits import GatewaySettings
from escrowmq.platform.descriptors import connection_share

_AT_ONCE = struct.pack("ii", 1, 0)
"""Linger for no time."""


class BoundedProtocol(H11Protocol):
    """A connection that is closed when it is silent for too long where something is expected of it.

    1. From its opening, or from the first byte after an answer, ``header_timeout`` until a request's headers are whole.
       (Between an answer and the next byte uvicorn's keep-alive of 5 s counts; a body has the deadline of
       :mod:`escrowmq.gateway.admission`.)
    2. ``answer_timeout`` until what was written has been taken by the client.
    3. When there are too many, that which has waited longest for a request is closed; if none does, the new one.
    """

    def __init__(self, *arguments: Any, settings: GatewaySettings, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._settings = settings
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self.waiting_since: float | None = None
        """When it began to wait for headers, by the loop's clock; None while a request is at work."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and wait for its first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # "paused": not everything is taken; "resumed": it is
        self._expect_headers()
        most = min(self._settings.max_connections, connection_share())
        if len(self.connections) > most:
            others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
            silent = [one for one in others if one.waiting_since is not None]
            min(silent, key=lambda one: one.waiting_since or 0.0, default=self).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection: nothing is expected of it any more."""
        self._expect_nothing()
        self._on_taken()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; the first of a new one start its deadline."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_headers()
        else:
            self._expect_nothing()

    def on_response_complete(self) -> None:
        """Allow the next request after an answer was written."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE and self.waiting_since is None:
            self.waiting_since = self.loop.time()

    def pause_writing(self) -> None:
        """Note that the client has not taken what was written."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self._settings.answer_timeout, self.drop)

    def resume_writing(self) -> None:
        """Note that the client has taken it."""
        self._on_taken()
        super().resume_writing()

    def drop(self) -> None:
        """Close it at once, and let the system forget what it has not sent: the client does not want it."""
        self.connections.discard(self)
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _expect_headers(self) -> None:
        if self._deadline is None:
            if self.waiting_since is None:
                self.waiting_since = self.loop.time()
            self._deadline = self.loop.call_later(self._settings.header_timeout, self.drop)

    def _expect_nothing(self) -> None:
        self.waiting_since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
