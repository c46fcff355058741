"""Types of rows and options in msgpack. Decoding checks them in C: it rejects a value of another type, a number that
does not fit its column, an id without 16 bytes, a text that is not UTF-8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from escrowmq.errors import Code, error
from escrowmq.wire.exchanges import Exchange
from escrowmq.wire.frames.frame import Kind
from escrowmq.wire.parcels import PARCEL_ROWS

MAX_OPTIONS_BYTES = 4096
MAX_OPTIONS = 32


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
UInt8 = Annotated[int, msgspec.Meta(ge=0, le=255)]
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
UInt63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
UInt64 = Annotated[int, msgspec.Meta(ge=0)]  # the largest of msgpack
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
OptionsBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_OPTIONS_BYTES)]
"""Options are bytes inside a request, a map in msgpack: a repeated map is recognized without decoding."""

Outgoing = tuple[
    str,  # topic
    bytes,  # body
    str | None,  # key
    str | None,  # tag
    list[tuple[str, str]] | None,  # properties
    Id | None,  # message_id
    Int32,  # queue
    Int64,  # born_us
    Int64,  # delay_us
    Int64,  # immunity_us
    Id | None,  # transaction
]
"""The fields of :class:`~escrowmq.message.row.OutgoingRow`, in their order."""
Ending = tuple[Id, UInt8]  # transaction, outcome
Settling = tuple[Int64, Int64, Int64, UInt8, Int64, str | None]  # lease, start, count, act, delay_us, cause
Produced = tuple[UInt8, Int64, Int32, Int64, Id | None]  # code, position, queue, offset, transaction

_SOME = msgspec.Meta(min_length=1, max_length=PARCEL_ROWS)
FirstId = tuple[UInt64, UInt63]
"""Instance and sequence; the limit leaves room to count on from it."""
PRODUCING = tuple[OptionsBytes, Annotated[list[Outgoing], _SOME], FirstId]
ENDING = tuple[OptionsBytes, Annotated[list[Ending], _SOME]]
SETTLING = tuple[OptionsBytes, Annotated[list[Settling], _SOME]]
PRODUCED = Annotated[list[Produced], _SOME]

NUMBER_OF = {
    Exchange.SEND: Kind.SEND,
    Exchange.PREPARE: Kind.PREPARE,
    Exchange.END: Kind.END,
    Exchange.SETTLE: Kind.SETTLE,
    Exchange.RECEIVE: Kind.RECEIVE,
}
EXCHANGE_OF = {number: kind for kind, number in NUMBER_OF.items()}

encoder = msgspec.msgpack.Encoder()
UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Exceptions of a decoder."""


def decoder(shape: Any) -> Callable[[Any], Any]:
    """Return a function that decodes one value of this type; it raises one of ``UNREADABLE``."""
    return msgspec.msgpack.Decoder(shape).decode


_decode_options = decoder(Annotated[dict[str, int | str | bool | None], msgspec.Meta(max_length=MAX_OPTIONS)])


def pack_options(options: Mapping[str, Any]) -> bytes:
    """Encode options for a request."""
    return encoder.encode(dict(options))


def unpack_options(raw: bytes) -> dict[str, Any]:
    """Decode :func:`pack_options`. Raises Rejected(BAD_REQUEST)."""
    try:
        return dict(_decode_options(raw))
    except UNREADABLE as problem:
        raise error(Code.BAD_REQUEST, f"the options cannot be read: {problem}") from None
