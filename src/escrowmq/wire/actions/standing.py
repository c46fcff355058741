"""Actions about the state of topics, groups and single messages."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing
from escrowmq.wire.values import (
    ConsumerGroup,
    Instance,
    MessageId,
    Offset,
    Position,
    ProducerGroup,
    QueueNumber,
    TimeUs,
    TopicName,
)

Lease = Annotated[int, "number of the lease"]
Member = Annotated[int, "number of the member that holds it"]
Attempt = Annotated[int, "1 the first time"]
Fate = Literal["waiting", "leased", "retrying", "dead", "acked", "filtered", "discarded", "expired", "skipped", "gone"]


class TopicStands(TypedDict):
    """One topic."""

    topic: TopicName
    stored: Annotated[int, "messages in its queues"]
    end: Annotated[int, "messages that its queues ever had"]


class ConsumersStand(TypedDict):
    """One consumer group in one of its topics; counts are messages."""

    group: ConsumerGroup
    topic: TopicName
    lag: Annotated[int, "not done: waiting, leased and retrying ones"]
    leased: int
    retrying: Annotated[int, "wait for their next delivery"]
    dead: int
    lag_seconds: Annotated[float, "since the oldest that is not done was stored"]
    receiving: Annotated[int, "receives of the group that wait for messages now, in whatever topic"]
    paused: NotRequired[Annotated[bool, "nothing of the topic is handed to the group"]]


class ProducersStand(TypedDict):
    """One producer group; counts are transactions."""

    group: ProducerGroup
    open: Annotated[int, "undecided, to be asked about"]
    parked: Annotated[int, "undecided, waiting for a person"]
    oldest_seconds: Annotated[float, "since the oldest open one was prepared; 0: there is none"]
    connected: Annotated[int, "sessions that can be asked"]


class Standings(TypedDict):
    """The state of everything at one broker."""

    topics: list[TopicStands]
    consumers: list[ConsumersStand]
    producers: list[ProducersStand]


class AskOfMessage(TypedDict):
    """Which message: its place, as consumers have it."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset
    history: NotRequired[Annotated[bool, "also what happened to it, read from the log"]]


class AtGroup(TypedDict):
    """Where a message stands for one consumer group."""

    group: ConsumerGroup
    state: Annotated[Fate, "`waiting`: not delivered yet; `filtered`: passed over because of its tag"]
    subscribed: Annotated[bool, "the group consumes the topic now"]
    ordered: bool
    max_attempts: Annotated[int, "deliveries until a message is a dead letter"]
    receiving: Annotated[int, "receives of the group that wait for messages now"]
    paused: NotRequired[Annotated[bool, "nothing of the topic is handed to the group"]]
    before: NotRequired[Annotated[int, "of a waiting one: messages of its queue that come first"]]
    chosen: NotRequired[Annotated[bool, "of a waiting one: the group's tags choose it"]]
    attempt: NotRequired[Annotated[Attempt, "of a leased one, and of a retrying one the next; of a dead one the last"]]
    lease: NotRequired[Lease]
    leased_us: NotRequired[Annotated[TimeUs | None, "null: that has left the log"]]
    deadline_us: NotRequired[Annotated[TimeUs | None, "when the lease ends; null: not by time"]]
    member: NotRequired[Member]
    instance: NotRequired[Annotated[Instance | None, "null: the member has no name"]]
    in_doubt: NotRequired[Annotated[bool, "the process that it was handed to may have died with it"]]
    due_us: NotRequired[Annotated[TimeUs, "of a retrying one: not delivered before"]]
    behind: NotRequired[Annotated[Offset, "in order: the message of its key that comes first"]]
    cause: NotRequired[Annotated[str, "of a dead one"]]
    dead_us: NotRequired[TimeUs]


class Happened(TypedDict):
    """An event of a message in a consumer group."""

    group: ConsumerGroup
    event: Annotated[
        Literal["leased", "acked", "failed", "released", "dead", "retried", "discarded", "edited", "reset"],
        "`released`: given back, and not counted as a failure; `retried`, `discarded`: by a person; `edited`: a person "
        "gave the group another message"
        " in its place; `reset`: a person moved the group, which begins anew at another place of the queue",
    ]
    time_us: TimeUs
    position: Position
    attempt: NotRequired[Attempt]
    lease: NotRequired[Lease]
    member: NotRequired[Member]
    due_us: NotRequired[Annotated[TimeUs, "of a failure: not delivered again before"]]
    expired: NotRequired[Annotated[bool, "of a failure: the lease ended by time, nobody gave it back"]]
    cause: NotRequired[Annotated[str, "of a failure and of a death: what the consumer said, if it did"]]
    message_id: NotRequired[Annotated[MessageId, "of an edit: that of the message that the group gets instead"]]


class OfMessage(TypedDict):
    """Where a message stands for every consumer group that has to do with it."""

    position: Position
    placed_us: Annotated[TimeUs, "when it came to its place, and so became visible"]
    groups: list[AtGroup]
    more: NotRequired[Annotated[int, "groups that are left out"]]
    events: NotRequired[Annotated[list[Happened], "with `history`: oldest first"]]
    until_us: NotRequired[Annotated[TimeUs, "what happened later was not read: too much lies between"]]


ALL = Action("standing", Nothing, Standings, "How all topics and groups stand.", reads_only=True)
OF_MESSAGE = Action(
    "messages.standing",
    AskOfMessage,
    OfMessage,
    "Where a message stands for each consumer group, and what happened to it there.",
    reads_only=True,
)
