"""A connected socket, plain or with TLS, for brokers, clients and event loops, with the same interface for both.

:meth:`Channel.send` never blocks; :meth:`Channel.recv_into` waits if the socket is a blocking one. One thread receives;
any number of threads send, one at a time (the caller holds its own lock, which orders frames). TLS uses
``ssl.SSLObject`` and two memory BIOs under a lock that is never held during a system call: an ``SSLSocket`` must not be
read by one thread and written by another.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from escrowmq.errors import Code, Misuse

Piece = bytes | bytearray | memoryview
MAX_PIECES = 64
"""Pieces per system call; the system's limit is 1,024."""
_TLS_PIECE = 64 << 10
"""Bytes encrypted per call."""
_TLS_UNSENT = 256 << 10
"""Limit of encrypted bytes waiting for the socket; above it no further bytes are accepted."""
_TLS_RECORD = 17_000
"""Maximum size of a TLS record, with the protocol's overhead."""
_RAW_BYTES = 64 << 10
_GATHER_BYTES = 256 << 10
"""Maximum bytes for which a read waits if they certainly follow: otherwise each record of 16 KiB wakes the reader."""
KEEPALIVE = (15, 5, 3, 20)
"""With these values a client detects a lost peer within half a minute."""


class Channel(Protocol):
    """Interface of both channels. All methods raise OSError (``ssl.SSLError`` is one) when the connection is broken."""

    @property
    def tls(self) -> bool: ...

    @property
    def unsent(self) -> bool:
        """Return whether encrypted bytes wait for the socket although they count as sent; :meth:`flush` sends them."""

    @property
    def buffered(self) -> bool:
        """Return whether bytes can be received although the socket has none."""

    def fileno(self) -> int: ...

    def setblocking(self, blocking: bool) -> None:
        """Set whether :meth:`recv_into` waits."""

    def settimeout(self, seconds: float) -> None:
        """Set the timeout of :meth:`recv_into`."""

    def certificate_names(self) -> list[str]:
        """Return the subject alternative names, else the common name, of the peer's verified certificate."""

    def send(self, pieces: Sequence[Piece]) -> int:
        """Send without waiting. Returns the number of accepted bytes; 0 if the socket accepts none now."""

    def flush(self) -> bool:
        """Send waiting encrypted bytes, without waiting. Returns whether all were sent."""

    def recv_into(self, view: memoryview, rest: int = 0) -> int:
        """Receive into ``view``; return the number of bytes, 0 at the end of the stream. ``rest``: bytes that certainly
        follow.

        Raises BlockingIOError if nothing arrived and the socket does not block, TimeoutError after its timeout.
        """

    def keep_alive(self, idle: int, interval: int, count: int, unacknowledged: int = 0) -> None:
        """Enable the system's keep-alive probes after ``idle`` seconds of silence, every ``interval`` seconds.

        After ``count`` unanswered probes the connection is broken, and also if sent bytes were not acknowledged for
        ``unacknowledged`` seconds (0: the system's default, many minutes). Small frames are sent at once. No effect for
        a Unix socket.
        """

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


class _SocketChannel:
    """Common parts of both channels."""

    __slots__ = ("_socket",)

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 when it is closed."""
        return self._socket.fileno()

    def setblocking(self, blocking: bool) -> None:
        """See :class:`Channel`."""
        self._socket.setblocking(blocking)

    def settimeout(self, seconds: float) -> None:
        """Set the timeout of :meth:`recv_into`."""
        self._socket.settimeout(seconds)

    def keep_alive(self, idle: int, interval: int, count: int, unacknowledged: int = 0) -> None:
        """See :class:`Channel`."""
        if self._socket.family == socket.AF_UNIX:
            return
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": count}
        if unacknowledged:
            options["TCP_USER_TIMEOUT"] = 1000 * unacknowledged
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:  # not available on every system
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PlainChannel(_SocketChannel):
    """A socket without TLS."""

    __slots__ = ()
    tls = unsent = buffered = False

    def certificate_names(self) -> list[str]:
        """Return nothing."""
        return []

    def send(self, pieces: Sequence[Piece]) -> int:
        """See :class:`Channel`."""
        try:
            if len(pieces) == 1:
                return self._socket.send(pieces[0], socket.MSG_DONTWAIT)
            return self._socket.sendmsg(pieces[:MAX_PIECES], (), socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0

    def flush(self) -> bool:
        """Return True."""
        return True

    def recv_into(self, view: memoryview, rest: int = 0) -> int:
        """See :class:`Channel`."""
        if rest > _RAW_BYTES and self._socket.gettimeout() is None:
            return self._socket.recv_into(view[:_GATHER_BYTES], 0, socket.MSG_WAITALL)
        return self._socket.recv_into(view)

    def shutdown(self, how: int) -> None:
        """Shut the socket down."""
        self._socket.shutdown(how)


class TlsChannel(_SocketChannel):
    """A socket with TLS. The handshake runs while the first bytes are sent and received."""

    __slots__ = ("_established", "_in", "_lock", "_object", "_out", "_sending", "_waiting", "buffered")
    tls = True

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, *, server: bool = False, name: str | None = None
    ) -> None:
        super().__init__(connected)
        self.buffered = False
        self._established = False  # a byte was received, so the handshake is complete
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._in, self._out, server_side=server, server_hostname=name)
        self._lock = threading.Lock()  # the SSL object and its BIOs; never held during a system call
        self._sending = threading.Lock()  # the order of encrypted bytes on the socket
        self._waiting = b""  # encrypted bytes that the socket did not accept

    def certificate_names(self) -> list[str]:
        """See :class:`Channel`."""
        with self._lock:
            certificate: Any = self._object.getpeercert() or {}
        names = [value for _, value in certificate.get("subjectAltName", ())]
        subject = [pair for part in certificate.get("subject", ()) for pair in part]
        return names or [value for name, value in subject if name == "commonName"]

    @property
    def unsent(self) -> bool:
        """Return whether encrypted bytes wait for the socket."""
        return self._unsent_bytes() > 0

    def send(self, pieces: Sequence[Piece]) -> int:
        """See :class:`Channel`."""
        taken = 0
        for part in _join_small(pieces):
            view = memoryview(part).cast("B")
            while view:
                if self._unsent_bytes() > _TLS_UNSENT and not self.flush():
                    return taken
                with self._lock:
                    try:
                        count = self._object.write(view[:_TLS_PIECE])
                    except ssl.SSLWantReadError:  # the handshake is not complete
                        count = 0
                self.flush()
                taken += count
                if not count:
                    return taken
                view = view[count:]
        return taken

    def _unsent_bytes(self) -> int:
        return len(self._waiting) + self._out.pending

    def flush(self) -> bool:
        """See :class:`Channel`."""
        with self._sending:
            while True:
                if not self._waiting:
                    with self._lock:
                        self._waiting = self._out.read(_TLS_UNSENT)
                    if not self._waiting:
                        return True
                try:
                    sent = self._socket.send(self._waiting, socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError):
                    return False
                self._waiting = self._waiting[sent:]

    def recv_into(self, view: memoryview, rest: int = 0) -> int:
        """See :class:`Channel`."""
        count, ended, incoming = 0, False, self._in.pending
        while True:
            if incoming or self.buffered or not self._established:  # else decrypting would raise an error that is dear
                try:
                    with self._lock:
                        count, ended = self._decrypt_into(view)
                        incoming = self._in.pending
                except ssl.SSLError:
                    with suppress(OSError):
                        self.flush()  # the alert with the reason
                    raise
            if self._unsent_bytes():
                self.flush()  # output of the handshake
            if count or ended:
                return count
            raw = self._receive_raw(rest - _TLS_RECORD - incoming)
            with self._lock:
                if raw:
                    self._in.write(raw)
                else:
                    self._in.write_eof()
                incoming = max(1, self._in.pending)

    def _decrypt_into(self, view: memoryview) -> tuple[int, bool]:
        """Decrypt the received bytes. Returns the number of bytes, and whether the stream ended. Requires the lock."""
        count, ended, left = 0, False, True
        try:
            while count < len(view) and left and not ended:
                got = self._object.read(len(view) - count, view[count:])
                count, ended = count + int(got), not got
                left = self._object.pending() > 0 or self._in.pending > 0
        except ssl.SSLWantReadError:
            left = False
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            ended = True
        self.buffered = left and count == len(view)
        self._established = self._established or count > 0
        return count, ended

    def _receive_raw(self, certain: int) -> bytes:
        """Receive encrypted bytes; on a blocking socket, after the handshake, wait for bytes that certainly follow."""
        if certain > _RAW_BYTES and self._socket.gettimeout() is None and self._established:
            return self._socket.recv(min(certain, _GATHER_BYTES), socket.MSG_WAITALL)
        return self._socket.recv(_RAW_BYTES)

    def shutdown(self, how: int) -> None:
        """Shut the socket down; if the socket accepts it, a reading peer is notified of the end first."""
        if how != socket.SHUT_RD:
            with suppress(ssl.SSLError, OSError):
                with self._lock, suppress(ssl.SSLWantReadError):
                    self._object.unwrap()
                self.flush()
        self._socket.shutdown(how)


def _join_small(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with adjacent small ones joined: each part that is encrypted costs a record and a call."""
    parts: list[Piece] = []
    small: list[Piece] = []
    size = 0
    for piece in pieces:
        length = memoryview(piece).nbytes
        if small and size + length > _TLS_PIECE:
            parts.append(b"".join(small))
            small, size = [], 0
        if length > _TLS_PIECE:
            parts.append(piece)
        else:
            small.append(piece)
            size += length
    return [*parts, b"".join(small)] if small else parts


def server_context(certificate: Path, key: Path, client_authorities: Path | None = None) -> ssl.SSLContext:
    """Return the TLS settings of a broker with certificate chain and key (PEM files). With ``client_authorities`` a
    client may present a certificate of these. Raises Misuse(BAD_SETTING)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, certificate, key)
    if client_authorities is not None:
        _trust(context, client_authorities)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as problem:
        raise Misuse(
            Code.BAD_SETTING,
            f"the certificate {certificate} and the key {key} cannot be used: {problem}",
            "both are PEM files, the key without a password",
        ) from None


def client_context(
    authorities: Path | None = None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS settings of a client that trusts the system's CAs, or those of a PEM file; with ``certificate``
    and ``key`` it presents them to the broker. Raises Misuse(BAD_SETTING)."""
    context = ssl.create_default_context()
    if authorities is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust(context, authorities)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        _load_certificate(context, certificate, key if key is not None else certificate)
    return context


def _trust(context: ssl.SSLContext, authorities: Path) -> None:
    try:
        context.load_verify_locations(authorities)
    except (OSError, ValueError) as problem:
        raise Misuse(Code.BAD_SETTING, f"the authorities in {authorities} cannot be used: {problem}") from None


def connect(host: str, port: int, seconds: float, context: ssl.SSLContext | None = None) -> Channel:
    """Connect to a broker within ``seconds``, which then is the socket's timeout. With ``port`` 0 the host is the path
    of a Unix socket. Raises OSError."""
    if port:
        connected = socket.create_connection((host, port), seconds)
    else:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(seconds)
        try:
            connected.connect(host)
        except BaseException:
            connected.close()
            raise
    channel: Channel = PlainChannel(connected) if context is None else TlsChannel(connected, context, name=host)
    channel.keep_alive(*KEEPALIVE)
    return channel
