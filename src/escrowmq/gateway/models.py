"""The HTTP request and response bodies as pydantic models: the source of the OpenAPI document."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from escrowmq.message.limits import MAX_QUEUE
from escrowmq.message.names import MAX_NAME
from escrowmq.model import Receipt

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Identity = Annotated[str, Field(min_length=1, max_length=1024)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Time = Annotated[AwareDatetime, Field(strict=False)]
Handle = Annotated[str, Field(min_length=5, max_length=64)]
MessageId = Annotated[str, BeforeValidator(lambda raw: raw.hex() if isinstance(raw, bytes) else raw)]
"""A message id in JSON: its bytes as 32 hexadecimal digits."""
TransactionText = Annotated[str, Field(min_length=5, max_length=64, description="SHARD-EPOCH-POSITION, hexadecimal.")]


def _texts(given: Any) -> Any:
    """Validate a map of texts with one error instead of one for each value."""
    if isinstance(given, dict) and not all(isinstance(value, str) for value in given.values()):
        raise ValueError("every value is a text")
    return given


Texts = Annotated[dict[str, str], BeforeValidator(_texts)]


class _In(BaseModel):
    """A request: unknown names and other types are rejected. Validation of a list stops at its first invalid item."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        """Reject many unknown names with one error instead of one for each."""
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            raise ValueError(f"{len(given)} fields; there are {', '.join(cls.model_fields)}")
        return given


class _Out(BaseModel):
    """A part of a response."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of_row(cls, row: Mapping[str, Any], **other: Any) -> Self:
        """Create the model from a row's fields of the same names; ``other`` fields override."""
        return cls(**{name: row[name] for name in cls.model_fields if name in row and name not in other}, **other)


# Requests


class MessageIn(_In):
    """One message: its body is either ``body`` (base64) or ``text``."""

    body: str | None = Field(None, description="The body, base64.")
    text: str | None = Field(None, description="The body, as text; stored as UTF-8.")
    key: str | None = Field(None, description="Same key, same queue, in order.")
    tag: str | None = Field(None, description="What consumers filter by.")
    properties: Texts | None = None
    delay: Seconds = Field(0.0, description="Seconds before which it is not visible.")
    queue: Annotated[int, Field(ge=0, lt=MAX_QUEUE + 1)] | None = Field(
        None, description="This queue; else by key or by turns."
    )
    message_id: Identity | None = Field(
        None, description="Your id: sent again, it makes no second message. 32 hexadecimal digits stand for themselves."
    )

    _content: bytes = b""

    @model_validator(mode="after")
    def _one_body(self) -> Self:
        if (self.body is None) == (self.text is None):
            raise ValueError("a message has either body (base64) or text")
        if self.text is not None:
            self._content = self.text.encode()
        else:
            try:
                self._content = base64.b64decode(self.body or "", validate=True)
            except (binascii.Error, ValueError):
                raise ValueError("body is not base64") from None
        self.body = self.text = None  # keep only the bytes
        return self

    @property
    def content(self) -> bytes:
        """The body's bytes."""
        return self._content


class MessagesIn(_In):
    """Several messages; each has its own result."""

    messages: Annotated[list[MessageIn], Field(min_length=1, fail_fast=True)]


class HalfMessageIn(MessageIn):
    """One half message."""

    topic: Name
    check_immunity: Seconds | None = Field(None, description="Seconds before the first check-back.")


class TransactionIn(_In):
    """The half messages of one transaction: all become visible, or none."""

    messages: Annotated[list[HalfMessageIn], Field(min_length=1, fail_fast=True)]
    transaction_id: TransactionText | None = Field(None, description="Join this transaction instead of beginning one.")


class TransactionsIn(_In):
    """Several transactions; each has its own result."""

    transactions: Annotated[list[TransactionIn], Field(min_length=1, fail_fast=True)]


class Decision(_In):
    """The decision on one transaction."""

    transaction_id: Annotated[
        str,
        Field(
            min_length=1,
            max_length=1000,
            description="SHARD-EPOCH-POSITION, hexadecimal; or the `message_id` that the producer gave to one of its "
            "messages.",
        ),
    ]
    outcome: Literal["commit", "rollback"]


class DecisionsIn(_In):
    """Several decisions; each has its own result."""

    decisions: Annotated[list[Decision], Field(min_length=1, fail_fast=True)]


class ReceiveIn(_In):
    """A request to receive messages. ``topics`` creates the consumer group if needed; otherwise it must exist."""

    topics: Annotated[list[Name], Field(fail_fast=True)] | None = None
    tags: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] | None = Field(
        None, description="Only messages with one of these."
    )
    ordered: bool = Field(False, description="Nothing of a key overtakes what failed.")
    start: Literal["earliest", "latest"] | Time | None = Field(
        None, description="Where a new group begins, earliest unless given; or a time with its zone."
    )
    max_attempts: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    retry_backoff: Seconds | None = None
    retry_backoff_max: Seconds | None = None
    redelivery: Annotated[str, Field(max_length=1000)] | Annotated[list[Seconds], Field(max_length=100)] | None = Field(
        None, description="Seconds before the second, third, … delivery, or a name: 3x5min, rocketmq, forever."
    )
    max_messages: Annotated[int, Field(ge=1)] = 10
    wait: Seconds = Field(0.0, description="Seconds to wait for a first message (a long poll).")
    lease: Annotated[float, Field(ge=0.001, lt=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Seconds within which to settle; else the broker's lease_seconds."
    )
    as_text: bool = Field(False, description="Bodies that are UTF-8 come as text.")


class HandlesIn(_In):
    """Messages to settle, by the handles with which they were received."""

    handles: Annotated[list[Handle], Field(min_length=1, fail_fast=True)]


class NackIn(HandlesIn):
    """Messages to return for redelivery."""

    delay: Seconds | None = Field(None, description="Seconds until they come again; else the group's back-off.")
    cause: Annotated[str, Field(max_length=2000)] | None = Field(None, description="Why; kept with a dead letter.")


class ExtendIn(HandlesIn):
    """Messages whose lease is extended; messages leased together are extended together."""

    seconds: Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)] = Field(description="From now.")


# Answers


class Problem(_Out):
    """An error and what to do about it."""

    code: int = Field(description="The number of the code, as in docs/reference/errors.md.")
    name: str = Field(description="The name of the code.")
    message: str
    hint: str = ""
    retry_after: float | None = Field(None, description="Seconds after which the same request can succeed.")
    message_id: str | None = Field(
        None, description="Repeat with this id: the message may have been taken, and cannot be taken twice."
    )
    message_ids: list[str | None] | None = Field(
        None, description="The same for each message of the request; null: it never left, repeat it as it was."
    )
    transaction_id: str | None = Field(None, description="The transaction that exists in spite of the refusal.")


class ReceiptOut(_Out):
    """The broker's durable receipt for one message."""

    message_id: MessageId
    topic: str
    queue: int
    position: int
    offset: int | None = Field(None, description="The place in the queue; null while it has none (half, delayed).")

    @classmethod
    def of(cls, receipt: Receipt) -> ReceiptOut:
        """Convert the client's receipt."""
        return cls.model_validate(receipt, from_attributes=True)


class SendResult(_Out):
    """The result for one message: a receipt or a problem."""

    receipt: ReceiptOut | None = None
    problem: Problem | None = None


class SendResults(_Out):
    """The results for each message, in request order. Status 207 if any was rejected."""

    results: list[SendResult]
    refused: int


class TransactionOut(_Out):
    """A prepared transaction: durable, and invisible until it is committed."""

    transaction_id: str
    messages: list[ReceiptOut]


class TransactionResult(_Out):
    """The result of one prepare: a transaction or a problem."""

    transaction: TransactionOut | None = None
    problem: Problem | None = None


class TransactionResults(_Out):
    """The results of each prepare, in request order. Status 207 if any was rejected."""

    results: list[TransactionResult]
    refused: int


class Decided(_Out):
    """The result of a decision; SENT means only that it is in flight."""

    transaction_id: str
    code: Literal["COMMITTED", "ROLLED_BACK", "ALREADY_COMMITTED", "ALREADY_ROLLED_BACK", "SENT"]


class DecisionResult(_Out):
    """The result of one decision of several."""

    transaction_id: str
    code: str | None = None
    problem: Problem | None = None


class DecisionResults(_Out):
    """The results of each decision, in request order. Status 207 if any was rejected."""

    results: list[DecisionResult]
    refused: int


class TransactionState(_Out):
    """The state of a transaction. Times are microseconds since 1970, by the broker's clock."""

    transaction_id: str
    group: str
    state: Literal["open", "committed", "rolled_back", "parked", "expired"]
    messages: int
    checks: int = Field(description="How often producers were asked.")
    prepared_us: int
    due_us: int | None = Field(None, description="When producers are asked next.")
    decided_by: str | None = None


class Delivered(_Out):
    """A leased message."""

    handle: str = Field(description="For ack, nack and extend, from any connection, until the lease ends.")
    topic: str
    queue: int
    offset: int
    message_id: MessageId
    key: str | None
    tag: str | None
    properties: dict[str, str]
    body: str | None = Field(None, description="The body, base64.")
    text: str | None = Field(None, description="The body, if it was asked for as text and is UTF-8.")
    attempt: int = Field(description="How often the group got it, this time included.")
    born_us: int
    stored_us: int
    transaction_id: str | None


class DeliveredMessages(_Out):
    """The received messages; empty if none arrived in time."""

    messages: list[Delivered]


class SettleResult(_Out):
    """The result for one handle."""

    handle: str
    problem: Problem | None = None


class SettleResults(_Out):
    """The results for each handle, in request order. Status 207 if any was rejected."""

    results: list[SettleResult]
    refused: int


class Found(_Out):
    """A stored message. ``state``: "plain", its transaction's state, or "edited": a dead letter's replacement."""

    topic: str | None
    queue: int
    offset: int | None
    position: int
    message_id: str | None = Field(description="null: damaged, nothing of the message is left.")
    key: str | None
    tag: str | None
    properties: dict[str, str]
    body: str | None = Field(description="The body, base64; null: damaged.")
    damaged: str | None = Field(None, description="Where the log is damaged under the message.")
    state: str
    visible: bool
    transaction_id: str | None
    born_us: int
    stored_us: int


class MissingBroker(_Out):
    """A broker that did not answer."""

    broker: str
    reason: str


class FoundMessages(_Out):
    """The messages that a look-up found, newest first."""

    messages: list[Found]
    missing: list[MissingBroker] = Field(default=[], description="Brokers, of several, that are away: not looked at.")


class ViewedMessage(_Out):
    """One message; null if there is none, or it was rolled back or has expired."""

    message: Found | None


class Queue(_Out):
    """One queue of a topic: it stores offsets from ``head`` up to, not including, ``end``."""

    queue: int
    head: int
    end: int


class Topic(_Out):
    """A topic at one broker."""

    name: str
    broker: str
    queues: list[Queue]
    retention: float | None = Field(
        default=None, description="Seconds that it keeps messages; null: as the broker's setting."
    )
    retention_size: int | None = Field(default=None, description="Bytes that each queue keeps at most; null: any.")


class Topics(_Out):
    """All topics."""

    topics: list[Topic]
    missing: list[MissingBroker] = Field(default=[], description="Brokers, of several, that are away: not looked at.")


class BrokerHealth(_Out):
    """The health that one broker reports, or "unreachable"."""

    broker: str
    status: str
    reason: str


class Health(_Out):
    """Status 200 if every broker accepts messages (even with "damaged" places in its log), 503 otherwise."""

    status: Literal["ok", "damaged", "not ok"]
    brokers: list[BrokerHealth]
