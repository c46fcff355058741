"""Look-ups of single messages, and the recall of a delayed one."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action
from escrowmq.wire.values import Bounds, ConsumerGroup, MessageId, Offset, Position, QueueNumber, TimeUs, TopicName

State = Literal["open", "committed", "rolled_back", "parked", "expired"]


class MessageFields(TypedDict):
    """A stored message without its body."""

    topic: Annotated[TopicName | None, "null: damaged, and in no queue yet"]
    queue: QueueNumber
    key: str | None
    tag: str | None
    properties: dict[str, str]
    message_id: Annotated[MessageId | None, "null: the message is damaged completely"]
    position: Position
    transaction: Annotated[str | None, "its transaction's id as printed; null: a plain message"]
    born_us: Annotated[TimeUs, "creation time at its producer"]
    stored_us: Annotated[TimeUs, "time when it became durable"]
    visible_us: Annotated[TimeUs, "earliest delivery; 0: at once"]
    damaged: Annotated[str | None, "position of log damage in its body or all of it; null: intact"]


class Message(MessageFields):
    """A stored message."""

    body_base64: Annotated[str | None, "its body, base64; null: damaged, or withheld"]
    withheld: NotRequired[
        Annotated[bool, "true: it was rolled back or has expired; `transactions.reveal` returns its body"]
    ]


class Standing(TypedDict):
    """Current state of a message."""

    state: Annotated[
        State | Literal["plain", "edited"],
        "of its transaction; `edited`: an operator replaced a dead letter of one consumer group by it",
    ]
    offset: Annotated[Offset | None, "null: not in its queue (yet); of an edited one: its place for the group"]
    visible: Annotated[bool, "it is in its queue"]
    group: NotRequired[Annotated[ConsumerGroup, "of an edited one: its consumer group"]]
    edited_from: NotRequired[
        Annotated[MessageId | None, "of an edited one: the id of the replaced message; null: it was damaged"]
    ]


class FoundMessage(Message, Standing):
    """A message that was looked up."""


class Lookup(TypedDict):
    """Search criterion: a message id, or a key."""

    message_id: NotRequired[Annotated[str, "32 hex digits, or the text that it is derived from"]]
    key: NotRequired[str]
    topic: NotRequired[Annotated[TopicName, "in this topic only"]]
    limit: NotRequired[Annotated[int, Bounds(1, 1000), "messages, at most; 100 unless given"]]


class Found(TypedDict):
    """The messages, newest first."""

    messages: list[FoundMessage]
    unreadable: NotRequired[Annotated[int, "damaged messages that could not be compared; any of them may match"]]


class View(TypedDict):
    """One message of a topic, by its id or else by its key."""

    topic: TopicName
    id_or_key: Annotated[str, "32 hex digits, or the text that the id is derived from; a key if no message has that id"]


class Viewed(TypedDict):
    """The newest message that is committed or may still become so."""

    message: Annotated[FoundMessage | None, "null: none, rolled back or expired"]


class Recall(TypedDict):
    """A delayed message by its id."""

    topic: TopicName
    message_id: Annotated[str, "32 hex digits, or the text that it is derived from"]


class Recalled(TypedDict):
    """The message never becomes visible."""

    already: Annotated[bool, "it was recalled before"]


RECALL = Action(
    "messages.recall",
    Recall,
    Recalled,
    "Drop a delayed plain message. `NOT_FOUND`: there is none, or it became visible.",
)
VIEW = Action(
    "view", View, Viewed, "The message of an id, or the newest of a key: prepared, committed or plain.", reads_only=True
)
LOOKUP = Action("lookup", Lookup, Found, "Messages by id or key, half messages included.", reads_only=True)
