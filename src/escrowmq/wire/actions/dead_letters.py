"""Actions on dead letters of consumer groups."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, OfGroup, Paged, Results, Signed
from escrowmq.wire.values import (
    Bounds,
    ConsumerGroup,
    MessageId,
    Offset,
    PageLimit,
    Position,
    QueueId,
    QueueNumber,
    Seconds,
    TimeUs,
    TopicName,
)


class Item(TypedDict):
    """Position of a dead letter."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset


class List(OfGroup, Paged):
    """Group, filters and page of dead letters."""

    after: NotRequired[Annotated[list[int], "`next` of the previous page"]]
    cause: NotRequired[Annotated[str, "of this cause as a summary groups them: its numbers and ids do not count"]]
    topic: NotRequired[TopicName]
    older_than: NotRequired[Annotated[Seconds, "dead for so long, at least"]]
    items: NotRequired[Annotated[list[Item], "only the dead letters among these"]]


class Shown(Item):
    """A dead letter in the version that the operator has seen."""

    dead_us: NotRequired[
        Annotated[int, "`dead_us` as listed: if it died again since, the result is CONFLICT, and nothing changes"]
    ]
    attempts: NotRequired[Annotated[int, "`attempts` as listed, with the same effect"]]


class DeadLetter(Item):
    """One message that failed for a consumer group for the last time."""

    queue_id: QueueId
    position: Position
    attempts: Annotated[int, "deliveries"]
    cause: Annotated[str, "of the last failure"]
    dead_us: Annotated[TimeUs, "time of its death"]
    key: str | None
    tag: str | None
    message_id: Annotated[MessageId | None, "null: the message is damaged completely"]
    damaged: Annotated[str | None, "position of log damage; null: intact"]


class Page(TypedDict):
    """Dead letters by queue and offset."""

    dead_letters: list[DeadLetter]
    next: NotRequired[Annotated[list[int], "`after` of the next page, if this one is full"]]


class Summarize(Paged):
    """Groups of a summary, and its number of separate causes."""

    group: NotRequired[Annotated[ConsumerGroup, "all that have some, unless given"]]
    causes: NotRequired[Annotated[int, Bounds(1, 1000), "separate causes per group, 20 unless given"]]
    samples: NotRequired[Annotated[int, Bounds(0, 5), "dead letters shown of each cause, 3 unless given"]]
    after: NotRequired[Annotated[int, Bounds(-1), "`next` of the previous answer"]]


class Sample(Item):
    """One dead letter of a cause."""

    attempts: Annotated[int, "deliveries"]
    cause: Annotated[str, "of the last failure"]
    dead_us: Annotated[TimeUs, "time of its death"]


class Times(TypedDict):
    """Number of dead letters, with their first and last time."""

    count: int
    oldest_us: Annotated[TimeUs, "the first death"]
    newest_us: Annotated[TimeUs, "the last death"]


class Cause(Times):
    """The dead letters of similar causes."""

    cause: Annotated[str, "first line, `#` for numbers and ids; the form for `cause` of `dead_letters.list`"]
    samples: list[Sample]


class Others(Times):
    """The dead letters of all further causes."""

    causes: Annotated[int, "how many causes these are"]


class OfGroupSummary(OfGroup):
    """The dead letters of one group."""

    dead_letters: Annotated[int, "how many"]
    causes: Annotated[list[Cause], "the most frequent first"]
    others: NotRequired[Others]


class Summary(TypedDict):
    """Dead letters by group and cause."""

    groups: Annotated[list[OfGroupSummary], "groups with dead letters"]
    next: NotRequired[Annotated[int, "`after` of the next request, if there may be more groups"]]


class Settle(OfGroup, Signed):
    """The dead letters to settle, and the operation."""

    act: Annotated[Literal["retry", "discard"], "`retry`: deliver again, attempts counted from 0; `discard`: permanent"]
    items: NotRequired[list[Shown]]
    all: NotRequired[Annotated[bool, "all of the group instead of `items`, by pages"]]
    limit: NotRequired[Annotated[PageLimit, "of `all`: maximum per request"]]
    after: NotRequired[Annotated[list[int], "of `all`: `next` of the previous answer"]]


class Settled(Results):
    """Result of each item: OK, NOT_FOUND (no dead letter, or no longer), CONFLICT (it died again), DAMAGED (its content
    is lost: it cannot be delivered again)."""

    next: NotRequired[Annotated[list[int], "of `all`: `after` of the next request, if there may be more"]]


class Edit(OfGroup, Shown, Signed):
    """Replacement message for one dead letter. Missing fields keep their value."""

    message_id: Annotated[MessageId, "of the new message, random; a repeated request with it is applied once"]
    body_base64: NotRequired[
        Annotated[list[str], "the body in pieces of at most 65,536 characters, each complete base64"]
    ]
    key: NotRequired[str]
    tag: NotRequired[str]
    properties: NotRequired[Annotated[list[tuple[str, str]], "names and values to set"]]
    without: NotRequired[Annotated[list[str], "`key`, `tag` and names of properties to remove"]]


class Edited(TypedDict):
    """Result of an edit."""

    message_id: Annotated[MessageId, "of the new message"]
    edited_from: Annotated[MessageId | None, "of the replaced message; null: it is damaged, and its id is lost"]
    repeated: Annotated[bool, "it had been applied before"]


EDIT = Action(
    "dead_letters.edit", Edit, Edited, "Deliver another message to the group in place of a dead letter, in one step."
)
LIST = Action("dead_letters.list", List, Page, "Dead letters of a consumer group, by pages.", reads_only=True)
SUMMARY = Action("dead_letters.summary", Summarize, Summary, "Dead letters by group and cause.", reads_only=True)
SETTLE = Action("dead_letters.settle", Settle, Settled, "Deliver dead letters again, or discard them.")
