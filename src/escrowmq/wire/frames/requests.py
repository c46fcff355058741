"""Frames that a client sends: encoded here, decoded by the broker. The package's docstring describes their contents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.wire.exchanges import PROTOCOL_VERSION, REQUEST, Exchange, ExchangeOptions, ReadRequest
from escrowmq.wire.frames.columns import decode_batch, encode_batch
from escrowmq.wire.frames.frame import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Frame,
    Kind,
    Pieces,
    begin_frame,
    finish_frame,
    frame,
    frame_start,
    size_of,
)
from escrowmq.wire.frames.rows import (
    ENDING,
    EXCHANGE_OF,
    NUMBER_OF,
    PRODUCING,
    SETTLING,
    UNREADABLE,
    OptionsBytes,
    UInt32,
    UInt63,
    decoder,
    encoder,
    pack_options,
    unpack_options,
)
from escrowmq.wire.packing import MAX_OPTIONS_BYTES, MAX_REQUEST_BYTES, Json, unpack_request
from escrowmq.wire.parcels import Parcel

MAGIC = b"EscrowMQ"
MAX_PING_BYTES = 64
MAX_CREDENTIAL_BYTES = 1024
MAX_HELLO_BYTES = 2048
"""Maximum size of a frame before the broker's welcome."""
FRAME_ROOM = 64 << 10
"""Bytes that a frame may have besides its batch or JSON: header, head, and Arrow's description of the batch."""
READ_CREDIT = 8 << 20
"""Bytes of a read that may be in flight; a client renews the credit at half."""


class Hello(NamedTuple):
    """The greeting of a client."""

    magic: bytes
    format: UInt32
    protocol: UInt32
    credential: Annotated[str, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)] | None


_read_hello = decoder(Hello)
_read_columns = decoder(tuple[Annotated[int, msgspec.Meta(ge=int(Kind.SEND), le=int(Kind.SETTLE))], OptionsBytes])
_read_name = decoder(Annotated[str, msgspec.Meta(max_length=256)])
_read_number = decoder(UInt63)
_READ_ROWS = {
    Kind.SEND: decoder(PRODUCING),
    Kind.PREPARE: decoder(PRODUCING),
    Kind.END: decoder(ENDING),
    Kind.SETTLE: decoder(SETTLING),
}

# Encoded by the client


def hello(credential: str | None = None) -> bytes:
    """Encode the first frame of a connection."""
    return frame(Kind.HELLO, 0, head=encoder.encode(Hello(MAGIC, FORMAT_VERSION, PROTOCOL_VERSION, credential)))


def parcel_request(number: int, parcel: Parcel) -> bytearray:
    """Encode a parcel."""
    buffer, options = begin_frame(), pack_options(parcel.options)
    content: tuple[Any, ...]
    if parcel.kind in (Exchange.SEND, Exchange.PREPARE):
        content = (options, parcel.rows, parcel.first_id)
    else:
        content = (options, parcel.rows)
    encoder.encode_into(content, buffer, HEADER_BYTES)
    return finish_frame(buffer, NUMBER_OF[parcel.kind], number)


def columns_request(number: int, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> Pieces:
    """Encode a batch of schema ``REQUEST[kind]``, in pieces that share its memory if it is large. Not for a receive."""
    pieces = encode_batch(batch)
    head = encoder.encode((NUMBER_OF[kind], pack_options(options)))
    return [frame_start(Kind.COLUMNS, number, size_of(pieces), head), *pieces]


def receive_request(number: int, options: ExchangeOptions) -> bytes:
    """Encode a receive."""
    return frame(Kind.RECEIVE, number, head=pack_options(options))


def action_request(number: int, name: str, request: Mapping[str, object]) -> bytes:
    """Encode an action."""
    return frame(Kind.ACTION, number, json.dumps(request).encode(), encoder.encode(name))


def read_request(number: int, request: ReadRequest, credit: int = READ_CREDIT) -> bytes:
    """Encode a read that may have ``credit`` bytes in flight."""
    return frame(Kind.READ, number, json.dumps(request).encode(), encoder.encode(credit))


def credit(number: int, size: int) -> bytes:
    """Encode the permission for a read to send ``size`` bytes more."""
    return frame(Kind.CREDIT, number, head=encoder.encode(size))


def watch(number: int, session: int) -> bytes:
    """Encode a subscription to the checks of a session."""
    return frame(Kind.WATCH, number, head=encoder.encode(session))


def cancel(number: int) -> bytes:
    """Encode the end of a receive, a read or a watch. The broker still answers it."""
    return frame(Kind.CANCEL, number)


def ping(content: bytes = b"") -> bytes:
    """Encode a probe of the connection: the broker returns the same content at once."""
    return frame(Kind.PING, 0, content)


def goodbye() -> bytes:
    """Encode the notice that the client sends no more requests."""
    return frame(Kind.GOODBYE, 0)


# Decoded by the broker


def read_hello(received: Frame) -> Hello:
    """Decode a greeting. Raises Rejected(BAD_REQUEST) unless it is one of this version."""
    try:
        greeting: Hello = _read_hello(received.head)
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"the greeting cannot be read: {problem}") from None
    if greeting.magic != MAGIC:
        raise error(Code.BAD_REQUEST, "the greeting is not one of EscrowMQ")
    if greeting.format != FORMAT_VERSION or greeting.protocol != PROTOCOL_VERSION:
        text = f"format {greeting.format} of protocol {greeting.protocol}"
        raise error(
            Code.BAD_REQUEST, f"{text}; this broker speaks format {FORMAT_VERSION} of protocol {PROTOCOL_VERSION}"
        )
    return greeting


def read_parcel(received: Frame) -> Parcel:
    """Decode a frame of kind SEND, PREPARE, END or SETTLE. Raises Rejected(BAD_BATCH, BAD_REQUEST)."""
    kind = cast(Kind, received.kind)
    try:
        read = _READ_ROWS[kind](received.body)
    except UNREADABLE as problem:
        raise error(Code.BAD_BATCH, f"the rows cannot be read: {problem}", "see docs/reference/protocol.md") from None
    return Parcel(EXCHANGE_OF[kind], read[1], _options(read[0]), *read[2:])


def read_receive(received: Frame) -> ExchangeOptions:
    """Decode the options of a receive. Raises Rejected(BAD_REQUEST)."""
    return _options(bytes(received.head))


def read_columns(received: Frame) -> tuple[Exchange, pa.RecordBatch, ExchangeOptions]:
    """Decode a batch, which shares the frame's memory. It has the kind's schema; its content is not validated.

    Raises Rejected(BAD_BATCH, BAD_REQUEST).
    """
    try:
        number, options = _read_columns(received.head)
    except UNREADABLE as problem:
        raise error(Code.BAD_BATCH, f"the batch cannot be read: {problem}", "see docs/reference/protocol.md") from None
    kind = EXCHANGE_OF[number]
    return kind, decode_batch(received.body, REQUEST[kind]), _options(options)


def action_name(received: Frame) -> str:
    """Return the name of an action; empty if it cannot be read."""
    try:
        return str(_read_name(received.head))
    except UNREADABLE:
        return ""


def read_action(received: Frame) -> tuple[str, Json]:
    """Decode the name and the request of an action. Raises Rejected(BAD_REQUEST, BATCH_TOO_LARGE)."""
    try:
        name = _read_name(received.head)
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"the name of the action cannot be read: {problem}") from None
    return name, unpack_request(bytes(received.body), MAX_REQUEST_BYTES) if received.body else {}


def read_read(received: Frame) -> tuple[Json, int]:
    """Decode a read request and its credit (bytes). Raises Rejected(BAD_REQUEST, BATCH_TOO_LARGE)."""
    return unpack_request(bytes(received.body[: MAX_OPTIONS_BYTES + 1])), _number(received)


def read_credit(received: Frame) -> int:
    """Decode the bytes that a read may send in addition. Raises Rejected(BAD_REQUEST)."""
    return _number(received)


def read_watch(received: Frame) -> int:
    """Decode the session of a watch. Raises Rejected(BAD_REQUEST)."""
    return _number(received)


def _number(received: Frame) -> int:
    try:
        return int(_read_number(received.head))
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"the head of frame {received.kind:#04x} is not a number: {problem}") from None


@lru_cache(1024)
def _options(raw: bytes) -> ExchangeOptions:
    """Decode options. All requests with the same options share the result, which must not be changed."""
    return cast(ExchangeOptions, MappingProxyType(unpack_options(raw)))
