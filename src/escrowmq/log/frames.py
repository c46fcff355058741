"""The frame codec: one Arrow record batch with a 56-byte header and a checksum over all of it (FORMAT.md has the map).

Messages are Arrow IPC record batch messages without their schema, which the kind tells. Kinds whose columns are all
integers are *bare columns*: nothing but the values, the widest columns first so that each is aligned. That is what makes
a question about a waiting half message cost 64 bytes.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import xxhash

from escrowmq.errors import Code, Misuse, error
from escrowmq.log import bodies
from escrowmq.log.report import DamagedLog
from escrowmq.schemas import MESSAGES, STORED, Kind, is_fixed_width

MAGIC = b"EMQF"
VERSION = 1
HEADER_BYTES = 56
LARGEST_PAYLOAD = (1 << 32) - 8
_CHECKED = struct.Struct("<4sBBBBIIQQQII")
_HEADER = struct.Struct("<4sBBBBIIQQQIIQ")
_CHECKSUM = struct.Struct("<Q")
_LARGEST_LAG = (1 << 32) - 1
CHECKED_BODIES = 1
"""A flag: checksums of the single bodies follow the record batch (``bodies.py``)."""

Chunk: TypeAlias = bytes | memoryview | pa.Buffer


class Encoding(IntEnum):
    """How the payload holds the batch. The number is stored."""

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
        """Header and payload together."""
        return HEADER_BYTES + self.payload_bytes

    @property
    def synced(self) -> int:
        """Every frame with a sequence below this was durable when this frame was written."""
        return self.sequence - self.synced_lag

    @property
    def is_newer(self) -> bool:
        """Whether only a newer version of this program knows what the frame means. Ask after the checksum."""
        checkable = self.kind in MESSAGES and self.encoding == Encoding.ARROW
        known = self.kind in STORED and self.encoding <= Encoding.BARE and self.flags <= CHECKED_BODIES * checkable
        return self.version > VERSION or not known


def encode(
    kind: Kind,
    batch: pa.RecordBatch,
    *,
    sequence: int,
    position: int,
    time_us: int,
    epoch: int,
    synced: int,
    salt: int,
    lz4: bool = False,
) -> list[Chunk]:
    """One frame as chunks of bytes to be written one after the other; Misuse if the batch is not of the kind's schema."""
    schema = STORED[kind]
    if not batch.schema.equals(schema):
        raise Misuse(Code.BAD_ARGUMENT, f"a {kind.name} frame has columns {schema.names}, not {batch.schema.names}")
    if batch.num_rows == 0:
        raise Misuse(Code.BAD_ARGUMENT, f"a {kind.name} frame of no rows")
    encoding, flags = Encoding.ARROW, 0
    if kind in _BARE:
        encoding, payload = Encoding.BARE, _bare(kind, batch)
    elif lz4:
        encoding, payload = Encoding.ARROW_LZ4, _padded([_compressed(batch)])
    else:
        message = batch.serialize()
        payload = _padded([message])
        if kind in MESSAGES and batch.num_rows > 1:
            flags = CHECKED_BODIES
            payload.append(bodies.checksums(message, kind, sequence, salt))
    size = sum(len(chunk) for chunk in payload)
    if size > LARGEST_PAYLOAD:
        raise Misuse(Code.BATCH_TOO_LARGE, f"a frame of {size} bytes; the format ends at {LARGEST_PAYLOAD}")
    lag = min(sequence - synced, _LARGEST_LAG)
    head = _CHECKED.pack(
        MAGIC, VERSION, kind, encoding, flags, size, batch.num_rows, sequence, position, time_us, epoch, lag
    )
    digest = xxhash.xxh3_64(head, seed=salt)
    for chunk in payload:
        digest.update(chunk)
    return [head + _CHECKSUM.pack(digest.intdigest()), *payload]


def size_bound(batch: pa.RecordBatch) -> int:
    """Bytes that a frame of this batch takes at most, whatever its encoding: what to ``reserve`` for it."""
    size = int(pa.ipc.get_record_batch_size(batch))
    # LZ4 can only lose a little: 1/255 of the content, and some 32 bytes for each buffer.
    return int(HEADER_BYTES + size + size // 250 + 64 * (2 + 3 * batch.num_columns) + bodies.size_of(batch.num_rows))


def read_header(data: pa.Buffer | memoryview, offset: int) -> FrameHeader:
    """The 56 bytes at ``offset`` as a header, whatever they are."""
    return FrameHeader._make(_HEADER.unpack_from(data, offset))


def checks(data: memoryview, offset: int, header: FrameHeader, salt: int) -> bool:
    """Whether the checksum of the frame at ``offset`` (which must lie within ``data``) is right."""
    digest = xxhash.xxh3_64(data[offset : offset + _CHECKED.size], seed=salt)
    digest.update(data[offset + HEADER_BYTES : offset + header.frame_bytes])
    return bool(digest.intdigest() == header.checksum)


def decode(data: pa.Buffer, offset: int, header: FrameHeader, file: str) -> pa.RecordBatch:
    """The batch of a checked frame, its columns lying in ``data`` itself (LZ4 apart); Corrupt with the place if it is none."""
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
    except MemoryError as problem:  # Arrow's is one, and an ArrowException, too: the frame is as it was
        raise error(Code.OUT_OF_RESOURCES, f"no memory to read a frame: {problem}") from problem
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise DamagedLog(file, offset, header.sequence, f"the frame does not decode: {problem}") from problem
    if batch.num_rows != header.rows:
        what = f"the frame holds {batch.num_rows} rows, its header says {header.rows}"
        raise DamagedLog(file, offset, header.sequence, what)
    return batch


def _compressed(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch's message in a compressed stream: what follows the schema's."""
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
    writer.write_batch(batch)
    end = sink.tell()
    start = batch.schema.serialize().size
    return sink.getvalue().slice(start, end - start)


def _padded(chunks: list[Chunk]) -> list[Chunk]:
    rest = -sum(len(chunk) for chunk in chunks) % 8
    return [*chunks, bytes(rest)] if rest else chunks


def _widest_first(schema: pa.Schema) -> list[tuple[int, int]]:
    """Column numbers and bytes of a value, in the order in which bare columns are stored."""
    widths = [(i, type_.bit_width // 8) for i, type_ in enumerate(schema.types)]
    return sorted(widths, key=lambda column: -column[1])


_BARE = {kind: _widest_first(schema) for kind, schema in STORED.items() if is_fixed_width(schema)}
"""The columns of each kind that is stored as bare columns."""


def _bare(kind: Kind, batch: pa.RecordBatch) -> list[Chunk]:
    chunks: list[Chunk] = []
    columns, size = batch.columns, batch.num_rows
    for i, width in _BARE[kind]:
        column = columns[i]
        if column.null_count:
            raise Misuse(Code.BAD_ARGUMENT, f"column {batch.schema.names[i]} holds nulls")
        chunks.append(column.buffers()[1].slice(column.offset * width, size * width))
    return _padded(chunks)


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
