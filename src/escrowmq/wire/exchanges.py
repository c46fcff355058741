"""Calls that carry batches: exchanges, with a request schema, an answer schema and JSON options per kind, and reads."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NotRequired, TypedDict

import pyarrow as pa

from escrowmq import schemas
from escrowmq.model import DecidedBy
from escrowmq.wire.values import Bounds, ConsumerGroup, QueueNumber, Session, TimeUs

PROTOCOL_VERSION = 1


class Exchange(StrEnum):
    """The kinds of batch exchange."""

    SEND = "send"
    PREPARE = "prepare"
    END = "end"
    SETTLE = "settle"
    RECEIVE = "receive"


class ProducingOptions(TypedDict):
    """Options of ``prepare`` and ``send``."""

    session: NotRequired[Annotated[Session, "0 or none: without one"]]


class PrepareOptions(ProducingOptions):
    """Options of ``prepare``."""

    replace: NotRequired[Annotated[bool, "a later prepare of an undecided message id replaces its content"]]


class SendOptions(ProducingOptions):
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
    """Options of ``receive``. The answer is empty if nothing arrived within ``wait_ms`` (long poll)."""

    group: ConsumerGroup
    member: Annotated[int, "random number that identifies the consumer"]
    max_messages: NotRequired[Annotated[int, Bounds(1), "messages, at most; 1,000 unless given"]]
    max_bytes: NotRequired[Annotated[int, Bounds(1), "bytes, at most, of several messages"]]
    wait_ms: NotRequired[Annotated[int, "milliseconds to wait for the first message; 0 unless given"]]
    lease_ms: NotRequired[Annotated[int | None, Bounds(1, 1 << 40), "length of the lease; the broker's unless given"]]
    one_by_one: NotRequired[
        Annotated[bool, "the consumer handles messages singly: a message at its last attempt is delivered alone"]
    ]
    epoch: NotRequired[Annotated[int | None, "from `groups.join`, in groups with `in_doubt` `hold`"]]
    return_rest: NotRequired[
        Annotated[bool, "messages that do not fit are returned, not kept for the member's next receive"]
    ]


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
"""Request schema, answer schema and options type of each kind of exchange."""


# Reads

HALF_VIEW_NAME = "%half"
OP_VIEW_NAME = "%op"
ACK_VIEW_NAME = "%acks"
GROUP_ACT_VIEW_NAME = "%group-acts"
VIEWS: dict[str, pa.Schema] = {
    HALF_VIEW_NAME: schemas.HALF_VIEW,
    OP_VIEW_NAME: schemas.OP_VIEW,
    ACK_VIEW_NAME: schemas.ACK_VIEW,
    GROUP_ACT_VIEW_NAME: schemas.GROUP_ACT_VIEW,
}
"""System views that are read by log position."""
DAMAGED_COLUMN = "damaged"
"""Optional column of every source, sent if requested by name: position of log damage at the row, else null."""


def read_schema(source: str, *, damaged: bool) -> pa.Schema:
    """Return the columns of a source. With ``damaged`` that column is added, and all are nullable: the content of a
    damaged row is null."""
    own = VIEWS.get(source, schemas.DELIVERY)
    if not damaged:
        return own
    return pa.schema([*(field.with_nullable(True) for field in own), pa.field(DAMAGED_COLUMN, pa.utf8())])


DEAD_LETTER_PREFIX = "%dead-letters."  # + consumer group: its dead letters, readable like a topic
FILE_PREFIX = "%file."  # + the name of a file listed by the action backup.files; its rows are pieces of it, in order


class ReadRequest(TypedDict):
    """Source, rows and columns to read; the source is a queue, a system view, dead letters of a group, or a log file.

    The filters, from ``tags`` on, are applied before rows are counted. Columns that are not requested are neither read
    nor sent.
    """

    source: Annotated[
        str, "a topic, a system view (`%half`, `%op`, `%acks`, `%group-acts`), `%dead-letters.GROUP`, or `%file.NAME`"
    ]
    queue: NotRequired[Annotated[QueueNumber, "0 unless given"]]
    start: NotRequired[
        Annotated[
            int | None,
            "offset (view: log position; dead letters: time of death, microseconds since 1970; file: byte);"
            " none, or 0 without `end`: the first",
        ]
    ]
    end: NotRequired[
        Annotated[int | None, "offset or position to stop before; none: the durable end; of a file: byte, required"]
    ]
    max_rows: NotRequired[Annotated[int | None, "rows, at most"]]
    columns: NotRequired[Annotated[list[str] | None, "columns to send, in this order; none: all but `damaged`"]]
    tags: NotRequired[Annotated[list[str], "messages with one of these tags; not for `%op`, `%acks` and `%group-acts`"]]
    key: NotRequired[Annotated[str, "messages with this key; not for `%op`, `%acks` and `%group-acts`"]]
    stored_from_us: NotRequired[
        Annotated[TimeUs, "stored then or later (`%op`: decided, `%acks`: acknowledged, `%group-acts`: done)"]
    ]
    stored_until_us: NotRequired[Annotated[TimeUs, "stored (decided, acknowledged) before then"]]
    reader: NotRequired[Annotated[str, "name of the streaming query that reads a topic; `standing` lists it"]]
    batch: NotRequired[Annotated[int, "of a `reader`: the number of its batch"]]
    group: NotRequired[Annotated[str, "of this consumer group; for `%acks` and `%group-acts` only"]]
