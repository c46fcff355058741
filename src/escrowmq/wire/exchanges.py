"""Batch exchanges: one request and one answer schema per kind, with JSON options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NotRequired, TypedDict

import pyarrow as pa

from escrowmq import schemas
from escrowmq.model import DecidedBy
from escrowmq.wire.values import Bounds, ConsumerGroup, Session

PROTOCOL_VERSION = 1


class Exchange(StrEnum):
    """The kinds of batch exchange."""

    SEND = "send"
    PREPARE = "prepare"
    END = "end"
    SETTLE = "settle"
    RECEIVE = "receive"


CHECKS_EXCHANGE = "checks"
"""Beside the batch exchanges: the one on which the broker asks a producer, see ``docs/protocol.md``."""


class Begin(TypedDict):
    """The command that begins an exchange. Options that never change may stand beside."""

    protocol: Annotated[int, "version of this protocol: 1"]
    exchange: Literal["send", "prepare", "end", "settle", "receive", "checks"]


class PrepareOptions(TypedDict):
    """Options of ``prepare``."""

    session: NotRequired[Annotated[Session, "0 or none: without one"]]


class SendOptions(PrepareOptions):
    """Options of ``send``."""

    flush: NotRequired[Annotated[Literal["sync", "async"], "`async`: answered before the sync; `sync` unless given"]]


class EndOptions(TypedDict):
    """Options of ``end``."""

    session: NotRequired[Annotated[Session, "UNKNOWN_SESSION without one"]]
    by: NotRequired[Annotated[int, Bounds(0, DecidedBy.CHECK), "0: the producer, 1: an answer to a check"]]


class SettleOptions(TypedDict):
    """Options of ``settle``."""

    group: ConsumerGroup


class ReceiveOptions(TypedDict):
    """Options of ``receive``. The answer is empty when nothing came within ``wait_ms`` (long poll)."""

    group: ConsumerGroup
    member: Annotated[int, "random number by which a consumer calls itself"]
    max_messages: NotRequired[Annotated[int, Bounds(1), "messages, at most; 1,000 unless given"]]
    max_bytes: NotRequired[Annotated[int, Bounds(1), "bytes, at most, of several messages"]]
    wait_ms: NotRequired[Annotated[int, "milliseconds to wait for the first message; 0 unless given"]]
    lease_ms: NotRequired[Annotated[int | None, Bounds(1, 1 << 40), "length of the lease; the broker's unless given"]]
    epoch: NotRequired[Annotated[int | None, "of `groups.join`, in groups that hold what is in doubt"]]


ExchangeOptions = SendOptions | PrepareOptions | EndOptions | SettleOptions | ReceiveOptions
_KINDS: dict[Exchange, tuple[pa.Schema, pa.Schema, type[ExchangeOptions]]] = {
    Exchange.SEND: (schemas.OUTGOING, schemas.PRODUCED, SendOptions),
    Exchange.PREPARE: (schemas.OUTGOING, schemas.PRODUCED, PrepareOptions),
    Exchange.END: (schemas.ENDING, schemas.ENDED, EndOptions),
    Exchange.SETTLE: (schemas.SETTLING, schemas.ENDED, SettleOptions),
    Exchange.RECEIVE: (pa.schema([]), schemas.DELIVERY, ReceiveOptions),
}
REQUEST = {kind: request for kind, (request, _, _) in _KINDS.items()}
ANSWER = {kind: answer for kind, (_, answer, _) in _KINDS.items()}
OPTIONS = {kind: options for kind, (_, _, options) in _KINDS.items()}
"""What goes with each kind of exchange: the schema of its requests, that of its answers, and the type of its options."""
