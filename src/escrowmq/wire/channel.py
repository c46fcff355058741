"""A connected socket, plain or with TLS, below brokers, clients and event loops: nothing above knows which of the two
it is.

A channel never blocks in :meth:`Channel.send`; :meth:`Channel.recv_into` waits if the socket is a blocking one. One
thread receives; any number of threads send, one at a time (the caller holds its own lock, which orders frames). TLS
runs through ``ssl.SSLObject`` and two memory BIOs under a lock that is never held during a system call: an
``SSLSocket`` must not be read by one thread and written by another.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from escrowmq.errors import Code, Misuse

Piece = bytes | bytearray | memoryview
MAX_PIECES = 64
"""Pieces that one system call sends; the system's limit is 1,024."""
_TLS_PIECE = 64 << 10
"""Bytes that are encrypted in one call."""
_TLS_UNSENT = 256 << 10
"""Encrypted bytes that may wait for the socket; while there are more, nothing further is taken."""
_TLS_RECORD = 17_000
"""A record of TLS, at most, with what the protocol adds to it."""
_RAW_BYTES = 64 << 10
_GATHER_BYTES = 256 << 10
"""Bytes for which a read waits that certainly follow: otherwise each record of 16 KiB wakes the reader."""
KEEPALIVE = (15, 5, 3, 20)
"""A client notices within half a minute that the other end of a connection is gone."""


class Channel(Protocol):
    """The interface of both kinds of channels. All methods raise OSError (``ssl.SSLError`` is one) when the connection
    is broken.
    """

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
        """Let :meth:`recv_into` wait for so long at most."""

    def send(self, pieces: Sequence[Piece]) -> int:
        """Send without waiting. Returns how many bytes were taken, from the first on; 0 if the socket takes nothing
        now."""

    def flush(self) -> bool:
        """Send encrypted bytes that wait, without waiting. Returns whether none is left."""

    def recv_into(self, view: memoryview, rest: int = 0) -> int:
        """Receive into ``view``; returns the number of bytes, 0 at the end of the stream. ``rest``: bytes that will
        certainly follow.

        Raises BlockingIOError if nothing has come and the socket does not block, TimeoutError after its time limit.
        """

    def keep_alive(self, idle: int, interval: int, count: int, unacknowledged: int = 0) -> None:
        """Let the system ask whether the other side is there, after ``idle`` seconds of silence, every ``interval``
        seconds.

        After ``count`` questions without an answer the connection is broken, and so is one whose bytes were not
        acknowledged for ``unacknowledged`` seconds (0: the system's own time, which is many minutes). Small frames
        leave at once. Nothing to do for a Unix socket.
        """

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


class _SocketChannel:
    """The part of the socket that both kinds share."""

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
        """Let :meth:`recv_into` wait for so long at most."""
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
            if (option := getattr(socket, name, None)) is not None:  # not every system has them
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PlainChannel(_SocketChannel):
    """A socket as it is."""

    __slots__ = ()
    tls = unsent = buffered = False

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
    """A socket with TLS. The handshake happens while the first bytes are sent and received."""

    __slots__ = ("_in", "_lock", "_object", "_out", "_raw", "_sending", "_waiting", "buffered")
    tls = True

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, *, server: bool = False, name: str | None = None
    ) -> None:
        super().__init__(connected)
        self.buffered = False
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._in, self._out, server_side=server, server_hostname=name)
        self._lock = threading.Lock()  # the SSL object and its BIOs; never held during a system call
        self._sending = threading.Lock()  # the order of encrypted bytes on the socket
        self._waiting = b""  # encrypted bytes that the socket did not take

    @property
    def unsent(self) -> bool:
        """Return whether encrypted bytes wait for the socket."""
        return self._unsent_bytes() > 0

    def send(self, pieces: Sequence[Piece]) -> int:
        """See :class:`Channel`."""
        taken = 0
        for piece in pieces:
            view = memoryview(piece).cast("B")
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
        while True:
            try:
                with self._lock:
                    count, ended = self._decrypt_into(view)
                    incoming = self._in.pending
            except ssl.SSLError:
                with suppress(OSError):
                    self.flush()  # the alert that names the reason
                raise
            self.flush()  # what the handshake sends
            if count or ended:
                return count
            raw = self._receive_raw(rest - _TLS_RECORD - incoming)
            with self._lock:
                if raw:
                    self._in.write(raw)
                else:
                    self._in.write_eof()

    def _decrypt_into(self, view: memoryview) -> tuple[int, bool]:
        """Decrypt what is there. Returns the number of bytes, and whether the stream ended. With the lock held."""
        count, ended = 0, False
        try:
            while count < len(view) and not ended:
                got = self._object.read(len(view) - count, view[count:])
                count, ended = count + int(got), not got
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            ended = True
        self.buffered = count == len(view) and (self._object.pending() > 0 or self._in.pending > 0)
        return count, ended

    def _receive_raw(self, certain: int) -> bytes:
        """Receive encrypted bytes; waits for as many as certainly follow after the handshake, if the socket blocks."""
        if certain > _RAW_BYTES and self._socket.gettimeout() is None and self._object.version() is not None:
            return self._socket.recv(min(certain, _GATHER_BYTES), socket.MSG_WAITALL)
        return self._socket.recv(_RAW_BYTES)

    def shutdown(self, how: int) -> None:
        """Shut the socket down; a peer that reads is notified of the end first, if the socket takes it."""
        if how != socket.SHUT_RD:
            with suppress(ssl.SSLError, OSError):
                with self._lock, suppress(ssl.SSLWantReadError):
                    self._object.unwrap()
                self.flush()
        self._socket.shutdown(how)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS settings of a broker: its certificate (with its chain) and key, as PEM files. Raises
    Misuse(BAD_SETTING)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as problem:
        raise Misuse(
            Code.BAD_SETTING,
            f"the certificate {certificate} and the key {key} cannot be used: {problem}",
            "both are PEM files, the key without a password",
        ) from None
    return context


def client_context(authorities: Path | None = None) -> ssl.SSLContext:
    """Return the TLS settings of a client that trusts the system's authorities, or only those of a PEM file. Raises
    Misuse(BAD_SETTING)."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except (OSError, ValueError) as problem:
        raise Misuse(Code.BAD_SETTING, f"the authorities in {authorities} cannot be used: {problem}") from None


def connect(host: str, port: int, seconds: float, context: ssl.SSLContext | None = None) -> Channel:
    """Connect to a broker within ``seconds``; afterwards the socket blocks for as long at most. With ``port`` 0 the
    host is the path of a Unix socket. Raises OSError."""
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
