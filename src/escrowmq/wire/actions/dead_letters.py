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
    """Where a dead letter stands."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset


class List(OfGroup, Paged):
    """The group, a selection of its dead letters, and the page."""

    after: NotRequired[Annotated[list[int], "`next` of the page before"]]
    cause: NotRequired[Annotated[str, "of this cause as a summary groups them: its numbers and ids do not count"]]
    topic: NotRequired[TopicName]
    older_than: NotRequired[Annotated[Seconds, "dead for so long, at least"]]
    items: NotRequired[Annotated[list[Item], "those of them that are dead letters, instead of all"]]


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


class Summarize(Paged):
    """The groups whose dead letters are summed up, and how many causes are distinguished."""

    group: NotRequired[Annotated[ConsumerGroup, "all that have some, unless given"]]
    causes: NotRequired[Annotated[int, Bounds(1, 1000), "causes of a group that are told apart, 20 unless given"]]
    samples: NotRequired[Annotated[int, Bounds(0, 5), "dead letters shown of each cause, 3 unless given"]]
    after: NotRequired[Annotated[int, Bounds(-1), "`next` of the answer before"]]


class Sample(Item):
    """One dead letter of a cause."""

    attempts: Annotated[int, "deliveries"]
    cause: Annotated[str, "of the last failure"]
    dead_us: Annotated[TimeUs, "when it was given up"]


class Times(TypedDict):
    """How many dead letters, and since when."""

    count: int
    oldest_us: Annotated[TimeUs, "the first death"]
    newest_us: Annotated[TimeUs, "the last death"]


class Cause(Times):
    """The dead letters of like causes."""

    cause: Annotated[str, "first line, `#` for numbers and ids; `cause` of `dead_letters.list` wants it so"]
    samples: list[Sample]


class Others(Times):
    """The dead letters of all other causes."""

    causes: Annotated[int, "how many causes these are"]


class OfGroupSummary(OfGroup):
    """The dead letters of one group."""

    dead_letters: Annotated[int, "how many"]
    causes: Annotated[list[Cause], "the most frequent first"]
    others: NotRequired[Others]


class Summary(TypedDict):
    """Dead letters by group and cause."""

    groups: Annotated[list[OfGroupSummary], "those that have some"]
    next: NotRequired[Annotated[int, "`after` of the next request, if there may be more groups"]]


class Settle(OfGroup, Signed):
    """Which dead letters, and what to do with them."""

    act: Annotated[Literal["retry", "discard"], "`retry`: deliver again, attempts counted anew; `discard`: for good"]
    items: NotRequired[list[Shown]]
    all: NotRequired[Annotated[bool, "all of the group instead of `items`, by pages"]]
    limit: NotRequired[Annotated[PageLimit, "of `all`: at most so many at a time"]]
    after: NotRequired[Annotated[list[int], "of `all`: `next` of the answer before"]]


class Settled(Results):
    """The result for each: OK, NOT_FOUND (it is no dead letter, or no longer), CONFLICT (it is another death now),
    DAMAGED (its content is lost: it cannot be delivered again)."""

    next: NotRequired[Annotated[list[int], "of `all`: `after` of the next request, if there may be more"]]


class Edit(OfGroup, Shown, Signed):
    """Another message in place of one dead letter. What is not given is as it was."""

    message_id: Annotated[MessageId, "of the new message, chosen at random; the same again is the same edit, done once"]
    body_base64: NotRequired[
        Annotated[list[str], "the body in pieces of at most 65,536 characters, each whole in itself"]
    ]
    key: NotRequired[str]
    tag: NotRequired[str]
    properties: NotRequired[Annotated[list[tuple[str, str]], "names and values to be set"]]
    without: NotRequired[Annotated[list[str], "`key`, `tag` and names of properties to be left out"]]


class Edited(TypedDict):
    """The result."""

    message_id: Annotated[MessageId, "of the new message"]
    edited_from: Annotated[
        MessageId | None, "of the message that it replaces; null: that one is damaged, and its id is lost"
    ]
    repeated: Annotated[bool, "it was done before, and nothing was done now"]


EDIT = Action(
    "dead_letters.edit", Edit, Edited, "Deliver another message to the group in place of a dead letter, in one step."
)
LIST = Action("dead_letters.list", List, Page, "Dead letters of a consumer group, by pages.", reads_only=True)
SUMMARY = Action("dead_letters.summary", Summarize, Summary, "Dead letters by group and cause.", reads_only=True)
SETTLE = Action("dead_letters.settle", Settle, Settled, "Deliver dead letters again, or discard them.")
