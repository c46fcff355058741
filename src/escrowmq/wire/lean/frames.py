"""Frames: how long each is, what it is, which request it belongs to; and taking a stream of bytes apart into frames.

A frame is a header of 13 bytes, all numbers little-endian, then its content:

========  =====  ==============================================================================================
at byte   type   what
========  =====  ==============================================================================================
0         u32    how many bytes follow this number: 9 and those of the content
4         u8     :class:`Kind`
5         u64    the request's number, chosen by the client; 0 in frames that belong to none
13        bytes  the content, most often one value in msgpack; :mod:`.requests` and :mod:`.answers` have the types
========  =====  ==============================================================================================

Kind and number stand before the content, so that a content which cannot be read is refused to its request, and the frames
after it go on. A length over the limit of its side means that the boundary of frames is lost: the connection is closed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from escrowmq.errors import Code, error

FORMAT_VERSION = 1
HEADER = struct.Struct("<IBQ")
HEADER_BYTES = HEADER.size
_LENGTH = struct.Struct("<I")
_COUNTED = HEADER_BYTES - _LENGTH.size
"""The bytes of a header that its length counts."""
_ROOM = bytes(HEADER_BYTES)


class Kind(IntEnum):
    """What a frame is. Those of the broker have the highest bit. A number is never used again for something else."""

    HELLO = 0x01
    SEND = 0x02
    PREPARE = 0x03
    END = 0x04
    SETTLE = 0x05
    RECEIVE = 0x06
    BATCH = 0x07
    CANCEL = 0x08
    PING = 0x09
    GOODBYE = 0x0A

    WELCOME = 0x81
    ROWS = 0x82
    CODES = 0x83
    ANSWERED = 0x84
    WITHDRAWN = 0x85
    ERROR = 0x86
    PONG = 0x89
    GONE = 0x8A


class Frame(NamedTuple):
    """One whole frame. ``kind`` need not be a :class:`Kind`: that is its reader's to judge."""

    kind: int
    number: int
    content: memoryview


def frame(kind: Kind, number: int, content: bytes = b"") -> bytes:
    """The bytes of one frame."""
    return HEADER.pack(_COUNTED + len(content), kind, number) + content


def begun() -> bytearray:
    """A frame to which its content is added behind the header; see :func:`finished`."""
    return bytearray(_ROOM)


def finished(begun: bytearray, kind: Kind, number: int) -> bytearray:
    """Write the header of a frame whose content is complete."""
    HEADER.pack_into(begun, 0, len(begun) - _LENGTH.size, kind, number)
    return begun


class Reader:
    """Takes what came over one connection apart into frames, of at most ``most`` bytes each.

    Not thread-safe. What of a frame is there is kept, and no more: a length that is only said takes no memory.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.frames = 0
        """Frames that came whole."""
        self._rest = bytearray()  # of a frame that is not whole yet
        self._wanted = 0  # until the rest has so many bytes, there is nothing to look for

    @property
    def waiting(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now. Their contents stay valid as long as they are held.

        Raises Rejected(BAD_REQUEST) for a length that cannot be one, Rejected(BATCH_TOO_LARGE) for one over the limit: no
        boundary can be found any more, the connection is of no use. Frames before it in ``data`` are lost with it.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest = bytearray()
        found: list[Frame] = []
        at, end, view = 0, len(data), memoryview(data)
        while end - at >= HEADER_BYTES:
            length, kind, number = HEADER.unpack_from(data, at)
            following = self._checked(length) + at + _LENGTH.size
            if following > end:
                break
            found.append(Frame(kind, number, view[at + HEADER_BYTES : following]))
            at = following
        if at < end:
            self._rest += view[at:]
            self._wanted = HEADER_BYTES
            if end - at >= _LENGTH.size:
                self._wanted = _LENGTH.size + self._checked(_LENGTH.unpack_from(data, at)[0])
        self.frames += len(found)
        return found

    def _checked(self, length: int) -> int:
        if length < _COUNTED:
            raise error(Code.BAD_REQUEST, f"a frame that says {length} bytes: its header alone has {_COUNTED}")
        if length + _LENGTH.size > self.most:
            raise error(
                Code.BATCH_TOO_LARGE,
                f"a frame of {length + _LENGTH.size} bytes; the limit is {self.most}",
                "use Flight",
            )
        return length
