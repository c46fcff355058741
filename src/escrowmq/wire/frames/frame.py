"""Header and kinds of frames, and the assembly of frames from received bytes. The package's docstring has the layout.

Kind and number precede the content, so that a frame with unreadable content is rejected under its number, and later
frames are still read. With a length over the limit the boundary between frames is lost: the connection is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import pyarrow as pa

from escrowmq.errors import Code, error

FORMAT_VERSION = 2
"""Format 1 belongs to version 0.1 and supports small requests only."""
HEADER = struct.Struct("<IBBHQ")
HEADER_BYTES = HEADER.size
MORE = 0x01
PART_BYTES = 1 << 20
"""Maximum body bytes of one part of an answer."""
SCRATCH_BYTES = 1 << 16
"""Bytes received per call into memory that all small frames share."""

_LENGTH = struct.Struct("<I")
_COUNTED = HEADER_BYTES - _LENGTH.size
"""Header bytes that its length field counts."""
_ROOM = bytes(HEADER_BYTES)
_NOTHING = memoryview(b"")

Piece = bytes | bytearray | memoryview | Any
"""Bytes, or a ``pa.Buffer``."""
Pieces = list[Piece]
"""One frame, in the pieces that a channel sends in order."""


class Kind(IntEnum):
    """Type of a frame. Kinds of the broker have the highest bit. A number is never reused for another kind."""

    HELLO = 0x01
    SEND = 0x02
    PREPARE = 0x03
    END = 0x04
    SETTLE = 0x05
    RECEIVE = 0x06
    COLUMNS = 0x07
    CANCEL = 0x08
    PING = 0x09
    GOODBYE = 0x0A
    ACTION = 0x0B
    READ = 0x0C
    CREDIT = 0x0D
    WATCH = 0x0E

    WELCOME = 0x81
    ROWS = 0x82
    CODES = 0x83
    BATCH = 0x84
    WITHDRAWN = 0x85
    ERROR = 0x86
    RESULT = 0x87
    SCHEMA = 0x88
    PONG = 0x89
    GONE = 0x8A
    PART = 0x8B
    DONE = 0x8C
    CHECKS = 0x8D


IN_PARTS = frozenset({Kind.BATCH, Kind.PART, Kind.CHECKS})
"""Answers that may be split into parts."""
CONTINUED = frozenset({Kind.SCHEMA, Kind.PART, Kind.CHECKS})
"""Answers that are followed by others with the same number."""


class Frame(NamedTuple):
    """One complete frame. ``kind`` need not be a :class:`Kind`: the reader of the frame checks it."""

    kind: int
    flags: int
    number: int
    head: memoryview
    body: memoryview


def frame(kind: Kind, number: int, body: bytes = b"", head: bytes = b"", flags: int = 0) -> bytes:
    """Encode one small frame."""
    return frame_start(kind, number, len(body), head, flags) + body


def frame_start(kind: Kind, number: int, body_bytes: int, head: bytes = b"", flags: int = 0) -> bytes:
    """Encode the header and the head of a frame whose body of ``body_bytes`` follows."""
    padding = -len(head) % 8
    length = _COUNTED + len(head) + padding + body_bytes
    return HEADER.pack(length, kind, flags, len(head), number) + head + bytes(padding)


def begin_frame() -> bytearray:
    """Return a frame without a head to which its body can be appended; see :func:`finish_frame`."""
    return bytearray(_ROOM)


def finish_frame(begun: bytearray, kind: Kind, number: int) -> bytearray:
    """Write the header of a frame whose body is complete."""
    HEADER.pack_into(begun, 0, len(begun) - _LENGTH.size, kind, 0, 0, number)
    return begun


def size_of(pieces: Sequence[Piece]) -> int:
    """Return the bytes of some pieces."""
    return len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))


def is_large(frame: Frame) -> bool:
    """Return whether an :class:`Assembler` allocated separate memory for a frame."""
    return HEADER_BYTES + len(frame.head) + (-len(frame.head) % 8) + len(frame.body) > SCRATCH_BYTES


def drop_bytes(pieces: Sequence[Piece], count: int) -> Pieces:
    """Return pieces without their first ``count`` bytes, not copied."""
    left: Pieces = []
    for piece in pieces:
        size = len(piece)
        if count >= size:
            count -= size
            continue
        left.append(memoryview(piece).cast("B")[count:] if count else piece)
        count = 0
    return left


Place = Callable[[int, int, int, memoryview, int], memoryview | None]
"""Called with kind, flags, number, head and size of a large body; returns the memory for it, or None to allocate
some."""


class Assembler:
    """Assembles frames of at most ``most`` bytes from data received into the memory of :meth:`target`.

    Small frames are received into ``scratch``, which assemblers of one thread may share. A frame of more than
    ``SCRATCH_BYTES`` gets separate memory from glibc's pool (mimalloc would map new pages for each), once
    ``may_take(bytes)`` allows it; until then :meth:`target` returns an empty view. An announced length alone takes no
    memory. Not thread-safe.
    """

    __slots__ = (
        "_body",
        "_large",
        "_refused",
        "_rest",
        "_scratch",
        "_skipped",
        "_wanted",
        "claimed",
        "frames",
        "may_take",
        "most",
        "place",
    )

    def __init__(
        self,
        most: int,
        scratch: memoryview | None = None,
        *,
        may_take: Callable[[int], bool] | None = None,
        place: Place | None = None,
    ) -> None:
        self.most = most
        self.may_take = may_take
        self.place = place
        self.frames = 0
        """Completed frames."""
        self.claimed = 0
        """Length (bytes) in the header of the unfinished frame; 0: none, or its header is incomplete."""
        self._scratch = memoryview(bytearray(SCRATCH_BYTES)) if scratch is None else scratch
        self._rest: bytearray | None = None  # start of an unfinished frame
        self._wanted = 0  # a shorter rest need not be parsed
        self._refused = False  # a large frame waits for its memory
        self._skipped = 0  # remaining bytes of a frame to discard
        self._large: Frame | None = None
        self._body = _NOTHING  # missing part of the large frame's body

    @property
    def small(self) -> int:
        """Return the memory (bytes) of an unfinished frame that did not require ``may_take``."""
        return len(self._rest or b"")

    @property
    def waiting(self) -> int:
        """Return the received bytes of an unfinished frame. Memory without received bytes uses no physical memory."""
        return self.small + (len(self._large.body) - len(self._body) if self._large is not None else 0)

    @property
    def lacks_memory(self) -> bool:
        """Return whether a large frame waits for its memory."""
        return self._refused

    @property
    def refused(self) -> Frame:
        """Return the large frame that waits for its memory, without its body."""
        assert self._rest is not None
        _, kind, flags, head, number = HEADER.unpack_from(self._rest)
        return Frame(kind, flags, number, memoryview(bytes(self._rest[HEADER_BYTES : HEADER_BYTES + head])), _NOTHING)

    def skip(self) -> None:
        """Receive and discard the rest of the large frame that was denied memory."""
        assert self._refused
        assert self._rest is not None
        self._skipped = self.claimed - len(self._rest)
        self._refused, self._rest, self.claimed = False, None, 0

    def discard(self) -> None:
        """Release the memory of the unfinished frame: its connection is closed."""
        self._large, self._rest, self._body, self.claimed = None, None, _NOTHING, 0

    @property
    def rest(self) -> int:
        """Return the bytes that will certainly follow for the current large frame; 0 if there is none."""
        return len(self._body)

    def target(self) -> memoryview:
        """Return the writable memory for the next bytes; empty while a large frame is denied memory."""
        if self._large is not None:
            return self._body
        if self._skipped:
            return self._scratch[: self._skipped]
        if self._refused:
            assert self._rest is not None
            with memoryview(self._rest) as rest:
                return self._body if self._begin_large(rest) else _NOTHING
        return self._scratch

    def filled(self, count: int) -> list[Frame]:
        """Process ``count`` bytes written to the last target. Returns the frames that they complete.

        Heads and bodies stay valid while referenced. Raises Rejected(BAD_REQUEST) for an impossible length,
        Rejected(BATCH_TOO_LARGE) for one over the limit: the connection is unusable then.
        """
        if self._large is not None:
            self._body = self._body[count:]
            if self._body:
                return []
            done, self._large, self.claimed = self._large, None, 0
            self.frames += 1
            return [done]
        if self._skipped:
            self._skipped -= count
            return []
        if self._rest is not None:
            self._rest += self._scratch[:count]
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest = None
        else:
            data = bytes(self._scratch[:count])
        found: list[Frame] = []
        at, end, view = 0, len(data), memoryview(data)
        while end - at >= HEADER_BYTES:
            length, kind, flags, head, number = HEADER.unpack_from(data, at)
            following = at + self._check_length(length, head)
            if following > end:
                break
            body_at = at + HEADER_BYTES + head + (-head % 8)
            head_at = at + HEADER_BYTES
            found.append(Frame(kind, flags, number, view[head_at : head_at + head], view[body_at:following]))
            at = following
        self.claimed = 0
        if at < end:
            self._keep(view[at:])
        self.frames += len(found)
        return found

    def _keep(self, rest: memoryview) -> None:
        """Keep the start of an unfinished frame. :meth:`target` allocates a large one: its place may depend on earlier
        frames."""
        wanted = HEADER_BYTES
        if len(rest) >= HEADER_BYTES:
            length, _, _, head, _ = HEADER.unpack_from(rest)
            self.claimed = wanted = self._check_length(length, head)
            if wanted > SCRATCH_BYTES:
                wanted = HEADER_BYTES + head + (-head % 8)
                self._refused = len(rest) >= wanted
        elif len(rest) >= _LENGTH.size:
            self._check_length(_LENGTH.unpack_from(rest)[0], 0)
        self._rest, self._wanted = bytearray(rest), wanted

    def _begin_large(self, rest: memoryview) -> bool:
        """Allocate memory for a large frame with complete header and head. Returns False if that is denied."""
        length, kind, flags, head, number = HEADER.unpack_from(rest)
        body_at = HEADER_BYTES + head + (-head % 8)
        size = length + _LENGTH.size - body_at
        if self.may_take is not None and not self.may_take(length + _LENGTH.size):
            self._refused = True
            return False
        self._refused, self._rest = False, None
        copied_head = memoryview(bytes(rest[HEADER_BYTES : HEADER_BYTES + head]))
        body = self.place(kind, flags, number, copied_head, size) if self.place is not None else None
        if body is None:
            body = allocate(size)
        received = rest[body_at:]
        body[: len(received)] = received
        self._large, self._body = Frame(kind, flags, number, copied_head, body), body[len(received) :]
        return True

    def _check_length(self, length: int, head: int) -> int:
        """Return the size (bytes) of the whole frame."""
        least = _COUNTED + head + (-head % 8)
        if length < least:
            raise error(Code.BAD_REQUEST, f"a frame announces {length} bytes; its header and head alone have {least}")
        size = length + _LENGTH.size
        if size > self.most:
            raise error(Code.BATCH_TOO_LARGE, f"a frame of {size} bytes; the limit is {self.most}")
        return size


def allocate(size: int) -> memoryview:
    """Return writable memory of glibc's pool."""
    return memoryview(pa.allocate_buffer(size, memory_pool=pa.system_memory_pool())).cast("B")


class Gatherer:
    """Joins the parts of answers over one connection; each part is received at its place in the whole message.

    The first part's head has the size of the message; ``most`` limits it.
    """

    __slots__ = ("_in_progress", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._in_progress: dict[int, tuple[memoryview, int]] = {}  # by number: message, start of its next part

    def place(self, kind: int, flags: int, number: int, head: memoryview, size: int) -> memoryview | None:
        """Return the memory for the body of a large part, for :class:`Assembler`; None if it is a separate message."""
        if kind not in IN_PARTS or not (flags & MORE or number in self._in_progress):
            return None
        return self._reserve(number, head, size)

    def add(self, frame: Frame) -> memoryview | None:
        """Add a part. Returns the whole message after its last part, else None.

        Raises Rejected(BAD_REQUEST) for parts that do not fit: the connection is unusable then.
        """
        number, body = frame.number, frame.body
        if not frame.flags & MORE and number not in self._in_progress:
            return body
        known = self._in_progress.get(number)
        if known is None or body.obj is not known[0].obj:  # it was received elsewhere
            self._reserve(number, frame.head, len(body))[:] = body
        if frame.flags & MORE:
            return None
        message, end = self._in_progress.pop(number)
        if end < len(message):
            raise error(Code.BAD_REQUEST, f"the parts of answer {number} do not make up its size")
        return message

    def forget(self, number: int) -> None:
        """Discard the received parts of an answer that ended early."""
        self._in_progress.pop(number, None)

    def _reserve(self, number: int, head: memoryview, size: int) -> memoryview:
        """Return the memory of the next part."""
        known = self._in_progress.get(number)
        if known is None:
            whole = read_size(head)
            if not 0 < whole <= self.most:
                raise error(Code.BAD_REQUEST, f"an answer of {whole} bytes; the limit is {self.most}")
            known = allocate(whole), 0
        message, at = known
        if not 0 < size <= len(message) - at:
            raise error(Code.BAD_REQUEST, f"the parts of answer {number} exceed its size")
        self._in_progress[number] = message, at + size
        return message[at : at + size]


def write_size(size: int) -> bytes:
    """Encode the head of a first part: the bytes of the whole message as msgpack's uint 64."""
    return b"\xcf" + size.to_bytes(8, "big")


def read_size(head: memoryview) -> int:
    """Decode :func:`write_size`; 0 for anything else."""
    return int.from_bytes(head[1:9], "big") if len(head) == 9 and head[0] == 0xCF else 0
