"""State of topics, groups and single messages, with pending work and its causes."""

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
Member = Annotated[int, "number of the holding member"]
Attempt = Annotated[int, "1 the first time"]
Fate = Literal["waiting", "leased", "retrying", "dead", "acked", "filtered", "discarded", "expired", "skipped", "gone"]


class TopicStands(TypedDict):
    """One topic."""

    topic: TopicName
    stored: Annotated[int, "messages in its queues"]
    end: Annotated[int, "messages that its queues ever had"]


class ConsumersStand(TypedDict):
    """State of a consumer group in one of its topics; counts are messages."""

    group: ConsumerGroup
    topic: TopicName
    lag: Annotated[int, "incomplete: waiting, leased and retrying ones"]
    leased: int
    retrying: Annotated[int, "waiting for redelivery"]
    dead: int
    lag_seconds: Annotated[float, "age of the oldest incomplete one"]
    receiving: Annotated[int, "waiting receives of the group, in any topic"]
    paused: NotRequired[Annotated[bool, "nothing of the topic is delivered to the group"]]
    limited: NotRequired[Annotated[bool, "the group has limits"]]
    acked: NotRequired[Annotated[int, "acknowledged ones since the group began, or was reset"]]


class ProducersStand(TypedDict):
    """State of a producer group; counts are transactions."""

    group: ProducerGroup
    open: Annotated[int, "undecided, awaiting check-backs"]
    parked: Annotated[int, "undecided, waiting for an operator"]
    oldest_seconds: Annotated[float, "age of the oldest open one; 0: none"]
    connected: Annotated[int, "sessions available for check-backs"]


class ReaderStands(TypedDict):
    """A streaming query that has read a topic in the last 24 hours, and since the broker started."""

    reader: Annotated[str, "name of the query, or its id"]
    topic: TopicName
    lag: Annotated[int, "messages after its last read, in the queues that it has read"]
    read_us: Annotated[TimeUs, "time of its last read"]


class Standings(TypedDict):
    """State of all topics and groups at one broker."""

    topics: list[TopicStands]
    consumers: list[ConsumersStand]
    producers: list[ProducersStand]
    readers: NotRequired[Annotated[list[ReaderStands], "absent: a folder, or a broker of an earlier version"]]


class AskOfMessage(TypedDict):
    """Position of a message, in the form that consumers have."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset
    history: NotRequired[Annotated[bool, "also its events, read from the log"]]


class AtGroup(TypedDict):
    """State of a message in one consumer group."""

    group: ConsumerGroup
    state: Annotated[Fate, "`waiting`: not delivered yet; `filtered`: skipped because of its tag"]
    subscribed: Annotated[bool, "the group consumes the topic now"]
    ordered: bool
    max_attempts: Annotated[int, "deliveries until a message is a dead letter"]
    receiving: Annotated[int, "waiting receives of the group"]
    paused: NotRequired[Annotated[bool, "nothing of the topic is delivered to the group"]]
    limited: NotRequired[Annotated[bool, "the group is at its rate or limit in flight now"]]
    before: NotRequired[Annotated[int, "of a waiting one: earlier messages of its queue"]]
    chosen: NotRequired[Annotated[bool, "of a waiting one: the group's tags include it"]]
    attempt: NotRequired[Annotated[Attempt, "of a leased one, and of a retrying one the next; of a dead one the last"]]
    lease: NotRequired[Lease]
    leased_us: NotRequired[Annotated[TimeUs | None, "null: no longer in the log"]]
    deadline_us: NotRequired[Annotated[TimeUs | None, "when the lease ends; null: not by time"]]
    member: NotRequired[Member]
    instance: NotRequired[Annotated[Instance | None, "null: the member has no name"]]
    in_doubt: NotRequired[Annotated[bool, "the process with it may have crashed"]]
    due_us: NotRequired[Annotated[TimeUs, "of a retrying one: earliest redelivery"]]
    behind: NotRequired[Annotated[Offset, "in order: the earlier message of its key"]]
    cause: NotRequired[Annotated[str, "of a dead one"]]
    dead_us: NotRequired[TimeUs]


class Happened(TypedDict):
    """One event of a message in a consumer group."""

    group: ConsumerGroup
    event: Annotated[
        Literal["leased", "acked", "failed", "released", "dead", "retried", "discarded", "edited", "reset"],
        "`released`: returned, not counted as a failure; `retried`, `discarded`: by an operator; `edited`: an operator"
        " replaced the message for the group; `reset`: an operator moved the group to another offset of the queue",
    ]
    time_us: TimeUs
    position: Position
    attempt: NotRequired[Attempt]
    lease: NotRequired[Lease]
    member: NotRequired[Member]
    due_us: NotRequired[Annotated[TimeUs, "of a failure: earliest redelivery"]]
    expired: NotRequired[Annotated[bool, "of a failure: the lease expired"]]
    cause: NotRequired[Annotated[str, "of a failure and of a death: the cause from the consumer, if any"]]
    message_id: NotRequired[Annotated[MessageId, "of an edit: id of the replacement"]]


class OfMessage(TypedDict):
    """State of a message in every consumer group of its topic."""

    position: Position
    placed_us: Annotated[TimeUs, "time when it became visible"]
    groups: list[AtGroup]
    more: NotRequired[Annotated[int, "omitted groups"]]
    events: NotRequired[Annotated[list[Happened], "with `history`: oldest first"]]
    until_us: NotRequired[Annotated[TimeUs, "later events were not read: too much log in between"]]


ALL = Action("standing", Nothing, Standings, "State of all topics and groups.", reads_only=True)
OF_MESSAGE = Action(
    "messages.standing",
    AskOfMessage,
    OfMessage,
    "State of a message in each consumer group, and its events there.",
    reads_only=True,
)
