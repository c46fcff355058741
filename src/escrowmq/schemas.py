"""Every Arrow schema, with units.

Times are ``int64`` microseconds since 1970 by the broker's clock (names end in ``_us``); positions, offsets and
ordinals are ``int64``; -1 means "none". A *position* numbers a row of the log, an *offset* a place in a queue. A
*queue* is a number within its topic; a *queue id* numbers all queues of a shard.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pyarrow as pa

PROPERTIES = pa.map_(pa.utf8(), pa.utf8())
ID = pa.binary(16)

TRANSACTION_ID_DTYPE = np.dtype([("shard", ">u4"), ("epoch", ">u4"), ("position", ">u8")])
"""How the 16 bytes of a transaction id read as a NumPy record."""

MESSAGE_ID_DTYPE = np.dtype([("instance", ">u8"), ("sequence", ">u8")])
"""How the 16 bytes of a message id read as a NumPy record; clients count ``sequence`` up within one ``instance``."""


def _schema(*fields: tuple[str, pa.DataType] | tuple[str, pa.DataType, bool]) -> pa.Schema:
    """A schema; fields are not nullable unless their third item is True."""
    return pa.schema([pa.field(f[0], f[1], nullable=len(f) > 2 and bool(f[2])) for f in fields])


_CONTENT: list[tuple[str, pa.DataType] | tuple[str, pa.DataType, bool]] = [
    ("topic", pa.utf8()),
    ("key", pa.utf8(), True),
    ("tag", pa.utf8(), True),
    ("properties", PROPERTIES, True),
    ("body", pa.binary()),
    ("message_id", ID),
]

OUTGOING = _schema(
    *_CONTENT,
    ("queue", pa.int32()),  # -1: the broker chooses
    ("born_us", pa.int64()),  # the client's clock; carried, never computed with
    ("delay_us", pa.int64()),  # 0: none; counted from the broker's receipt
    ("immunity_us", pa.int64()),  # before the first check; 0: transaction_timeout
    ("transaction", ID, True),  # the transaction to join; null: a new one (half messages only)
)
"""Messages on their way to a broker, plain or half; one row per message."""

PRODUCED = _schema(
    ("code", pa.uint8()),  # errors.Code
    ("position", pa.int64()),
    ("queue", pa.int32()),
    ("offset", pa.int64()),  # -1: half or delayed
    ("transaction", ID, True),  # half messages
)
"""The broker's answer to OUTGOING, row for row."""

ENDING = _schema(("transaction", ID), ("outcome", pa.uint8()))
"""Decisions on their way to a broker; ``outcome`` is model.Outcome."""

ENDED = _schema(("code", pa.uint8()))
"""The broker's answer to ENDING and SETTLING, row for row."""

DELIVERY = _schema(
    *_CONTENT,
    ("queue", pa.int32()),
    ("offset", pa.int64()),
    ("born_us", pa.int64()),
    ("stored_us", pa.int64()),  # when the message (for a half message: its prepare) became durable
    ("position", pa.int64()),
    ("transaction", ID, True),
    ("lease", pa.int64()),  # -1: browsed, not leased
    ("attempt", pa.int32()),  # 1 the first time; 0: browsed
)
"""Messages on their way to a consumer."""

SETTLING = _schema(
    ("lease", pa.int64()),
    ("start", pa.int64()),  # first offset
    ("count", pa.int64()),  # offsets start .. start+count-1; those not in the lease are passed over
    ("act", pa.uint8()),  # model.Act
    ("delay_us", pa.int64()),  # NACK: until redelivery, -1: the group's back-off. EXTEND: from now. Others: ignored
    ("cause", pa.utf8(), True),  # NACK: why; kept with the dead letter
)
"""Acknowledgements on their way to a broker: runs of offsets of one lease."""

CHECKS = _schema(
    ("transaction", ID),
    ("attempt", pa.int32()),
    *_CONTENT,
    ("born_us", pa.int64()),
)
"""Questions on their way to a producer: one row per message, the rows of one transaction next to each other."""

OP_VIEW = _schema(
    ("position", pa.int64()),  # of the decision
    ("half_position", pa.int64()),  # of the transaction's first half message
    ("transaction", ID),
    ("state", pa.uint8()),  # model.TransactionState that it came to
    ("decided_by", pa.uint8()),
    ("decided_us", pa.int64()),
)
"""The system view ``%op``: all decisions, each naming its half message."""

ACK_VIEW = _schema(
    ("position", pa.int64()),  # of the acknowledgement
    ("acked_us", pa.int64()),
    ("group", pa.utf8(), True),
    ("topic", pa.utf8(), True),
    ("queue", pa.int32(), True),
    ("start", pa.int64()),  # first offset
    ("count", pa.int64()),  # what the lease held of the offsets start .. start+count-1 is acknowledged
    ("attempt", pa.int32(), True),  # 1 the first time
    ("lease", pa.int64()),
)
"""The system view ``%acks``: what consumers acknowledged, one row per run of offsets. Nullable columns are null when the lease's
own row has left with retention."""

HALF_VIEW = _schema(
    *_CONTENT,
    ("queue", pa.int32()),
    ("position", pa.int64()),
    ("born_us", pa.int64()),
    ("stored_us", pa.int64()),
    ("due_us", pa.int64()),
    ("transaction", ID),
    ("state", pa.uint8()),  # as of the read
    ("checks", pa.int32()),
)
"""The system view ``%half``: all half messages, decided or not, with what became of them."""


class Kind(IntEnum):
    """What a frame of the log holds. The number is stored; never reuse one."""

    OPENED = 1
    RULES = 2
    TOPIC = 3
    SESSION = 4
    PLAIN = 5
    HALF = 6
    DECIDED = 7
    CHECKED = 8
    PARKED = 9
    REOPENED = 10
    RELEASED = 11
    GROUP = 12
    LEASED = 13
    ACKED = 14
    RETRIED = 15
    DEAD = 16
    DEAD_SETTLED = 17
    EXTENDED = 18
    TRIMMED = 19
    BATCH_DECIDED = 20
    JOINED = 21
    KEPT = 22
    HANDED = 23
    FENCED = 24
    FORGOTTEN = 25


_STORED = _schema(
    *_CONTENT,
    ("queue", pa.int32()),
    ("queue_id", pa.int32()),
    ("born_us", pa.int64()),
    ("visible_us", pa.int64()),  # not before this; 0: at once
    ("due_us", pa.int64()),  # half: the first check; plain: 0
    ("transaction", pa.int64()),  # half: position of the transaction's first half message; plain: -1
    ("epoch", pa.uint32()),  # the producer session; 0: none
)

STORED: dict[Kind, pa.Schema] = {
    Kind.OPENED: _schema(("shard", pa.uint32()), ("version", pa.utf8())),
    Kind.RULES: _schema(("rules", pa.utf8())),  # JSON of ledger.Rules
    Kind.TOPIC: _schema(("name", pa.utf8()), ("queues", pa.int32()), ("first_queue_id", pa.int32())),
    Kind.SESSION: _schema(
        ("epoch", pa.uint32()),
        ("group", pa.utf8()),
        ("instance", pa.utf8()),
        ("transactional", pa.bool_()),
    ),
    Kind.PLAIN: _STORED,
    Kind.HALF: _STORED,
    Kind.DECIDED: _schema(
        ("transaction", pa.int64()),
        ("state", pa.uint8()),
        ("decided_by", pa.uint8()),
        ("epoch", pa.uint32()),
    ),
    Kind.CHECKED: _schema(("transaction", pa.int64())),
    Kind.PARKED: _schema(("transaction", pa.int64())),
    Kind.REOPENED: _schema(("transaction", pa.int64())),
    Kind.RELEASED: _schema(
        ("position", pa.int64()), ("delayed", pa.int64())
    ),  # "delayed": ordinal in ledger/queues/delays.py
    Kind.GROUP: _schema(("name", pa.utf8()), ("subscription", pa.utf8())),  # JSON of ledger.Subscription
    Kind.LEASED: _schema(
        ("lease", pa.int64()),
        ("group", pa.int32()),
        ("queue_id", pa.int32()),
        ("start", pa.int64()),
        ("count", pa.int64()),
        ("attempt", pa.int32()),
        ("member", pa.int64()),
        ("deadline_us", pa.int64()),
    ),
    Kind.ACKED: _schema(("lease", pa.int64()), ("start", pa.int64()), ("count", pa.int64())),
    Kind.RETRIED: _schema(
        ("lease", pa.int64()),
        ("start", pa.int64()),
        ("count", pa.int64()),
        (
            "due_us",
            pa.int64(),
        ),  # -1: let go at once, not charged; -2: the same, and nobody saw it (ledger/groups/settling.py)
    ),
    Kind.DEAD: _schema(
        ("lease", pa.int64()),
        ("start", pa.int64()),
        ("count", pa.int64()),
        ("cause", pa.utf8()),
    ),
    Kind.DEAD_SETTLED: _schema(
        ("group", pa.int32()),
        ("queue_id", pa.int32()),
        ("offset", pa.int64()),
        ("act", pa.uint8()),  # 0 retry, 1 discard
    ),
    Kind.EXTENDED: _schema(("lease", pa.int64()), ("deadline_us", pa.int64())),
    Kind.TRIMMED: _schema(("position", pa.int64()), ("visible_us", pa.int64())),
    Kind.BATCH_DECIDED: _schema(
        ("transaction", pa.int64()),  # -1: the batch has none
        ("state", pa.uint8()),
        ("decided_by", pa.uint8()),
        ("epoch", pa.uint32()),
        ("writer", ID),  # the same in every row, as is batch
        ("batch", pa.int64()),
    ),
    Kind.JOINED: _schema(
        ("epoch", pa.int64()),  # position of this row; what the member holds is in doubt from now on
        ("group", pa.int32()),
        ("member", pa.int64()),
        ("process", pa.int64()),  # random, of the client's: tells a new process from one that came back
        ("instance", pa.utf8()),
    ),
    Kind.KEPT: _schema(("lease", pa.int64()), ("end", pa.int64())),  # offsets below are not in doubt
    Kind.HANDED: _schema(
        ("lease", pa.int64()),
        ("old", pa.int64()),  # the lease that held them in doubt
        ("start", pa.int64()),
        ("count", pa.int64()),
        ("attempt", pa.int32()),
    ),
    Kind.FENCED: _schema(("epoch", pa.int64()), ("group", pa.int32()), ("member", pa.int64())),
    Kind.FORGOTTEN: _schema(("epoch", pa.uint32())),  # producer sessions; a group and its writer go with the last of it
}
"""The schema of each kind of frame, version 1 (see log/FORMAT.md)."""


def is_fixed_width(schema: pa.Schema) -> bool:
    """Whether every column is of a fixed byte width: such frames are stored as bare columns, without Arrow metadata."""
    return all(pa.types.is_integer(f.type) for f in schema)


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """A batch of no rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
