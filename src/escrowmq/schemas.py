"""Every Arrow schema, with units.

Times are ``int64`` microseconds since 1970 by the broker's clock (names end in ``_us``); positions, offsets and
ordinals are ``int64``; -1 means "none". A *position* numbers a row of the log, an *offset* a place in a queue. A
*queue* is a number within its topic; a *queue id* numbers all queues of a shard.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import pyarrow as pa

PROPERTIES = pa.map_(pa.utf8(), pa.utf8())
ID = pa.binary(16)

TRANSACTION_ID_DTYPE = np.dtype([("shard", ">u4"), ("epoch", ">u4"), ("position", ">u8")])
"""How the 16 bytes of a transaction id read as a NumPy record."""

MESSAGE_ID_DTYPE = np.dtype([("instance", ">u8"), ("sequence", ">u8")])
"""How the 16 bytes of a message id read as a NumPy record; clients count ``sequence`` up within one ``instance``."""


_BINARY, _BOOL, _UTF8 = pa.binary(), pa.bool_(), pa.utf8()
_INT32, _INT64, _UINT8, _UINT32 = pa.int32(), pa.int64(), pa.uint8(), pa.uint32()


class _Nullable(NamedTuple):
    type: pa.DataType


def _schema(**columns: pa.DataType | _Nullable) -> pa.Schema:
    fields = {name: c if isinstance(c, _Nullable) else (c, False) for name, c in columns.items()}
    return pa.schema([pa.field(name, *field) for name, field in fields.items()])


_CONTENT: dict[str, pa.DataType | _Nullable] = {
    "topic": _UTF8,
    "key": _Nullable(_UTF8),
    "tag": _Nullable(_UTF8),
    "properties": _Nullable(PROPERTIES),
    "body": _BINARY,
    "message_id": ID,
}

OUTGOING = _schema(
    **_CONTENT,
    queue=_INT32,  # -1: the broker chooses
    born_us=_INT64,  # the client's clock; carried, never computed with
    delay_us=_INT64,  # 0: none; counted from the broker's receipt
    immunity_us=_INT64,  # before the first check; 0: transaction_timeout
    transaction=_Nullable(ID),  # the transaction to join; null: a new one (half messages only)
)
"""Messages on their way to a broker, plain or half; one row per message."""

PRODUCED = _schema(
    code=_UINT8,  # errors.Code
    position=_INT64,
    queue=_INT32,
    offset=_INT64,  # -1: half or delayed
    transaction=_Nullable(ID),  # half messages
)
"""The broker's answer to OUTGOING, row for row."""

ENDING = _schema(transaction=ID, outcome=_UINT8)
"""Decisions on their way to a broker; ``outcome`` is model.Outcome."""

ENDED = _schema(code=_UINT8)
"""The broker's answer to ENDING and SETTLING, row for row."""

DELIVERY = _schema(
    **_CONTENT,
    queue=_INT32,
    offset=_INT64,
    born_us=_INT64,
    stored_us=_INT64,  # when the message (for a half message: its prepare) became durable
    position=_INT64,
    transaction=_Nullable(ID),
    lease=_INT64,  # -1: browsed, not leased
    attempt=_INT32,  # 1 the first time; 0: browsed
)
"""Messages on their way to a consumer."""

SETTLING = _schema(
    lease=_INT64,
    start=_INT64,  # first offset
    count=_INT64,  # offsets start .. start+count-1; those not in the lease are passed over
    act=_UINT8,  # model.Act
    delay_us=_INT64,  # NACK: until redelivery, -1: the group's back-off. EXTEND: from now. Others: ignored
    cause=_Nullable(_UTF8),  # NACK: why; kept with the dead letter
)
"""Acknowledgements on their way to a broker: runs of offsets of one lease."""

FILE_PIECE = _schema(start=_INT64, content=_BINARY)
"""A piece of a file of the log on its way to a backup: from which byte on, and its bytes."""

CHECKS = _schema(
    transaction=ID,
    attempt=_INT32,
    **_CONTENT,
    born_us=_INT64,
)
"""Questions on their way to a producer: one row per message, the rows of one transaction next to each other."""

OP_VIEW = _schema(
    position=_INT64,  # of the decision
    half_position=_INT64,  # of the transaction's first half message
    transaction=ID,
    state=_UINT8,  # model.TransactionState that it came to
    decided_by=_UINT8,
    decided_us=_INT64,
)
"""The system view ``%op``: all decisions, each naming its half message."""

ACK_VIEW = _schema(
    position=_INT64,  # of the acknowledgement
    acked_us=_INT64,
    group=_Nullable(_UTF8),
    topic=_Nullable(_UTF8),
    queue=_Nullable(_INT32),
    start=_INT64,  # first offset
    count=_INT64,  # what the lease held of the offsets start .. start+count-1 is acknowledged
    attempt=_Nullable(_INT32),  # 1 the first time
    lease=_INT64,
)
"""The system view ``%acks``: what consumers acknowledged, one row per run of offsets. Nullable columns are null when
the lease's own row has left with retention.
"""

GROUP_ACT_VIEW = _schema(
    position=_INT64,  # of the act
    acted_us=_INT64,
    group=_Nullable(_UTF8),
    topic=_Nullable(_UTF8),
    queue=_Nullable(_INT32),
    offset=_INT64,  # reset: where the group continues
    act=_UTF8,  # retry, discard, edit, reset
    message_id=_Nullable(ID),  # edit: that of the message which the group gets instead; null else, as all that follows
    edited_from=_Nullable(_UTF8),  # the id of the message that it replaced, in hex
    key=_Nullable(_UTF8),
    tag=_Nullable(_UTF8),
    properties=_Nullable(PROPERTIES),
    body=_Nullable(_BINARY),
)
"""The system view ``%group-acts``: what persons did to places of consumer groups, oldest first. ``group`` is null if it
was deleted and another one has its name now.
"""

HALF_VIEW = _schema(
    **_CONTENT,
    queue=_INT32,
    position=_INT64,
    born_us=_INT64,
    stored_us=_INT64,
    due_us=_INT64,
    transaction=ID,
    state=_UINT8,  # as of the read
    checks=_INT32,
)
"""The system view ``%half``: all half messages, decided or not, with what became of them."""


class Kind(IntEnum):
    """The kind of a frame of the log. The number is stored; never reuse one."""

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
    KEYED = 26
    PRODUCERS = 27
    ALTERED = 28
    BURIED = 29
    OWNED = 30
    GROUP_RESET = 31
    GROUP_PAUSED = 32
    GROUP_DELETED = 33
    EDITED = 40
    TOPIC_ALTERED = 41
    TOPIC_DELETED = 42
    CUT = 43
    FAILED = 44


_STORED = _schema(
    **_CONTENT,
    queue=_INT32,
    queue_id=_INT32,
    born_us=_INT64,
    visible_us=_INT64,  # not before this; 0: at once
    due_us=_INT64,  # half: the first check; plain: 0
    transaction=_INT64,  # half: position of the transaction's first half message; plain: -1
    epoch=_UINT32,  # the producer session; 0: none
)

STORED: dict[Kind, pa.Schema] = {
    Kind.OPENED: _schema(shard=_UINT32, version=_UTF8),
    Kind.RULES: _schema(rules=_UTF8),  # JSON of ledger.Rules
    Kind.TOPIC: _schema(name=_UTF8, queues=_INT32, first_queue_id=_INT32),
    Kind.SESSION: _schema(epoch=_UINT32, group=_UTF8, instance=_UTF8, transactional=_BOOL),
    Kind.PLAIN: _STORED,
    Kind.HALF: _STORED,
    Kind.DECIDED: _schema(transaction=_INT64, state=_UINT8, decided_by=_UINT8, epoch=_UINT32),
    Kind.CHECKED: _schema(transaction=_INT64),
    Kind.PARKED: _schema(transaction=_INT64),
    Kind.REOPENED: _schema(transaction=_INT64),
    Kind.RELEASED: _schema(position=_INT64, delayed=_INT64),  # "delayed": ordinal in ledger/queues/delays.py
    Kind.GROUP: _schema(name=_UTF8, subscription=_UTF8),  # JSON of ledger.Subscription
    Kind.LEASED: _schema(
        lease=_INT64,
        group=_INT32,
        queue_id=_INT32,
        start=_INT64,
        count=_INT64,
        attempt=_INT32,
        member=_INT64,
        deadline_us=_INT64,
    ),
    Kind.ACKED: _schema(lease=_INT64, start=_INT64, count=_INT64),
    Kind.RETRIED: _schema(
        lease=_INT64,
        start=_INT64,
        count=_INT64,
        due_us=_INT64,  # -1: let go at once, not charged; -2: the same, and nobody saw it (ledger/groups/settling.py)
    ),
    Kind.DEAD: _schema(lease=_INT64, start=_INT64, count=_INT64, cause=_UTF8),
    Kind.DEAD_SETTLED: _schema(
        group=_INT32,
        queue_id=_INT32,
        offset=_INT64,
        act=_UINT8,  # 0 retry, 1 discard
    ),
    Kind.EDITED: pa.schema(  # what one group gets in place of a dead letter: a message, and where it stands
        [
            *_STORED,
            *_schema(group=_INT32, offset=_INT64, position=_INT64),  # of the queue `queue_id`; position of this row
        ]
    ),
    Kind.EXTENDED: _schema(lease=_INT64, deadline_us=_INT64),
    Kind.TRIMMED: _schema(position=_INT64, visible_us=_INT64),
    Kind.BATCH_DECIDED: _schema(
        transaction=_INT64,  # -1: the batch has none
        state=_UINT8,
        decided_by=_UINT8,
        epoch=_UINT32,
        writer=ID,  # the same in every row, as is batch
        batch=_INT64,
    ),
    Kind.JOINED: _schema(
        epoch=_INT64,  # position of this row; what the member holds is in doubt from now on
        group=_INT32,
        member=_INT64,
        process=_INT64,  # random, of the client's: tells a new process from one that came back
        instance=_UTF8,
    ),
    Kind.KEPT: _schema(lease=_INT64, end=_INT64),  # offsets below are not in doubt
    Kind.HANDED: _schema(
        lease=_INT64,
        old=_INT64,  # the lease that held them in doubt
        start=_INT64,
        count=_INT64,
        attempt=_INT32,
    ),
    Kind.FENCED: _schema(epoch=_INT64, group=_INT32, member=_INT64),
    Kind.BURIED: _schema(  # as DEAD, of what could not be handed out
        lease=_INT64,
        start=_INT64,
        count=_INT64,
        cause=_UTF8,
    ),
    Kind.FORGOTTEN: _schema(epoch=_UINT32),  # producer sessions; a group and its writer go with the last of it
    Kind.KEYED: _schema(  # retries of an ordered group; offsets that were never delivered become such
        group=_INT32,
        queue_id=_INT32,
        offset=_INT64,
        key=_INT64,  # the hash of the message's key (ledger/groups/order.py)
    ),
    Kind.PRODUCERS: _schema(group=_UTF8, rules=_UTF8),  # JSON of ledger.ProducerRules
    Kind.ALTERED: _schema(group=_INT32, subscription=_UTF8),  # a consumer group from now on
    Kind.OWNED: _schema(
        epoch=_UINT32,
        process=_INT64,  # random, of the client's: tells a repeat of a request from a new process
        transactional=_BOOL,  # the session is, from now on
    ),
    Kind.GROUP_RESET: _schema(  # an operator's: the group continues at this offset of the queue, its leases there end
        group=_INT32,
        queue_id=_INT32,
        offset=_INT64,
    ),
    Kind.GROUP_PAUSED: _schema(group=_INT32, topic=_UTF8, paused=_BOOL),  # topic "": the whole group
    Kind.GROUP_DELETED: _schema(position=_INT64, group=_INT32),  # position of this row; the number is not given again
    Kind.TOPIC_ALTERED: _schema(name=_UTF8, retention_us=_INT64, retention_bytes=_INT64),  # -1: the broker's, none
    Kind.TOPIC_DELETED: _schema(name=_UTF8),
    Kind.CUT: _schema(queue_id=_INT32, head=_INT64),  # a topic's retention: offsets below are gone
    Kind.FAILED: _schema(lease=_INT64, start=_INT64, count=_INT64, cause=_UTF8),  # why what RETRIED names failed
}
"""The schema of each kind of frame, version 1 (see log/FORMAT.md)."""

MESSAGES = (Kind.PLAIN, Kind.HALF)
"""The kinds of frames whose rows are messages."""


def is_fixed_width(schema: pa.Schema) -> bool:
    """Return whether every column is of a fixed byte width: such frames are stored as bare columns, without Arrow
    metadata."""
    return all(pa.types.is_integer(f.type) for f in schema)


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of no rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
