"""Immutable values of the public interface: messages, receipts, ids, outcomes, checks."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import TypedDict

from escrowmq.errors import Code, Misuse

_TRANSACTION_ID = struct.Struct(">IIQ")


class Outcome(IntEnum):
    """The outcome of a local transaction."""

    UNKNOWN = 0
    COMMIT = 1
    ROLLBACK = 2


COMMIT = Outcome.COMMIT
ROLLBACK = Outcome.ROLLBACK
UNKNOWN = Outcome.UNKNOWN


class TransactionState(IntEnum):
    """State of a transaction in the ledger. Only ``OPEN`` and ``PARKED`` can still change."""

    OPEN = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3
    EXPIRED = 4


class DecidedBy(IntEnum):
    """Origin of a decision."""

    PRODUCER = 0
    CHECK = 1
    OPERATOR = 2
    EXHAUSTED = 3
    RETENTION = 4
    REPLACED = 5
    """A later prepare of the same message id rolled it back, because the producer chose that policy."""


class Act(IntEnum):
    """Operation of a consumer on leased messages."""

    ACK = 0
    NACK = 1
    EXTEND = 2
    RELEASE = 3
    """Return messages that were not handed to the application; the attempt does not count."""
    REJECT = 4
    """Make dead letters of the messages at once."""


@dataclass(frozen=True, slots=True, order=True)
class TransactionId:
    """Self-describing id of a transaction: any process can end it, after any time.

    ``position`` is the log position of the transaction's first half message on the shard ``shard``; ``epoch`` is the
    producer session that prepared it.
    """

    shard: int
    epoch: int
    position: int

    def __str__(self) -> str:
        return f"{self.shard:08x}-{self.epoch:x}-{self.position:x}"

    def __bytes__(self) -> bytes:
        return _TRANSACTION_ID.pack(self.shard, self.epoch, self.position)

    @classmethod
    def from_bytes(cls, raw: bytes) -> TransactionId:
        """Parse 16 bytes (big-endian shard, epoch, position). Raises :class:`Misuse` for another length."""
        if len(raw) != _TRANSACTION_ID.size:
            raise Misuse(Code.BAD_ARGUMENT, f"a transaction id has 16 bytes, not {len(raw)}")
        return cls(*_TRANSACTION_ID.unpack(raw))

    @classmethod
    def parse(cls, text: str) -> TransactionId:
        """Parse the printed form ``SHARD-EPOCH-POSITION`` (hexadecimal). Raises :class:`Misuse` for anything else."""
        try:
            shard, epoch, position = (int(part, 16) for part in text.split("-"))
            identity = cls(shard, epoch, position)
            bytes(identity)
        except (ValueError, struct.error):
            hint = "ids look like 9f3a01c2-3-2a"
            raise Misuse(Code.BAD_ARGUMENT, f"{text!r} is not a transaction id", hint) from None
        return identity


def message_id(value: str | bytes | uuid.UUID) -> bytes:
    """Return the 16 bytes that identify a message on the wire. 16 bytes and UUIDs are used unchanged, 32 hexadecimal
    digits are decoded. Any other string or bytes is hashed (BLAKE2b, 128 bits), so an application's own ids
    (``"order-17"``) work wherever an id is expected. Raises :class:`Misuse` for another type, or for text that is not
    valid Unicode."""
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, str):
        if len(value) == 32:
            try:
                return bytes.fromhex(value)
            except ValueError:
                pass
        try:
            value = value.encode()
        except UnicodeEncodeError as problem:
            raise Misuse(Code.BAD_ARGUMENT, f"the message_id is not valid Unicode: {problem}") from None
    elif not isinstance(value, bytes | bytearray | memoryview):
        raise Misuse(Code.BAD_ARGUMENT, f"message_id is {type(value).__name__}, not str, bytes or UUID")
    elif len(value) == 16:
        return bytes(value)
    return hashlib.blake2b(value, digest_size=16).digest()


def member_id(group: str, instance: str) -> int:
    """Return the 62-bit number of a named consumer; it is the same in every process that uses this name."""
    digest = hashlib.blake2b(f"{group}/{instance}".encode(), digest_size=8, person=b"escrowmq-member").digest()
    return int.from_bytes(digest, "big") >> 2


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message stored at a broker, in its queue or not; see ``Bus.view_message``.

    ``state`` is ``"plain"`` or the state of its transaction: ``"open"``, ``"parked"`` (prepared: it may still become
    visible or be rolled back) or ``"committed"``. ``visible``: it is in its queue, at ``offset``; a delayed one is not
    yet. Times are microseconds since 1970 by the broker's clock (``born_us``: by its producer's). ``position`` is its
    row in the log of ``broker``, an address. ``damaged`` describes log damage at this message; ``body`` is None then.
    """

    topic: str
    body: bytes | None
    key: str | None
    tag: str | None
    properties: Mapping[str, str]
    message_id: bytes | None
    state: str
    transaction_id: TransactionId | None
    visible: bool
    queue: int
    offset: int | None
    position: int
    born_us: int
    stored_us: int
    visible_us: int
    broker: str
    damaged: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message to send.

    ``delay`` and ``check_immunity`` are seconds; ``queue`` None lets the broker choose (by key, else round-robin);
    ``message_id`` None lets the client generate one (see :func:`message_id` for accepted values).
    """

    topic: str
    body: bytes
    key: str | None = None
    tag: str | None = None
    properties: Mapping[str, str] | None = None
    delay: float = 0.0
    check_immunity: float | None = None
    queue: int | None = None
    message_id: str | bytes | uuid.UUID | None = None


class MessageOptions(TypedDict, total=False):
    """Options of a message besides topic and body; see :class:`Message`."""

    key: str | None
    tag: str | None
    properties: Mapping[str, str] | None
    delay: float
    queue: int | None
    message_id: str | bytes | uuid.UUID | None


class HalfMessageOptions(MessageOptions, total=False):
    """Options of a half message; ``check_immunity`` is seconds before the first check-back.

    The property ``CheckImmunityTimeInSeconds`` is the same as text (``"60"``); if both are given, they must agree.
    """

    check_immunity: float | None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Response of the broker to one durable message.

    ``transaction_id`` is set for half messages. ``offset`` is the message's number in its queue, None if it has none
    (half messages, delayed messages, QoS 0).
    """

    message_id: bytes
    topic: str
    queue: int
    position: int
    offset: int | None = None
    transaction_id: TransactionId | None = None


@dataclass(frozen=True, slots=True)
class CheckedMessage:
    """One half message, as passed to a checker."""

    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: Mapping[str, str]
    message_id: bytes
    born: datetime


@dataclass(frozen=True, slots=True)
class Check:
    """A check-back request for the outcome of a transaction; ``attempt`` counts from 1."""

    transaction_id: TransactionId
    attempt: int
    messages: tuple[CheckedMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPolicy:
    """Check-back policy of a producer group; None selects the broker setting of the same name.

    ``transaction_timeout`` is seconds before the first check-back (RocketMQ: ``transactionTimeOut``),
    ``check_interval`` seconds between two check-backs of one transaction, ``check_max`` their maximum number,
    ``checks_exhausted`` the action after the last: ``"park"`` (for an operator) or ``"rollback"``.
    """

    transaction_timeout: float | None = None
    check_interval: float | None = None
    check_max: int | None = None
    checks_exhausted: str | None = None


REDELIVERY: Mapping[str, tuple[float, ...]] = {
    "3x5min": (300.0,) * 3,
    "rocketmq": (10.0, 30.0, *(60.0 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120))),
    "forever": (),
}
"""Named redelivery policies: seconds before the second, third, ... delivery; then the message becomes a dead letter.
``"3x5min"``: three times, five minutes apart. ``"rocketmq"``: RocketMQ's delay levels from 10 s to 2 h, 16 times.
``"forever"``: until a consumer succeeds, with the back-off of the group; never a dead letter."""

FOREVER = 1 << 30
"""Number of deliveries that is never reached."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a consumer group may receive at most from one broker; None: no limit."""

    rate: float | None = None  # messages per second
    in_flight: int | None = None  # leased messages
    in_flight_per_key: int | None = None  # those of one key


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The result of :meth:`Producer.send_in_transaction`.

    ``outcome`` is the result of the local transaction (an exception or None counts as ``UNKNOWN``), ``status`` the
    broker's response (SENT if the producer does not wait for it), ``error`` the local transaction's exception, if any.
    """

    receipt: Receipt
    outcome: Outcome
    status: Code
    error: BaseException | None = field(default=None, compare=False)

    @property
    def transaction_id(self) -> TransactionId:
        """The transaction that was ended, or is left to the check-back."""
        assert self.receipt.transaction_id is not None  # a half message's receipt always has one
        return self.receipt.transaction_id
