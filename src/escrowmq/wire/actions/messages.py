"""Looking up single messages."""

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
    message_id: Annotated[MessageId | None, "null: damaged, nothing of the message is left"]
    position: Position
    transaction: Annotated[str | None, "its transaction's id as printed; null: a plain message"]
    born_us: Annotated[TimeUs, "when its producer made it"]
    stored_us: Annotated[TimeUs, "when it became durable"]
    visible_us: Annotated[TimeUs, "not delivered before; 0: at once"]
    damaged: Annotated[str | None, "where the log is damaged under its body, or all of it; null: it is whole"]


class Message(MessageFields):
    """A stored message."""

    body_base64: Annotated[str | None, "its body, base64; null: damaged, or withheld"]
    withheld: NotRequired[
        Annotated[bool, "true: it was rolled back or has expired; `transactions.reveal` gives its body"]
    ]


class Standing(TypedDict):
    """A found message."""

    state: Annotated[
        State | Literal["plain", "edited"],
        "of its transaction; `edited`: a person put it in place of a dead letter, for one consumer group",
    ]
    offset: Annotated[Offset | None, "null: not in its queue (yet); of an edited one: where the group gets it"]
    visible: Annotated[bool, "it is in its queue"]
    group: NotRequired[Annotated[ConsumerGroup, "of an edited one: who gets it"]]
    edited_from: NotRequired[
        Annotated[MessageId | None, "of an edited one: the id of the message that it replaced; null: that was damaged"]
    ]


class FoundMessage(Message, Standing):
    """A message that was looked up."""


class Lookup(TypedDict):
    """The message id or key to look for."""

    message_id: NotRequired[Annotated[str, "32 hex digits, or the text that it was made of"]]
    key: NotRequired[str]
    topic: NotRequired[Annotated[TopicName, "in this topic only"]]
    limit: NotRequired[Annotated[int, Bounds(1, 1000), "messages, at most; 100 unless given"]]


class Found(TypedDict):
    """The messages, newest first."""

    messages: list[FoundMessage]
    unreadable: NotRequired[
        Annotated[int, "damaged messages that could not be compared; any of them may be one of those"]
    ]


class View(TypedDict):
    """One message of a topic, by its id or else by its key."""

    topic: TopicName
    id_or_key: Annotated[str, "32 hex digits, or the text that the id was made of; a key if no message has that id"]


class Viewed(TypedDict):
    """The newest message that stands or still may."""

    message: Annotated[FoundMessage | None, "null: there is none, or it was rolled back or has expired"]


VIEW = Action(
    "view", View, Viewed, "The message of an id, or the newest of a key: prepared, committed or plain.", reads_only=True
)
LOOKUP = Action("lookup", Lookup, Found, "Messages by id or key, half messages included.", reads_only=True)
