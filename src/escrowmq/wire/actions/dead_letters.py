"""Actions on dead letters of consumer groups."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, OfGroup, Paged, Results, Signed
from escrowmq.wire.values import MessageId, Offset, PageLimit, Position, QueueId, QueueNumber, TimeUs, TopicName


class List(OfGroup, Paged):
    """Whose dead letters, and which page."""

    after: NotRequired[Annotated[list[int], "`next` of the page before"]]


class Item(TypedDict):
    """Where a dead letter stands."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset


class Shown(Item):
    """A dead letter as it was shown to whoever decides about it."""

    dead_us: NotRequired[
        Annotated[int, "`dead_us` as listed: if it died again since, the result is CONFLICT, and nothing is done"]
    ]
    attempts: NotRequired[Annotated[int, "`attempts` as listed, to the same end"]]


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
    items: NotRequired[list[Shown]]
    all: NotRequired[Annotated[bool, "all of the group instead of `items`, by pages"]]
    limit: NotRequired[Annotated[PageLimit, "of `all`: at most so many at a time"]]
    after: NotRequired[Annotated[list[int], "of `all`: `next` of the answer before"]]


class Settled(Results):
    """What became of each: OK, NOT_FOUND (it is no dead letter, or no longer), CONFLICT (it is another death now), DAMAGED (its
    content is lost: it cannot be delivered again)."""

    next: NotRequired[Annotated[list[int], "of `all`: `after` of the next request, if there may be more"]]


LIST = Action("dead_letters.list", List, Page, "Dead letters of a consumer group, by pages.", reads_only=True)
SETTLE = Action("dead_letters.settle", Settle, Settled, "Deliver dead letters again, or discard them.")
