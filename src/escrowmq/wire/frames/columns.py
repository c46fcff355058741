"""Record batches as bytes: one encapsulated Arrow IPC message each, without its schema, which both sides know.

A compressed body is rejected before Arrow reads it: a few kilobytes could expand to any amount of memory. The message's
flatbuffer shows whether a body is compressed: ``Message.header`` is a ``RecordBatch``, whose fourth field is
``compression``.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, error
from escrowmq.wire.frames.frame import PART_BYTES, Piece, Pieces, size_of

SCATTER_BYTES = 128 << 10
"""Larger batches are sent from their own buffers, without a copy; for smaller ones a copy is cheaper."""
_JOIN_BYTES = 4096
"""Smaller pieces of a message are joined."""

_CONTINUED = b"\xff\xff\xff\xff"
_AT, _BACK, _SHORT = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_HEADER_TYPE, _HEADER, _COMPRESSION = 1, 2, 3
"""Fields of ``Message`` and ``RecordBatch``, counted from 0."""
_RECORD_BATCH = 3


def encode_batch(batch: pa.RecordBatch) -> Pieces:
    """Encode a batch as one message, in pieces that share the batch's memory if it is large."""
    if pa.ipc.get_record_batch_size(batch) < SCATTER_BYTES:
        return [batch.serialize()]
    sink = _Sink()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), batch.schema) as stream:
        stream.write_batch(batch)
        written = sink.pieces
        sink.pieces = []  # the end-of-stream marker is not part of the message
    return _join(written, batch.schema.serialize().size)


def _join(written: list[Any], skip: int) -> Pieces:
    """Join small pieces, without the first ``skip`` bytes: the schema."""
    pieces: Pieces = []
    small = bytearray()
    for piece in written:
        if skip:
            skip -= len(piece)
            continue
        if len(piece) < _JOIN_BYTES:
            small += piece
            continue
        if small:
            pieces.append(small)
            small = bytearray()
        pieces.append(piece)
    if small:
        pieces.append(small)
    return pieces


class _Sink:
    """A file object that collects the written pieces."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def write(self, piece: Any) -> int:
        """Keep a piece."""
        self.pieces.append(piece)
        return len(piece)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return False."""
        return False

    def seekable(self) -> bool:
        """Return False."""
        return False


def split_parts(pieces: Pieces, most: int = PART_BYTES) -> list[Pieces]:
    """Divide the pieces of a message into parts of at most ``most`` bytes, without a copy."""
    if size_of(pieces) <= most:
        return [pieces]
    parts: list[Pieces] = []
    part: Pieces = []
    left = most
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            part.append(view[:left])
            taken = len(part[-1])
            left, view = left - taken, view[taken:]
            if not left:
                parts.append(part)
                part, left = [], most
    if part:
        parts.append(part)
    return parts


def decode_batch(raw: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Decode a message; the batch shares its memory. Its content is not validated.

    Raises Rejected(BAD_BATCH) for anything but an uncompressed record batch of this schema.
    """
    try:
        compressed = _is_compressed(raw)
    except (struct.error, ValueError, IndexError):
        raise _bad("it is not a record batch message") from None
    if compressed:
        raise _bad("its body is compressed")
    buffer = pa.py_buffer(raw)
    if buffer.address % 8:  # a small frame starts at the end of the previous one
        buffer = pa.py_buffer(bytes(raw))
    try:
        return pa.ipc.read_record_batch(buffer, schema)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise _bad(str(problem)) from None


def decode_schema(raw: memoryview) -> pa.Schema:
    """Decode a schema message. Raises Rejected(BAD_BATCH)."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(bytes(raw)))
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise error(Code.BAD_BATCH, f"the schema cannot be read: {problem}") from None


def _bad(why: str) -> EscrowError:
    return error(Code.BAD_BATCH, f"the batch cannot be read: {why}")


def _is_compressed(raw: memoryview) -> bool:
    """Return whether the batch in a message is compressed. Raises ValueError for any other message."""
    if raw[:4] != _CONTINUED:
        raise ValueError("no encapsulated message")
    start = 8  # position of the flatbuffer, after mark and length
    message = start + _number(_AT, raw, start)
    kind = _field(raw, message, _HEADER_TYPE)
    header = _field(raw, message, _HEADER)
    if kind is None or header is None or raw[kind] != _RECORD_BATCH:
        raise ValueError("no record batch")
    return _field(raw, header + _number(_AT, raw, header), _COMPRESSION) is not None


def _field(raw: memoryview, table: int, number: int) -> int | None:
    """Return the position of a field of a table; None if the table lacks it."""
    shape = table - _number(_BACK, raw, table)
    entry = 4 + 2 * number
    if shape < 0 or entry + 2 > _number(_SHORT, raw, shape):
        return None
    offset = _number(_SHORT, raw, shape + entry)
    return table + offset if offset else None


def _number(form: struct.Struct, raw: memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("before the message")
    (number,) = form.unpack_from(raw, at)
    return int(number)
