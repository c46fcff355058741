"""Actions on dead letters of consumer groups."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, OfGroup, Paged, Results, Signed
from escrowmq.wire.values import MessageId, Offset, Position, QueueId, QueueNumber, TimeUs, TopicName


class List(OfGroup, Paged):
    """Whose dead letters, and which page."""

    after: NotRequired[Annotated[list[int], "`next` of the page before"]]


class Item(TypedDict):
    """Where a dead letter stands."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset


class DeadLetter(Item):
    """One message that was given up for a consumer group."""

    queue_id: QueueId
    position: Position
    attempts: Annotated[int, "deliveries"]
    cause: Annotated[str, "of the last failure"]
    dead_us: Annotated[TimeUs, "when it was given up"]
    key: str | None
    tag: str | None
    message_id: Annotated[MessageId | None, "null: damaged, nothing of the message is left"]
    damaged: Annotated[str | None, "where the log is damaged under it; null: it is whole"]


class Page(TypedDict):
    """Dead letters by queue and offset."""

    dead_letters: list[DeadLetter]
    next: NotRequired[Annotated[list[int], "`after` of the next page, if this one is full"]]


class Settle(OfGroup, Signed):
    """Which dead letters, and what to do with them."""

    act: Annotated[Literal["retry", "discard"], "`retry`: deliver again, attempts counted anew; `discard`: for good"]
    items: NotRequired[list[Item]]
    all: NotRequired[Annotated[bool, "all of the group instead of `items`"]]


LIST = Action("dead_letters.list", List, Page, "Dead letters of a consumer group, by pages.", reads_only=True)
SETTLE = Action(
    "dead_letters.settle", Settle, Results, "Deliver dead letters again (DAMAGED: that cannot be), or discard them."
)
