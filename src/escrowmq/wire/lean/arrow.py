"""Small record batches as bytes: one encapsulated Arrow IPC message each, without its schema, which both sides know.

A compressed body is refused before Arrow sees it: what a few kilobytes of it become has no bound (decision 0022 says what Flight's
server does about that). Whether there is one stands in the message's flatbuffer: ``Message.header`` is a ``RecordBatch``, whose fourth
field is ``compression``.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, error

_CONTINUED = b"\xff\xff\xff\xff"
_AT, _BACK, _SHORT = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")
_HEADER_TYPE, _HEADER, _COMPRESSION = 1, 2, 3
"""Fields of ``Message`` and ``RecordBatch``, counted from 0."""
_RECORD_BATCH = 3


def read_record_batch(raw: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Rejected(BAD_BATCH) for anything but a message of a batch of this schema, not compressed. Its content is not validated."""
    try:
        compressed = _compressed(raw)
    except (struct.error, ValueError, IndexError):
        raise _bad("it is no message of a record batch") from None
    if compressed:
        raise _bad("its body is compressed")
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(raw), schema)
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise _bad(str(problem)) from None


def _bad(why: str) -> EscrowError:
    return error(Code.BAD_BATCH, f"the batch cannot be read: {why}")


def _compressed(raw: bytes) -> bool:
    """Whether the message's batch says how it is compressed. ValueError for what is no message of a batch."""
    if raw[:4] != _CONTINUED:
        raise ValueError("no encapsulated message")
    start = 8  # of the flatbuffer; before it the mark and the length
    message = start + _number(_AT, raw, start)
    kind = _field(raw, message, _HEADER_TYPE)
    header = _field(raw, message, _HEADER)
    if kind is None or header is None or raw[kind] != _RECORD_BATCH:
        raise ValueError("no record batch")
    return _field(raw, header + _number(_AT, raw, header), _COMPRESSION) is not None


def _field(raw: bytes, table: int, number: int) -> int | None:
    """Where a field of a table lies; None if the table lacks it."""
    shape = table - _number(_BACK, raw, table)
    entry = 4 + 2 * number
    if shape < 0 or entry + 2 > _number(_SHORT, raw, shape):
        return None
    offset = _number(_SHORT, raw, shape + entry)
    return table + offset if offset else None


def _number(form: struct.Struct, raw: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("before the message")
    (number,) = form.unpack_from(raw, at)
    return int(number)
