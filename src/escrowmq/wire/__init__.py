"""The client-broker protocol: calls of a broker, over a connection (:mod:`escrowmq.wire.frames`) or embedded."""

from escrowmq.wire.actions.action import Action, Call
from escrowmq.wire.batches import BatchStream
from escrowmq.wire.exchanges import (
    ACK_VIEW_NAME,
    ANSWER,
    DAMAGED_COLUMN,
    DEAD_LETTER_PREFIX,
    FILE_PREFIX,
    GROUP_ACT_VIEW_NAME,
    HALF_VIEW_NAME,
    OP_VIEW_NAME,
    OPTIONS,
    PROTOCOL_VERSION,
    REQUEST,
    VIEWS,
    Exchange,
    ExchangeOptions,
    ReadRequest,
    read_schema,
)
from escrowmq.wire.link import CheckStream, Link, LoopLink, ask
from escrowmq.wire.packing import Json, unpack_json, unpack_request
from escrowmq.wire.parcels import PARCEL_BYTES, PARCEL_ROWS, Parcel, ParcelsByExchange

__all__ = [
    "ACK_VIEW_NAME",
    "ANSWER",
    "DAMAGED_COLUMN",
    "DEAD_LETTER_PREFIX",
    "FILE_PREFIX",
    "GROUP_ACT_VIEW_NAME",
    "HALF_VIEW_NAME",
    "OPTIONS",
    "OP_VIEW_NAME",
    "PARCEL_BYTES",
    "PARCEL_ROWS",
    "PROTOCOL_VERSION",
    "REQUEST",
    "VIEWS",
    "Action",
    "BatchStream",
    "Call",
    "CheckStream",
    "Exchange",
    "ExchangeOptions",
    "Json",
    "Link",
    "LoopLink",
    "Parcel",
    "ParcelsByExchange",
    "ReadRequest",
    "ask",
    "read_schema",
    "unpack_json",
    "unpack_request",
]
