"""Actions on dead letters of consumer groups."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Results
from escrowmq.wire.values import ConsumerGroup, Offset, PageLimit, Position, QueueNumber, TimeUs, TopicName


class List(TypedDict):
    """Whose dead letters, and which page."""

    group: ConsumerGroup
    limit: NotRequired[PageLimit]
    after: NotRequired[Annotated[list[int], "`next` of the page before"]]


class DeadLetter(TypedDict):
    """One message that was given up for a consumer group."""

    queue_id: Annotated[int, "number of the queue among all queues of the broker"]
    topic: TopicName
    queue: QueueNumber
    offset: Offset
    position: Position
    attempts: Annotated[int, "deliveries"]
    cause: Annotated[str, "of the last failure"]
    dead_us: Annotated[TimeUs, "when it was given up"]
    key: str | None
    tag: str | None
    message_id: Annotated[str, "32 hex digits"]


class Page(TypedDict):
    """Dead letters by queue and offset."""

    dead_letters: list[DeadLetter]
    next: NotRequired[Annotated[list[int], "`after` of the next page, if this one is full"]]


class Item(TypedDict):
    """Where a dead letter stands."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset


class Settle(TypedDict):
    """Which dead letters, and what to do with them."""

    group: ConsumerGroup
    act: Annotated[Literal["retry", "discard"], "`retry`: deliver again, attempts counted anew; `discard`: for good"]
    items: NotRequired[list[Item]]
    all: NotRequired[Annotated[bool, "all of the group instead of `items`"]]


LIST = Action("dead_letters.list", List, Page, "Dead letters of a consumer group, by pages.", reads_only=True)
SETTLE = Action("dead_letters.settle", Settle, Results, "Deliver dead letters again, or discard them.")
