"""The frame codec: one Arrow record batch with a 56-byte header and a checksum over all of it (see FORMAT.md).

Messages are Arrow IPC record batch messages without their schema, which follows from the kind. Kinds with only integer
columns are *bare columns*: just the values, the widest columns first so that each is aligned. So a check-back of a
pending half message costs 64 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from escrowmq.errors import Code, Misuse, error
from escrowmq.log import bodies
from escrowmq.log.report import DamagedLog
from escrowmq.message import stored
from escrowmq.message.hashes import checksum
from escrowmq.platform.disk import Chunk
from escrowmq.schemas import MESSAGES, STORED, Kind, is_fixed_width
from escrowmq.wire.frames.columns import encode_batch

MAGIC = b"EMQF"
VERSION = 1
HEADER_BYTES = 56
LARGEST_PAYLOAD = (1 << 32) - 8
_CHECKED = struct.Struct("<4sBBBBIIQQQII")
_HEADER = struct.Struct("<4sBBBBIIQQQIIQ")
_CHECKSUM = struct.Struct("<Q")
_LARGEST_LAG = (1 << 32) - 1
CHECKED_BODIES = 1  # flag: checksums of the single bodies follow the record batch (``bodies.py``)


class Encoding(IntEnum):
    """The encoding of the batch in the payload. The number is stored."""

    ARROW = 0
    ARROW_LZ4 = 1
    BARE = 2


class FrameHeader(NamedTuple):
    """The fields of a frame's header, in their order on disk."""

    magic: bytes
    version: int
    kind: int
    encoding: int
    flags: int
    payload_bytes: int
    rows: int
    sequence: int
    position: int
    time_us: int
    epoch: int
    synced_lag: int
    checksum: int

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @property
    def synced(self) -> int:
        """Every frame with a sequence below this was durable when this frame was written."""
        return self.sequence - self.synced_lag

    @property
    def is_newer(self) -> bool:
        """Return whether only a newer version of this program can interpret the frame. Check the checksum first."""
        checkable = self.kind in MESSAGES and self.encoding == Encoding.ARROW
        known = self.kind in STORED and self.encoding <= Encoding.BARE and self.flags <= CHECKED_BODIES * checkable
        return self.version > VERSION or not known


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of a future frame, packed without Arrow into the same bytes that :func:`encode` makes of their batch."""

    kind: Kind
    num_rows: int
    payload: bytes  # without the checksums of the bodies, which need the frame's number
    bodies: tuple[int, int, Sequence[bytes]]  # for messages: start and end of the bodies in the payload, and the bodies

    @cached_property
    def batch(self) -> pa.RecordBatch:
        """The same rows as columns, which lie in the payload."""
        payload = pa.py_buffer(self.payload)
        if self.kind in _BARE:
            return _from_bare(payload, self.kind, self.num_rows)
        return pa.ipc.read_record_batch(payload, STORED[self.kind])


Content: TypeAlias = pa.RecordBatch | Packed


def can_pack(kind: Kind) -> bool:
    """Return whether :func:`pack` supports the kind."""
    return kind in MESSAGES or kind in _BARE


def pack(kind: Kind, columns: Sequence[Any]) -> Packed:
    """Pack a few rows of a kind supported by :func:`can_pack`. Raises ValueError or OverflowError if a value fits no
    column. ``columns`` are sequences in schema order; message ids are given as their concatenated bytes."""
    if kind in MESSAGES:
        payload, start, end = stored.message(*columns)
        return Packed(kind, len(columns[0]), payload, (start, end, columns[4]))
    size = len(columns[0])
    try:
        payload = _bare_form(kind, size).pack(*(value for i, _ in _BARE[kind] for value in columns[i]))
    except struct.error as problem:
        raise OverflowError(f"a number fits no column of {kind.name}: {problem}") from None
    return Packed(kind, size, payload, (0, 0, ()))


@lru_cache(1024)
def _bare_form(kind: Kind, size: int) -> struct.Struct:
    types = STORED[kind].types
    form = "<" + "".join(f"{size}{_CODES[str(types[i])]}" for i, _ in _BARE[kind])
    return struct.Struct(f"{form}{-struct.calcsize(form) % 8}x")


_CODES = {"int64": "q", "int32": "i", "uint32": "I", "uint8": "B"}


def encode(
    kind: Kind,
    content: Content,
    *,
    sequence: int,
    position: int,
    time_us: int,
    epoch: int,
    synced: int,
    salt: int,
    lz4: bool = False,
) -> list[Chunk]:
    """Encode one frame as consecutive chunks of bytes. ``synced``: all frames below this sequence are durable;
    ``salt``: the log's seed of checksums; ``lz4``: compress it. Raises Misuse if the batch does not match the kind's
    schema, or is too large."""
    if isinstance(content, Packed) and not lz4:
        encoding, flags, payload = _packed_payload(content, sequence, salt)
    else:
        batch = content.batch if isinstance(content, Packed) else content
        encoding, flags, payload = _batch_payload(kind, batch, sequence, salt, lz4)
    size = sum(map(len, payload))
    if size > LARGEST_PAYLOAD:
        raise Misuse(Code.BATCH_TOO_LARGE, f"a frame of {size} bytes; the format ends at {LARGEST_PAYLOAD}")
    lag = min(sequence - synced, _LARGEST_LAG)
    place = (content.num_rows, sequence, position, time_us, epoch, lag)
    head = _CHECKED.pack(MAGIC, VERSION, kind, encoding, flags, size, *place)
    return [head + _CHECKSUM.pack(checksum(head, *payload, seed=salt)), *payload]


def _packed_payload(packed: Packed, sequence: int, salt: int) -> tuple[Encoding, int, list[Chunk]]:
    if packed.kind in _BARE:
        return Encoding.BARE, 0, [packed.payload]
    if packed.num_rows == 1:
        return Encoding.ARROW, 0, [packed.payload]
    start, end, contents = packed.bodies
    checksums = bodies.checksums_of(packed.payload, start, end, contents, sequence, salt)
    return Encoding.ARROW, CHECKED_BODIES, [packed.payload, checksums]


def _batch_payload(
    kind: Kind, batch: pa.RecordBatch, sequence: int, salt: int, lz4: bool
) -> tuple[Encoding, int, list[Chunk]]:
    schema = STORED[kind]
    if not batch.schema.equals(schema):
        raise Misuse(Code.BAD_ARGUMENT, f"a {kind.name} frame has columns {schema.names}, not {batch.schema.names}")
    if batch.num_rows == 0:
        raise Misuse(Code.BAD_ARGUMENT, f"a {kind.name} frame of no rows")
    encoding, flags = Encoding.ARROW, 0
    if kind in _BARE:
        encoding, payload = Encoding.BARE, _bare(kind, batch)
    elif lz4:
        encoding, payload = Encoding.ARROW_LZ4, _pad([_compress(batch)])
    else:
        message = encode_batch(batch)
        payload = _pad(message)
        if kind in MESSAGES and batch.num_rows > 1:
            flags = CHECKED_BODIES
            payload = [*payload, bodies.checksums(message, batch, sequence, salt)]
    return encoding, flags, payload


def size_bound(content: Content) -> int:
    """Return the maximum bytes of a frame of these rows in any encoding, to ``reserve`` for it."""
    if isinstance(content, Packed):
        size, columns = len(content.payload), len(STORED[content.kind])
    else:
        size, columns = int(pa.ipc.get_record_batch_size(content)), content.num_columns
    # LZ4 can only lose a little: 1/255 of the content, and some 32 bytes for each buffer.
    return int(HEADER_BYTES + size + size // 250 + 64 * (2 + 3 * columns) + bodies.size_of(content.num_rows))


def read_header(data: pa.Buffer | memoryview, offset: int) -> FrameHeader:
    """Read the 56 bytes at ``offset`` as a header, unchecked."""
    return FrameHeader._make(_HEADER.unpack_from(data, offset))


def is_intact(data: memoryview, offset: int, header: FrameHeader, salt: int) -> bool:
    """Return whether the checksum of the frame at ``offset`` is right; the frame must lie within ``data``."""
    payload = data[offset + HEADER_BYTES : offset + header.frame_bytes]
    return checksum(data[offset : offset + _CHECKED.size], payload, seed=salt) == header.checksum


def decode(data: pa.Buffer, offset: int, header: FrameHeader, file: str) -> pa.RecordBatch:
    """Decode a checked frame's batch; its columns lie in ``data`` (except LZ4). Raises Corrupt with the place."""
    if header.is_newer:
        raise DamagedLog(file, offset, header.sequence, "a frame of a newer version", newer=True)
    schema = STORED[Kind(header.kind)]
    size = header.payload_bytes - (bodies.size_of(header.rows) if header.flags & CHECKED_BODIES else 0)
    payload = data.slice(offset + HEADER_BYTES, max(size, 0))
    try:
        if header.encoding == Encoding.BARE:
            batch = _from_bare(payload, Kind(header.kind), header.rows)
        else:
            batch = pa.ipc.read_record_batch(payload, schema)
    except MemoryError as problem:  # Arrow's error is also an ArrowException; the frame is intact
        raise error(Code.OUT_OF_RESOURCES, f"no memory to read a frame: {problem}") from problem
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise DamagedLog(file, offset, header.sequence, f"the frame does not decode: {problem}") from problem
    if batch.num_rows != header.rows:
        message = f"the frame holds {batch.num_rows} rows, its header says {header.rows}"
        raise DamagedLog(file, offset, header.sequence, message)
    return batch


def _compress(batch: pa.RecordBatch) -> pa.Buffer:
    """Encode a batch in LZ4 without Arrow's threads, which cost ten times as much as compressing a small frame."""
    sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    pa.ipc.new_stream(sink, batch.schema, options=options).write_batch(batch)
    start, end = batch.schema.serialize().size, sink.tell()
    return sink.getvalue().slice(start, end - start)


def _pad(chunks: list[Chunk]) -> list[Chunk]:
    rest = -sum(len(chunk) for chunk in chunks) % 8
    return [*chunks, bytes(rest)] if rest else chunks


_BARE = {
    kind: sorted(((i, type_.bit_width // 8) for i, type_ in enumerate(schema.types)), key=lambda column: -column[1])
    for kind, schema in STORED.items()
    if is_fixed_width(schema)
}
"""Column numbers and value widths (bytes), widest first, of each kind that is stored as bare columns."""


def _bare(kind: Kind, batch: pa.RecordBatch) -> list[Chunk]:
    chunks: list[Chunk] = []
    columns, size = batch.columns, batch.num_rows
    for i, width in _BARE[kind]:
        column = columns[i]
        if column.null_count:
            raise Misuse(Code.BAD_ARGUMENT, f"column {batch.schema.names[i]} holds nulls")
        chunks.append(column.buffers()[1].slice(column.offset * width, size * width))
    return _pad(chunks)


def _from_bare(payload: pa.Buffer, kind: Kind, rows: int) -> pa.RecordBatch:
    if kind not in _BARE:
        raise ValueError(f"bare columns, but a {kind.name} frame has others")
    schema = STORED[kind]
    columns: list[pa.Array] = [None] * len(schema)
    at = 0
    for i, width in _BARE[kind]:
        size = rows * width
        if at + size > payload.size:
            raise ValueError(f"{payload.size} bytes are too few for {rows} rows")
        columns[i] = pa.Array.from_buffers(schema.field(i).type, rows, [None, payload.slice(at, size)], null_count=0)
        at += size
    return pa.RecordBatch.from_arrays(columns, schema=schema)
