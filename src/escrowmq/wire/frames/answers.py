"""Frames that a broker sends: its welcome, answers, rejections and checks. Encoded here, decoded by the client.

The package's docstring describes their contents.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Overloaded, Rejected, error
from escrowmq.wire.frames.columns import decode_schema, encode_batch, split_parts
from escrowmq.wire.frames.frame import (
    HEADER_BYTES,
    MORE,
    Frame,
    Kind,
    Pieces,
    begin_frame,
    finish_frame,
    frame,
    frame_start,
    size_of,
    write_size,
)
from escrowmq.wire.frames.rows import PRODUCED, UNREADABLE, UInt8, UInt32, UInt63, decoder, encoder
from escrowmq.wire.packing import LONGEST_MESSAGE, Json, unpack_json
from escrowmq.wire.parcels import Answer, Row


class Welcome(NamedTuple):
    """Identity of the broker and its limits for this connection."""

    format: UInt32
    protocol: UInt32
    version: str
    max_request_bytes: UInt63
    """Maximum size of a request frame."""
    max_requests: UInt63
    """Maximum number of unanswered requests; further ones are not read from the connection."""
    max_answer_bytes: UInt63
    """Maximum size of an answer message, all parts together."""


_Refusal = tuple[UInt8, str, str, Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None]

_read_welcome = decoder(Welcome)
_read_rows = decoder(PRODUCED)
_read_refusal = decoder(_Refusal)

# Encoded by the broker


def welcome(limits: Welcome, hello: Json) -> bytes:
    """Encode the answer to a greeting. ``hello`` is the answer to the action of that name."""
    return frame(Kind.WELCOME, 0, json.dumps(hello).encode(), encoder.encode(limits))


def rows_answer(number: int, rows: list[Row]) -> bytearray:
    """Encode the answer to a parcel of SEND or PREPARE."""
    buffer = begin_frame()
    encoder.encode_into(rows, buffer, HEADER_BYTES)
    return finish_frame(buffer, Kind.ROWS, number)


def codes_answer(number: int, codes: bytes) -> bytes:
    """Encode the answer to a parcel of END or SETTLE."""
    return frame(Kind.CODES, number, codes)


def batch_answer(number: int, batch: pa.RecordBatch) -> list[Pieces]:
    """Encode the answer to a batch or a receive: a frame for each part."""
    return _parts(Kind.BATCH, number, batch)


def part_answer(number: int, batch: pa.RecordBatch) -> list[Pieces]:
    """Encode a batch of a read: a frame for each part."""
    return _parts(Kind.PART, number, batch)


def _parts(kind: Kind, number: int, batch: pa.RecordBatch) -> list[Pieces]:
    pieces = encode_batch(batch)
    parts = split_parts(pieces)
    if len(parts) == 1:
        return [[frame_start(kind, number, size_of(pieces)), *pieces]]
    head, last = write_size(size_of(pieces)), len(parts) - 1
    return [
        [frame_start(kind, number, size_of(part), b"" if at else head, MORE if at < last else 0), *part]
        for at, part in enumerate(parts)
    ]


def schema_answer(number: int, schema: pa.Schema) -> bytes:
    """Encode the first answer to a read."""
    return frame(Kind.SCHEMA, number, schema.serialize().to_pybytes())


def done(number: int) -> bytes:
    """Encode the end of a read or a watch."""
    return frame(Kind.DONE, number)


def checks(number: int, batch: pa.RecordBatch) -> list[Pieces]:
    """Encode checks for the watch ``number``: a frame for each part."""
    return _parts(Kind.CHECKS, number, batch)


def result(number: int, answer: Json) -> bytes:
    """Encode the answer to an action."""
    return frame(Kind.RESULT, number, json.dumps(answer).encode())


def withdrawn(number: int) -> bytes:
    """Encode the answer to a receive that was withdrawn before it got a lease."""
    return frame(Kind.WITHDRAWN, number)


def refused(number: int, problem: EscrowError) -> bytes:
    """Encode the error of a rejected request, or with the number 0 of the connection. Long texts are truncated."""
    retry_after = float(problem.retry_after) if isinstance(problem, Overloaded) else None
    content = (int(problem.code), _truncate(problem.message), _truncate(problem.hint), retry_after)
    return frame(Kind.ERROR, number, encoder.encode(content))


def pong(content: bytes) -> bytes:
    """Encode the answer to a ping."""
    return frame(Kind.PONG, 0, content)


def gone() -> bytes:
    """Encode the notice that the broker stops and begins no more requests of this connection."""
    return frame(Kind.GONE, 0)


def _truncate(text: str) -> str:
    return text[:LONGEST_MESSAGE].encode(errors="replace").decode()


# Decoded by the client. Each raises Rejected(BAD_REQUEST) for unreadable content: the connection is unusable then


def read_welcome(received: Frame) -> tuple[Welcome, Json]:
    """Decode the broker's limits, and its answer to the action ``hello``."""
    return cast(Welcome, _decode(_read_welcome, received.head)), unpack_json(bytes(received.body))


def read_rows(received: Frame) -> Answer:
    """Decode the answer to a parcel: ROWS as tuples, CODES as bytes."""
    return bytes(received.body) if received.kind == Kind.CODES else cast(Answer, _decode(_read_rows, received.body))


def read_result(received: Frame) -> Json:
    """Decode the answer to an action."""
    return unpack_json(bytes(received.body))


def read_schema(received: Frame) -> pa.Schema:
    """Decode the schema of a read. Raises Rejected(BAD_BATCH) as well."""
    return decode_schema(received.body)


def read_refusal(received: Frame) -> EscrowError:
    """Decode an ERROR; it is returned, not raised. A code of a newer version becomes BAD_REQUEST with its text."""
    number, message, hint, retry_after = _decode(_read_refusal, received.body)
    try:
        return error(Code(number), message, hint, 1.0 if retry_after is None else retry_after)
    except (KeyError, ValueError):
        return Rejected(Code.BAD_REQUEST, f"error {number}: {message}", hint)


def _decode(read: Any, raw: memoryview) -> Any:
    try:
        return read(raw)
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"an answer cannot be read: {problem}") from None
