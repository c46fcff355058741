"""Actions on topics and their queues."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Signed
from escrowmq.wire.values import (
    MAX_QUEUE,
    Bounds,
    ConsumerGroup,
    End,
    Head,
    Offset,
    Pair,
    QueueId,
    QueueNumber,
    Seconds,
    TimeUs,
    TopicName,
)

RetentionName = Literal["retention", "retention_size"]


class QueueRange(TypedDict):
    """Which offsets of a queue are stored."""

    queue: QueueNumber
    head: Head
    end: End


class NumberedQueue(QueueRange):
    """One queue of a topic."""

    queue_id: QueueId


class KeptQueue(NumberedQueue):
    """One queue of a topic, and how much is in it."""

    bytes: NotRequired[Annotated[int, "of the messages that it keeps: their bodies, and 100 for the rest of each"]]


class Retention(TypedDict):
    """A topic's own settings. What is not given: the broker's `retention`, and any number of bytes."""

    retention: NotRequired[Annotated[Seconds, "that messages stay after they became visible"]]
    retention_size: NotRequired[Annotated[int, Bounds(1), "bytes that each of its queues keeps at most"]]


class Topic(Retention):
    """One topic."""

    name: TopicName
    queues: list[KeptQueue]


class Topics(TypedDict):
    """All topics of a broker."""

    topics: list[Topic]


class AskOffsets(TypedDict):
    """The topic whose offsets are wanted."""

    topic: Annotated[TopicName, "or a system view: then the range of log positions, as queue 0"]
    queue: NotRequired[Annotated[QueueNumber, "all queues unless given"]]
    time_us: NotRequired[TimeUs]


class QueueOffsets(QueueRange):
    """Which offsets of a queue are stored, and where a time is among them."""

    offset_at: NotRequired[Annotated[Offset, "with `time_us`: the first visible then or later, `end` without one"]]


class Offsets(TypedDict):
    """Where the queues of a topic begin and end."""

    shard: Annotated[int, "number of the broker's shard"]
    queues: list[QueueOffsets]


class Wait(TypedDict):
    """The condition to wait for."""

    topic: TopicName
    after: NotRequired[Annotated[list[Pair], "[queue, offset]: wait for a message at that offset or later"]]
    every: NotRequired[Annotated[bool, "wait on queues not named, too, from offset 0; the topic may be yet to come"]]
    wait_ms: NotRequired[Annotated[int, "milliseconds, at most 60,000; 0 unless given"]]


class Ready(TypedDict):
    """The queues that have such messages; none when the time is over."""

    queues: list[QueueRange]


class Create(TypedDict):
    """The topic to make."""

    name: TopicName
    queues: NotRequired[Annotated[int, Bounds(1, MAX_QUEUE), "how many; the broker's default unless given"]]
    may_exist: NotRequired[Annotated[bool, "no error if it exists"]]


class Created(TypedDict):
    """The topic as it is now."""

    name: TopicName
    queues: Annotated[int, "how many"]


class Alter(Retention, Signed):
    """New settings of a topic. What is not given stays."""

    name: TopicName
    queues: NotRequired[Annotated[int, Bounds(1, MAX_QUEUE), "how many; never fewer than it has"]]
    reset: NotRequired[Annotated[list[RetentionName], "goes back to the broker's"]]


class Altered(Retention):
    """The topic's settings now."""

    name: TopicName
    queues: Annotated[int, "how many"]


class Delete(Signed):
    """The topic to delete."""

    name: TopicName
    force: NotRequired[
        Annotated[bool, "roll back what is undecided, and take it from its groups, instead of refusing with CONFLICT"]
    ]
    check: NotRequired[Annotated[bool, "do nothing: only refuse, or say what would go"]]


class Deleted(TypedDict):
    """Losses with a deleted topic, or their preview."""

    name: TopicName
    deleted: Annotated[bool, "false: it was only asked for"]
    queues: Annotated[int, "how many it had"]
    messages: Annotated[int, "that it kept"]
    delayed: Annotated[int, "that waited for their time"]
    rolled_back: Annotated[int, "transactions that were undecided"]
    groups: list[Annotated[ConsumerGroup, "consumed it"]]
    dead_letters: Annotated[int, "of all groups"]


LIST = Action("topics.list", Nothing, Topics, "All topics with their queues.", reads_only=True)
OFFSETS = Action(
    "topics.offsets",
    AskOffsets,
    Offsets,
    "Where the queues of a topic begin and end, and which offset became visible at a time. A system view has one "
    "queue, numbered 0.",
    reads_only=True,
)
WAIT = Action(
    "topics.wait",
    Wait,
    Ready,
    "Wait until queues of a topic, or of a system view, have messages at given offsets or later.",
    reads_only=True,
)
CREATE = Action("topics.create", Create, Created, "Make a topic, or give it more queues.")
ALTER = Action(
    "topics.alter",
    Alter,
    Altered,
    "Give a topic more queues, or a retention of its own; what is beyond it is let go of at once.",
)
DELETE = Action(
    "topics.delete",
    Delete,
    Deleted,
    "Delete a topic with all that is in it. Only `topics.create` makes its name anew, as another topic.",
)
