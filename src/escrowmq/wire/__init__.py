"""The client-broker protocol: the calls of a broker, over Arrow Flight or as function calls when embedded."""

from escrowmq.wire.actions.action import Action, Call
from escrowmq.wire.exchanges import (
    ACK_VIEW_NAME,
    ANSWER,
    DEAD_LETTER_PREFIX,
    HALF_VIEW_NAME,
    OP_VIEW_NAME,
    OPTIONS,
    PROTOCOL_VERSION,
    REQUEST,
    VIEWS,
    Exchange,
    ExchangeOptions,
    ReadRequest,
)
from escrowmq.wire.link import CheckStream, Link, ask
from escrowmq.wire.packing import Json, pack_error, pack_metadata, unpack_error, unpack_json, unpack_metadata

__all__ = [
    "ACK_VIEW_NAME",
    "ANSWER",
    "DEAD_LETTER_PREFIX",
    "HALF_VIEW_NAME",
    "OPTIONS",
    "OP_VIEW_NAME",
    "PROTOCOL_VERSION",
    "REQUEST",
    "VIEWS",
    "Action",
    "Call",
    "CheckStream",
    "Exchange",
    "ExchangeOptions",
    "Json",
    "Link",
    "ReadRequest",
    "ask",
    "pack_error",
    "pack_metadata",
    "unpack_error",
    "unpack_json",
    "unpack_metadata",
]
