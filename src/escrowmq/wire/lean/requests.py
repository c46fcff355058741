"""What a client says: greetings, parcels, small batches, receives. Each as a frame, and read again by the broker.

=========  ===========================================================================================
kind       content
=========  ===========================================================================================
HELLO      ``[magic, format, protocol, token]``; the token is null: this version knows none
SEND       ``[options, rows, [instance, sequence]]``, :attr:`escrowmq.wire.Parcel.first_id`
PREPARE    the same
END        ``[options, rows]``
SETTLE     ``[options, rows]``
RECEIVE    ``[options]``
BATCH      ``[kind, options, bytes]``: one of the four kinds above, and one Arrow IPC message, without a schema
CANCEL     nothing; the number is that of a receive that is withdrawn
PING       anything of at most 64 bytes, which comes back
GOODBYE    nothing: what has begun is answered, then the broker closes; waiting receives are withdrawn
=========  ===========================================================================================
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.wire.exchanges import PROTOCOL_VERSION, REQUEST, Exchange, ExchangeOptions
from escrowmq.wire.lean.arrow import read_record_batch
from escrowmq.wire.lean.frames import FORMAT_VERSION, Kind, begun, finished, frame
from escrowmq.wire.lean.rows import (
    ENDING,
    EXCHANGE_OF,
    NUMBER_OF,
    PRODUCING,
    SETTLING,
    UNREADABLE,
    OptionsBytes,
    UInt32,
    decoder,
    encoder,
    pack_options,
    unpack_options,
)
from escrowmq.wire.parcels import Parcel

MAGIC = b"EscrowMQ"
MAX_REQUEST_BYTES = 4 << 20
"""A whole frame of a request; what is larger goes over Flight."""
MAX_PING_BYTES = 64
MAX_TOKEN_BYTES = 1024
MAX_HELLO_BYTES = 2048
"""A whole frame of a client that has not been welcomed."""

_HEADER_AT = len(begun())


class Hello(NamedTuple):
    """How a client greets."""

    magic: bytes
    format: UInt32
    protocol: UInt32
    token: Annotated[str, msgspec.Meta(max_length=MAX_TOKEN_BYTES)] | None


_read_hello = decoder(Hello)
_read_receive = decoder(tuple[OptionsBytes])
_read_batch = decoder(tuple[Annotated[int, msgspec.Meta(ge=int(Kind.SEND), le=int(Kind.SETTLE))], OptionsBytes, bytes])
_READ_ROWS = {
    Kind.SEND: decoder(PRODUCING),
    Kind.PREPARE: decoder(PRODUCING),
    Kind.END: decoder(ENDING),
    Kind.SETTLE: decoder(SETTLING),
}

# Made by the client


def hello(token: str | None = None) -> bytes:
    """The first frame of a connection."""
    return frame(Kind.HELLO, 0, encoder.encode(Hello(MAGIC, FORMAT_VERSION, PROTOCOL_VERSION, token)))


def parcel_request(number: int, parcel: Parcel) -> bytearray:
    """A parcel. It may come out larger than the broker's limit (:attr:`.Welcome.max_request_bytes`): then it is not for this carrier."""
    made, options = begun(), pack_options(parcel.options)
    content: tuple[Any, ...]
    if parcel.kind in (Exchange.SEND, Exchange.PREPARE):
        content = (options, parcel.rows, parcel.first_id)
    else:
        content = (options, parcel.rows)
    encoder.encode_into(content, made, _HEADER_AT)
    return finished(made, NUMBER_OF[parcel.kind], number)


def batch_request(number: int, kind: Exchange, batch: pa.RecordBatch, options: ExchangeOptions) -> bytearray:
    """A batch of schema ``REQUEST[kind]``, not of a receive. Of its size: see :func:`parcel_request`."""
    made = begun()
    encoder.encode_into((NUMBER_OF[kind], pack_options(options), memoryview(batch.serialize())), made, _HEADER_AT)
    return finished(made, Kind.BATCH, number)


def receive_request(number: int, options: ExchangeOptions) -> bytes:
    """A receive."""
    return frame(Kind.RECEIVE, number, encoder.encode((pack_options(options),)))


def cancel(number: int) -> bytes:
    """Withdraw the receive with this number. It is answered all the same: with what came before, or WITHDRAWN."""
    return frame(Kind.CANCEL, number)


def ping(content: bytes = b"") -> bytes:
    """Is somebody there? The same content comes back, at once."""
    return frame(Kind.PING, 0, content)


def goodbye() -> bytes:
    """The client sends no more."""
    return frame(Kind.GOODBYE, 0)


# Read by the broker


def read_hello(content: memoryview) -> Hello:
    """Rejected(BAD_REQUEST) unless it is one that this version understands."""
    try:
        said: Hello = _read_hello(content)
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"the greeting cannot be read: {problem}") from None
    if said.magic != MAGIC:
        raise error(Code.BAD_REQUEST, "the greeting is not one of EscrowMQ")
    if said.format != FORMAT_VERSION or said.protocol != PROTOCOL_VERSION:
        raise error(
            Code.BAD_REQUEST,
            f"format {said.format} of protocol {said.protocol}; this broker speaks format {FORMAT_VERSION} of protocol {PROTOCOL_VERSION}",
        )
    if said.token is not None:
        raise error(Code.BAD_REQUEST, "this broker takes no tokens")
    return said


def read_parcel(kind: int, content: memoryview) -> Parcel:
    """The parcel of a frame of kind SEND, PREPARE, END or SETTLE; Rejected(BAD_BATCH, BAD_REQUEST)."""
    try:
        read = _READ_ROWS[cast(Kind, kind)](content)
    except UNREADABLE as problem:
        raise error(Code.BAD_BATCH, f"the rows cannot be read: {problem}", "see docs/lean.md") from None
    return Parcel(EXCHANGE_OF[cast(Kind, kind)], read[1], _options(read[0]), *read[2:])


def read_receive(content: memoryview) -> ExchangeOptions:
    """The options of a receive; Rejected(BAD_REQUEST)."""
    try:
        return _options(_read_receive(content)[0])
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"the receive cannot be read: {problem}") from None


def read_batch(content: memoryview) -> tuple[Exchange, pa.RecordBatch, ExchangeOptions]:
    """Rejected(BAD_BATCH, BAD_REQUEST). The batch has the kind's schema; whether its content is sound is not known yet."""
    try:
        number, options, raw = _read_batch(content)
    except UNREADABLE as problem:
        raise error(Code.BAD_BATCH, f"the batch cannot be read: {problem}", "see docs/lean.md") from None
    kind = EXCHANGE_OF[number]
    return kind, read_record_batch(raw, REQUEST[kind]), _options(options)


@lru_cache(1024)
def _options(raw: bytes) -> ExchangeOptions:
    """Shared by all requests with the same options; nobody changes them."""
    return cast(ExchangeOptions, MappingProxyType(unpack_options(raw)))
