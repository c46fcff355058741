"""The carrier in the simulation: a check of every frame of plain connections against the rules of the protocol, and
runs whose answers have parts, whose reads use up their credit, or whose connections have TLS.

The network alters no byte and keeps their order, so a frame that breaks a rule, or a TLS record that cannot be read, is
a bug of one of the two sides.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from escrowmq.client.links import exchanges
from escrowmq.wire import channel, frames
from escrowmq.wire.channel import Channel, PlainChannel, TlsChannel
from escrowmq.wire.frames import Kind, columns, requests

Violate = Callable[[str], None]
_HEADER = struct.Struct("<IBBHQ")  # not the product's, so that both cannot be wrong alike
_FINAL: dict[int, frozenset[int]] = {
    Kind.SEND: frozenset({Kind.ROWS}),
    Kind.PREPARE: frozenset({Kind.ROWS}),
    Kind.END: frozenset({Kind.CODES}),
    Kind.SETTLE: frozenset({Kind.CODES}),
    Kind.RECEIVE: frozenset({Kind.BATCH, Kind.WITHDRAWN}),
    Kind.COLUMNS: frozenset({Kind.BATCH}),
    Kind.ACTION: frozenset({Kind.RESULT}),
    Kind.READ: frozenset({Kind.DONE}),
    Kind.WATCH: frozenset({Kind.DONE}),
}
"""Final answers of each request, besides ERROR."""
_STREAMED: dict[int, frozenset[int]] = {
    Kind.READ: frozenset({Kind.SCHEMA, Kind.PART}),
    Kind.WATCH: frozenset({Kind.CHECKS}),
}
"""Answers that are followed by others."""
_OF_NO_REQUEST = frozenset({Kind.WELCOME, Kind.PONG, Kind.ERROR, Kind.GONE})


@dataclass(slots=True)
class _Open:
    """A request without a final answer. ``left``: bytes of its message that are still to come in parts."""

    kind: int
    credit: int = 0
    consumed: int = 0
    left: int = 0
    cancelled: bool = False


class FrameCheck:
    """The frames of one connection, in the order in which they were sent. ``violate`` gets what breaks a rule."""

    def __init__(self, violate: Violate) -> None:
        self._violate = violate
        self._rest = {True: b"", False: b""}
        self._open: dict[int, _Open] = {}
        self._greeted = self._welcomed = self._leaving = False

    def on_bytes(self, data: bytes, *, from_client: bool) -> None:
        """Check what one side sends."""
        data = self._rest[from_client] + data
        check = self._on_request if from_client else self._on_answer
        while len(data) >= _HEADER.size and len(data) >= (size := 4 + _HEADER.unpack_from(data)[0]):
            _, kind, flags, head, number = _HEADER.unpack_from(data)
            body_at = _HEADER.size + head + (-head % 8)
            if wrong := check(kind, bool(flags & 1), number, data[_HEADER.size : _HEADER.size + head], size - body_at):
                self._violate(f"frame of kind {kind:#04x} for request {number}: {wrong}")
            data = data[size:]
        self._rest[from_client] = data

    def _on_request(self, kind: int, more: bool, number: int, head: bytes, size: int) -> str:
        if self._leaving:
            return "sent after GOODBYE"
        if not self._greeted:
            self._greeted = True
            return "" if kind == Kind.HELLO else "not HELLO, which is first"
        if not self._welcomed:
            return "sent before WELCOME"
        self._leaving = kind == Kind.GOODBYE
        known = self._open.get(number)
        if kind in _FINAL:
            if known is not None:
                return "its number has no final answer yet"
            self._open[number] = _Open(kind, msgspec.msgpack.decode(head) if kind == Kind.READ else 0)
        elif kind == Kind.CANCEL and known is not None:
            known.cancelled = True
        elif kind == Kind.CREDIT and known is not None:
            size = msgspec.msgpack.decode(head)
            known.credit, known.consumed = known.credit + size, known.consumed - size
            if known.consumed < 0:
                return "credit for bytes that were not sent"
        return ""

    def _on_answer(self, kind: int, more: bool, number: int, head: bytes, size: int) -> str:
        self._welcomed = self._welcomed or kind == Kind.WELCOME
        if not number:
            return "" if kind in _OF_NO_REQUEST else "it belongs to no request"
        known = self._open.get(number)
        if known is None:
            return "its request has its final answer, or was never sent"
        if kind not in _FINAL[known.kind] | _STREAMED.get(known.kind, frozenset()) | {Kind.ERROR}:
            return f"no answer to a request of kind {known.kind:#04x}"
        if kind == Kind.WITHDRAWN and not (known.cancelled or self._leaving):
            return "nobody withdrew it"
        if kind == Kind.DONE and known.left:
            return f"{known.left} bytes of its last message are missing"
        if wrong := self._count(known, kind, more, head, size):
            return wrong
        if kind not in _STREAMED.get(known.kind, ()) and not more:
            del self._open[number]
        return ""

    @staticmethod
    def _count(known: _Open, kind: int, more: bool, head: bytes, size: int) -> str:
        """Check the size of a message in parts, and the credit of a read."""
        if kind == Kind.PART:
            if not known.left and known.credit <= 0:
                return "a batch without credit"
            known.credit, known.consumed = known.credit - size, known.consumed + size
        if known.left:
            if head:
                return f"a message begins, and {known.left} bytes of another are missing"
            known.left -= size
        elif more:
            if not head:
                return "a part before the first one"
            known.left = msgspec.msgpack.decode(head) - size
        if kind in frames.IN_PARTS and more != (known.left > 0):
            return f"{known.left} bytes of its message are missing, and MORE is {more}"
        return ""


@dataclass(frozen=True, slots=True)
class Carrier:
    """The behaviour of connections in a run; None: that of the product. ``part`` and ``credit`` are bytes."""

    tls: bool = False
    part: int | None = None
    credit: int | None = None

    @classmethod
    def draw(cls, chance: Random) -> Carrier:
        """Draw the carrier of a run that is about it."""
        return cls(chance.random() < 0.3, chance.choice((64, 300, 2000)), chance.choice((500, 4000)))

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """The TLS settings of clients; None: without TLS."""
        return _context(ssl.PROTOCOL_TLS_CLIENT) if self.tls else None

    def accept(self, end: Any) -> Channel:
        """Return the broker's channel over an accepted connection."""
        return (
            channel.TlsChannel(end, _context(ssl.PROTOCOL_TLS_SERVER), server=True) if self.tls else PlainChannel(end)
        )

    @contextmanager
    def install(self, violate: Violate) -> Iterator[None]:
        """Context manager: give the product the sizes, and report TLS records that cannot be read."""

        class WatchedChannel(TlsChannel):
            def recv_into(self, view: memoryview, rest: int = 0) -> int:
                try:
                    return super().recv_into(view, rest)
                except ssl.SSLError as problem:
                    violate(f"a TLS record cannot be read: {problem.reason}")
                    raise

        changes: list[tuple[Any, str, Any]] = [(channel, "TlsChannel", WatchedChannel)]
        if self.part is not None:
            changes.append((columns.split_parts, "__defaults__", (self.part,)))
        if self.credit is not None:
            changes.append((exchanges, "READ_CREDIT", self.credit))
            changes.append((requests.read_request, "__defaults__", (self.credit,)))
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        _set(changes)
        try:
            yield
        finally:
            _set(before)


def _set(changes: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in changes:
        setattr(owner, name, value)


def _context(protocol: int) -> ssl.SSLContext:
    """Return TLS settings without a certificate, whose records have the same sizes in every run."""
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
    return context
