"""The lean carrier: small requests as frames on a plain TCP or Unix socket. ``docs/lean.md`` has its bytes.

Pure: nothing here knows a socket. Both sides make frames with the functions of :mod:`.requests` and :mod:`.answers`, and take
what came apart with :class:`Reader`.
"""

from escrowmq.wire.lean.answers import (
    Welcome,
    batch_answered,
    codes_answered,
    goodbye_from_broker,
    pong,
    read_answer,
    refused,
    rows_answered,
    welcome,
    withdrawn,
)
from escrowmq.wire.lean.frames import FORMAT_VERSION, HEADER_BYTES, Frame, Kind, Reader
from escrowmq.wire.lean.requests import (
    MAX_REQUEST_BYTES,
    batch_request,
    cancel,
    goodbye,
    hello,
    parcel_request,
    ping,
    read_batch,
    read_hello,
    read_parcel,
    read_receive,
    receive_request,
)

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MAX_REQUEST_BYTES",
    "Frame",
    "Kind",
    "Reader",
    "Welcome",
    "batch_answered",
    "batch_request",
    "cancel",
    "codes_answered",
    "goodbye",
    "goodbye_from_broker",
    "hello",
    "parcel_request",
    "ping",
    "pong",
    "read_answer",
    "read_batch",
    "read_hello",
    "read_parcel",
    "read_receive",
    "receive_request",
    "refused",
    "rows_answered",
    "welcome",
    "withdrawn",
]
