"""All Arrow schemas, with units.

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
"""NumPy record layout of the 16 bytes of a transaction id."""

MESSAGE_ID_DTYPE = np.dtype([("instance", ">u8"), ("sequence", ">u8")])
"""NumPy record layout of the 16 bytes of a message id; clients increment ``sequence`` within one ``instance``."""


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
    born_us=_INT64,  # the client's clock; stored, never used in calculations
    delay_us=_INT64,  # 0: none; counted from the broker's receipt
    immunity_us=_INT64,  # before the first check; 0: transaction_timeout
    transaction=_Nullable(ID),  # the transaction to join; null: a new one (half messages only)
)
"""Messages sent to a broker, plain or half; one row per message."""

PRODUCED = _schema(
    code=_UINT8,  # errors.Code
    position=_INT64,
    queue=_INT32,
    offset=_INT64,  # -1: half or delayed
    transaction=_Nullable(ID),  # half messages
)
"""The broker's response to OUTGOING, row for row."""

ENDING = _schema(transaction=ID, outcome=_UINT8)
"""Decisions sent to a broker; ``outcome`` is model.Outcome."""

ENDED = _schema(code=_UINT8)
"""The broker's response to ENDING and SETTLING, row for row."""

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
"""Messages sent to a consumer."""

SETTLING = _schema(
    lease=_INT64,
    start=_INT64,  # first offset
    count=_INT64,  # offsets start .. start+count-1; those not in the lease are skipped
    act=_UINT8,  # model.Act
    delay_us=_INT64,  # NACK: until redelivery, -1: the group's back-off. EXTEND: from now. Others: ignored
    cause=_Nullable(_UTF8),  # NACK, REJECT: why; kept with the dead letter
)
"""Acknowledgements sent to a broker: offset ranges of one lease."""

FILE_PIECE = _schema(start=_INT64, content=_BINARY)
"""Part of a log file sent to a backup: first byte number, content."""

CHECKS = _schema(transaction=ID, attempt=_INT32, **_CONTENT, born_us=_INT64)
"""Check-back requests sent to a producer: one row per message, the rows of one transaction adjacent."""

OP_VIEW = _schema(
    position=_INT64,  # of the decision
    half_position=_INT64,  # of the transaction's first half message
    transaction=ID,
    state=_UINT8,  # model.TransactionState after the decision
    decided_by=_UINT8,
    decided_us=_INT64,
)
"""The system view ``%op``: all decisions, each with its half message."""

ACK_VIEW = _schema(
    position=_INT64,  # of the acknowledgement
    acked_us=_INT64,
    group=_Nullable(_UTF8),
    topic=_Nullable(_UTF8),
    queue=_Nullable(_INT32),
    start=_INT64,  # first offset
    count=_INT64,  # offsets start .. start+count-1 as far as the lease held them
    attempt=_Nullable(_INT32),  # 1 the first time
    lease=_INT64,
)
"""The system view ``%acks``: acknowledged messages, one row per offset range. Nullable columns are null if retention
has removed the lease's own row."""

GROUP_ACT_VIEW = _schema(
    position=_INT64,  # of the operation
    acted_us=_INT64,
    group=_Nullable(_UTF8),
    topic=_Nullable(_UTF8),
    queue=_Nullable(_INT32),
    offset=_INT64,  # reset: the offset at which the group continues
    act=_UTF8,  # retry, discard, edit, reset
    message_id=_Nullable(ID),  # edit: id of the replacement message; otherwise null, like all columns below
    edited_from=_Nullable(_UTF8),  # hex id of the replaced message
    key=_Nullable(_UTF8),
    tag=_Nullable(_UTF8),
    properties=_Nullable(PROPERTIES),
    body=_Nullable(_BINARY),
)
"""The system view ``%group-acts``: operator actions on offsets of consumer groups, oldest first. ``group`` is null if
the group was deleted and another one has its name now."""

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
"""The system view ``%half``: all half messages, decided or not, with the state of their transactions."""


class Kind(IntEnum):
    """Content type of a log frame. The number is stored; never reuse one."""

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
    GROUP_LIMITED = 45
    RECALLED = 46


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

_DECIDED = _schema(transaction=_INT64, state=_UINT8, decided_by=_UINT8, epoch=_UINT32)
_RANGE = _schema(lease=_INT64, start=_INT64, count=_INT64)
_FAILED_RANGE = pa.schema([*_RANGE, *_schema(cause=_UTF8)])

STORED: dict[Kind, pa.Schema] = {
    Kind.OPENED: _schema(shard=_UINT32, version=_UTF8),
    Kind.RULES: _schema(rules=_UTF8),  # JSON of ledger.Rules
    Kind.TOPIC: _schema(name=_UTF8, queues=_INT32, first_queue_id=_INT32),
    Kind.SESSION: _schema(epoch=_UINT32, group=_UTF8, instance=_UTF8, transactional=_BOOL),
    Kind.PLAIN: _STORED,
    Kind.HALF: _STORED,
    Kind.DECIDED: _DECIDED,
    Kind.CHECKED: _schema(transaction=_INT64),
    Kind.PARKED: _schema(transaction=_INT64),
    Kind.REOPENED: _schema(transaction=_INT64),
    Kind.RELEASED: _schema(position=_INT64, delayed=_INT64),  # "delayed": ordinal in ledger/queues/delays.py
    Kind.GROUP: _schema(name=_UTF8, subscription=_UTF8),  # JSON of ledger.Subscription
    Kind.LEASED: pa.schema(
        [
            *_schema(lease=_INT64, group=_INT32, queue_id=_INT32, start=_INT64, count=_INT64, attempt=_INT32),
            *_schema(member=_INT64, deadline_us=_INT64),
        ]
    ),
    Kind.ACKED: _RANGE,
    # due_us -1: released at once, not charged; -2: the same, never handed out (ledger/groups/settling.py)
    Kind.RETRIED: pa.schema([*_RANGE, *_schema(due_us=_INT64)]),
    Kind.DEAD: _FAILED_RANGE,
    # act: 0 retry, 1 discard
    Kind.DEAD_SETTLED: _schema(group=_INT32, queue_id=_INT32, offset=_INT64, act=_UINT8),
    # A message that one group receives instead of a dead letter, and its place (offset of the queue `queue_id`)
    Kind.EDITED: pa.schema([*_STORED, *_schema(group=_INT32, offset=_INT64, position=_INT64)]),
    Kind.EXTENDED: _schema(lease=_INT64, deadline_us=_INT64),
    Kind.TRIMMED: _schema(position=_INT64, visible_us=_INT64),
    # transaction -1: the batch has none; writer and batch are the same in every row
    Kind.BATCH_DECIDED: pa.schema([*_DECIDED, *_schema(writer=ID, batch=_INT64)]),
    # epoch: position of this row; later deliveries leased to the member are in doubt. process: random, generated by the
    # client, distinguishes a new process from one that reconnected
    Kind.JOINED: _schema(epoch=_INT64, group=_INT32, member=_INT64, process=_INT64, instance=_UTF8),
    Kind.KEPT: _schema(lease=_INT64, end=_INT64),  # offsets below are not in doubt
    # old: the lease that held them in doubt
    Kind.HANDED: _schema(lease=_INT64, old=_INT64, start=_INT64, count=_INT64, attempt=_INT32),
    Kind.FENCED: _schema(epoch=_INT64, group=_INT32, member=_INT64),
    Kind.BURIED: _FAILED_RANGE,  # like DEAD, for messages that could not be delivered
    Kind.FORGOTTEN: _schema(epoch=_UINT32),  # producer sessions; the last one removes its group and writer too
    # Retries of an ordered group, including offsets that were never delivered; key: hash (ledger/groups/order.py)
    Kind.KEYED: _schema(group=_INT32, queue_id=_INT32, offset=_INT64, key=_INT64),
    Kind.PRODUCERS: _schema(group=_UTF8, rules=_UTF8),  # JSON of ledger.ProducerRules
    Kind.ALTERED: _schema(group=_INT32, subscription=_UTF8),  # new subscription of a consumer group
    # process: as of JOINED, distinguishes a repeated request from a new process; transactional: new for the session
    Kind.OWNED: _schema(epoch=_UINT32, process=_INT64, transactional=_BOOL),
    # By an operator: the group continues at this offset, its leases of the queue end
    Kind.GROUP_RESET: _schema(group=_INT32, queue_id=_INT32, offset=_INT64),
    Kind.GROUP_PAUSED: _schema(group=_INT32, topic=_UTF8, paused=_BOOL),  # topic "": the whole group
    Kind.GROUP_DELETED: _schema(position=_INT64, group=_INT32),  # position of this row; the number is never reused
    Kind.TOPIC_ALTERED: _schema(name=_UTF8, retention_us=_INT64, retention_bytes=_INT64),  # -1: broker's, no limit
    Kind.TOPIC_DELETED: _schema(name=_UTF8),
    Kind.CUT: _schema(queue_id=_INT32, head=_INT64),  # a topic's retention: offsets below are gone
    Kind.FAILED: _FAILED_RANGE,  # why deliveries of RETRIED failed
    Kind.GROUP_LIMITED: _schema(group=_INT32, limits=_UTF8),  # JSON of model.Limits
    Kind.RECALLED: _schema(position=_INT64, delayed=_INT64),  # as RELEASED, of messages that never become visible
}
"""The schema of each kind of frame, version 1 (see log/FORMAT.md)."""

MESSAGES = (Kind.PLAIN, Kind.HALF)
"""Kinds of frames whose rows are messages."""


def is_fixed_width(schema: pa.Schema) -> bool:
    """Decide whether all columns have a fixed byte width: such frames are stored without Arrow metadata."""
    return all(pa.types.is_integer(f.type) for f in schema)


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
