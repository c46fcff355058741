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
    """Stored offsets of a queue."""

    queue: QueueNumber
    head: Head
    end: End


class NumberedQueue(QueueRange):
    """One queue of a topic."""

    queue_id: QueueId


class KeptQueue(NumberedQueue):
    """One queue of a topic, and its size."""

    bytes: NotRequired[Annotated[int, "of its messages: their bodies, and 100 for the rest of each"]]


class Retention(TypedDict):
    """Retention set for a topic. Missing values: the broker's `retention`, and any number of bytes."""

    retention: NotRequired[Annotated[Seconds, "retention of messages after they became visible"]]
    retention_size: NotRequired[Annotated[int, Bounds(1), "maximum bytes per queue"]]


class Topic(Retention):
    """One topic."""

    name: TopicName
    queues: list[KeptQueue]


class Topics(TypedDict):
    """All topics of a broker."""

    topics: list[Topic]


class AskOffsets(TypedDict):
    """Topic and queue of requested offsets."""

    topic: Annotated[TopicName, "or a system view: then the range of log positions, as queue 0"]
    queue: NotRequired[Annotated[QueueNumber, "all queues unless given"]]
    time_us: NotRequired[TimeUs]


class QueueOffsets(QueueRange):
    """Stored offsets of a queue, and the offset at a time."""

    offset_at: NotRequired[Annotated[Offset, "with `time_us`: the first visible then or later, `end` without one"]]


class Offsets(TypedDict):
    """First and last offsets of the queues of a topic."""

    shard: Annotated[int, "number of the broker's shard"]
    queues: list[QueueOffsets]


class Wait(TypedDict):
    """Condition to wait for."""

    topic: TopicName
    after: NotRequired[Annotated[list[Pair], "[queue, offset]: wait for a message at that offset or later"]]
    every: NotRequired[Annotated[bool, "also wait on all other queues, from offset 0; the topic need not exist yet"]]
    wait_ms: NotRequired[Annotated[int, "milliseconds, at most 60,000; 0 unless given"]]


class Ready(TypedDict):
    """The queues with such messages; none after the timeout."""

    queues: list[QueueRange]


class Create(TypedDict):
    """The topic to create."""

    name: TopicName
    queues: NotRequired[Annotated[int, Bounds(1, MAX_QUEUE), "how many; the broker's default unless given"]]
    may_exist: NotRequired[Annotated[bool, "no error if it exists"]]


class Created(TypedDict):
    """The current topic."""

    name: TopicName
    queues: Annotated[int, "how many"]


class Alter(Retention, Signed):
    """New settings of a topic. Missing fields keep their value."""

    name: TopicName
    queues: NotRequired[Annotated[int, Bounds(1, MAX_QUEUE), "how many; never fewer than it has"]]
    reset: NotRequired[Annotated[list[RetentionName], "returns to the broker's"]]


class Altered(Retention):
    """Current settings of a topic."""

    name: TopicName
    queues: Annotated[int, "how many"]


class Delete(Signed):
    """The topic to delete."""

    name: TopicName
    force: NotRequired[
        Annotated[bool, "roll back undecided transactions and unsubscribe its groups, instead of CONFLICT"]
    ]
    check: NotRequired[Annotated[bool, "change nothing: only reject, or report the effect"]]


class Deleted(TypedDict):
    """Removed parts of a topic, real or predicted."""

    name: TopicName
    deleted: Annotated[bool, "false: it was only checked"]
    queues: Annotated[int, "how many it had"]
    messages: Annotated[int, "stored ones"]
    delayed: Annotated[int, "delayed ones"]
    rolled_back: Annotated[int, "undecided transactions"]
    groups: list[Annotated[ConsumerGroup, "was subscribed"]]
    dead_letters: Annotated[int, "of all groups"]


LIST = Action("topics.list", Nothing, Topics, "All topics with their queues.", reads_only=True)
OFFSETS = Action(
    "topics.offsets",
    AskOffsets,
    Offsets,
    "Offsets of the queues of a topic: first, last, and at a time. A system view has one queue, numbered 0.",
    reads_only=True,
)
WAIT = Action(
    "topics.wait",
    Wait,
    Ready,
    "Wait until queues of a topic, or of a system view, have messages at given offsets or later.",
    reads_only=True,
)
CREATE = Action("topics.create", Create, Created, "Create a topic, or add queues to it.")
ALTER = Action(
    "topics.alter",
    Alter,
    Altered,
    "Add queues to a topic, or set its retention; messages beyond it are removed at once.",
)
DELETE = Action(
    "topics.delete",
    Delete,
    Deleted,
    "Delete a topic with its messages. Only `topics.create` can reuse its name, for another topic.",
)
