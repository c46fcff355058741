"""Actions on consumer groups and their members."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, OfGroup, Signed
from escrowmq.wire.actions.topics import NumberedQueue
from escrowmq.wire.values import (
    LARGEST_NUMBER,
    MAX_QUEUE,
    Bounds,
    ConsumerGroup,
    End,
    Instance,
    Offset,
    Pair,
    QueueId,
    QueueNumber,
    Seconds,
    TimeUs,
    TopicName,
)

InDoubt = Annotated[
    Literal["redeliver", "hold"], "`redeliver`: when their lease ends; `hold`: kept until it returns or is fenced"
]


Delays = "before the second, the third, … delivery, the last value for all further ones; instead of a back-off"


class Subscribe(OfGroup):
    """Subscription of a group; the same for all its members."""

    topics: Annotated[list[str], "names of topics"]
    tags: NotRequired[Annotated[list[str], "messages with one of these tags; all unless given"]]
    ordered: NotRequired[Annotated[bool, "messages of one key in order, also after a failure"]]
    start: NotRequired[Annotated[str, "in queues new to it: `earliest` (default), `latest`, microseconds since 1970"]]
    max_attempts: NotRequired[Annotated[int, Bounds(1, 1 << 30), "deliveries until a message is a dead letter"]]
    retry_backoff: NotRequired[Annotated[Seconds, "before the second delivery; doubled each time"]]
    retry_backoff_max: NotRequired[Annotated[Seconds, "before a delivery, at most"]]
    retry_delays: NotRequired[Annotated[list[Seconds], Delays]]
    in_doubt: NotRequired[Annotated[InDoubt, "policy for the messages of a silent member; `redeliver` unless given"]]


class Subscribed(TypedDict):
    """Result of a subscription."""

    group: Annotated[int, "number of the consumer group"]
    created: Annotated[bool, "true: the group is new"]
    start: NotRequired[Annotated[str, "its start in the queues that existed then"]]
    lease_seconds: NotRequired[Annotated[Seconds, "default duration of a lease"]]
    max_attempts: NotRequired[Annotated[int, "deliveries until a message is a dead letter"]]


class Alter(OfGroup, Signed):
    """New subscription of a group; missing fields keep their value."""

    topics: NotRequired[Annotated[list[str], "names of topics"]]
    tags: NotRequired[Annotated[list[str], "messages with one of these tags, among those not yet skipped; none: all"]]
    ordered: NotRequired[Annotated[bool, "messages of one key in order; CONFLICT while something is leased"]]
    in_doubt: NotRequired[Annotated[InDoubt, "CONFLICT while something is leased"]]
    start: NotRequired[Annotated[str, "in queues new to the group, as of `groups.subscribe`"]]
    max_attempts: NotRequired[Annotated[int, Bounds(1, 1 << 30), "deliveries until a message is a dead letter"]]
    retry_backoff: NotRequired[Annotated[Seconds, "before the second delivery; doubled each time"]]
    retry_backoff_max: NotRequired[Annotated[Seconds, "before a delivery, at most"]]
    retry_delays: NotRequired[Annotated[list[Seconds], Delays]]
    default_redelivery: NotRequired[Annotated[bool, "start from the broker's redelivery settings"]]


class Subscription(TypedDict):
    """Subscription of a group."""

    topics: list[str]
    tags: Annotated[list[str], "empty: all"]
    ordered: bool
    in_doubt: InDoubt
    start: Annotated[str, "its start in the queues that existed then"]
    max_attempts: Annotated[int, "deliveries until a message is a dead letter"]
    retry_backoff: Annotated[Seconds, "before the second delivery; doubled each time"]
    retry_backoff_max: Annotated[Seconds, "before a delivery, at most"]
    retry_delays: Annotated[list[Seconds], Delays, "empty: a back-off"]


class Place(TypedDict):
    """One offset of one queue."""

    topic: TopicName
    queue: QueueNumber
    offset: Offset


class Reset(OfGroup, Signed):
    """New position of a group: exactly one of `start`, `offset`, `shift` and `places`."""

    topic: NotRequired[Annotated[str, "only in its queues; in all topics unless given"]]
    queue: NotRequired[Annotated[QueueNumber, "only in this queue of the topic"]]
    start: NotRequired[Annotated[str, "`earliest`, `latest`, or microseconds since 1970 (time of visibility)"]]
    offset: NotRequired[Annotated[Offset, "of the queue, which must be given"]]
    shift: NotRequired[
        Annotated[int, Bounds(-LARGEST_NUMBER, LARGEST_NUMBER), "offsets from the current position, back if negative"]
    ]
    places: NotRequired[Annotated[list[Place], "from an earlier answer; offsets that left the log since are skipped"]]
    force: NotRequired[Annotated[bool, "also messages held by members if `in_doubt` is `hold`; else CONFLICT"]]
    dry_run: NotRequired[Annotated[bool, "only report the effect"]]


class Moved(TypedDict):
    """New position of a group in one queue, and the affected messages."""

    queue_id: QueueId
    topic: TopicName
    queue: QueueNumber
    end: End
    was: Annotated[Offset, "previous position: the first not delivered, or not settled"]
    now: Annotated[Offset, "new position"]
    again: Annotated[int, "settled ones that are redelivered"]
    skipped: Annotated[int, "undelivered ones that are skipped"]
    leased: Annotated[int, "held by members, whose leases end"]
    dead: Annotated[int, "dead letters that are redelivered"]


class Moves(TypedDict):
    """Effect of a reset, real or predicted."""

    queues: list[Moved]


class Pause(OfGroup, Signed):
    """Topics of a group to pause or resume."""

    topics: NotRequired[Annotated[list[str], "of the group's; all of them unless given"]]


class Paused(TypedDict):
    """What is paused after the call."""

    all: Annotated[bool, "the whole group"]
    topics: Annotated[list[str], "the topics paused by name"]
    leased: Annotated[int, "messages held by members, which can still be settled"]


class Limits(TypedDict):
    """Limits of a group at one broker; without a field there is none of its kind."""

    rate: NotRequired[Annotated[float, "messages per second, 0.001 or more"]]
    in_flight: NotRequired[Annotated[int, Bounds(1, MAX_QUEUE), "leased messages"]]
    in_flight_per_key: NotRequired[Annotated[int, Bounds(1, MAX_QUEUE), "leased messages of one key"]]


class Limit(OfGroup, Signed, Limits):
    """The new limits of a group, in place of all earlier ones."""


class Limited(Limits):
    """The limits after the call."""

    leased: Annotated[int, "messages held by members, perhaps more than the new limits"]


class Delete(OfGroup, Signed):
    """The group to delete."""

    number: NotRequired[Annotated[int, "number of the group; UNKNOWN_GROUP if another one has its name now"]]
    force: NotRequired[Annotated[bool, "also while consumers wait for or hold messages; else CONFLICT"]]


class Deleted(TypedDict):
    """Removed parts of a group; counts are messages, except members."""

    number: Annotated[int, "number of the group"]
    leased: Annotated[int, "held by members"]
    retrying: Annotated[int, "waiting for redelivery"]
    dead_letters: int
    members: Annotated[int, "named ones"]


class NamedMember(OfGroup):
    """A named member of a group."""

    instance: Instance


class FenceMember(NamedMember, Signed):
    """The member to fence."""


class Join(NamedMember):
    """A process that becomes a named member of a group with `in_doubt` `hold`."""

    process: Annotated[int, "random number of the process"]
    resume: NotRequired[Annotated[bool, "it already is the member, and lost an answer"]]
    keep: NotRequired[Annotated[list[Pair], "[lease, offset after its last message that reached the process]"]]


class Joined(TypedDict):
    """Options of the member's receives."""

    member: int
    epoch: int


class HeldLease(TypedDict):
    """Messages of one lease."""

    lease: Annotated[int, "number of the lease"]
    topic: TopicName
    queue: QueueNumber
    first: Annotated[Offset, "the first unsettled one"]
    last: Annotated[Offset, "the last unsettled one"]
    messages: Annotated[int, "unsettled ones"]
    in_doubt: Annotated[int, "those delivered to a process that may have crashed"]
    attempt: Annotated[int, "1 the first time"]
    deadline_us: Annotated[TimeUs | None, "when the lease ends; null: not by time"]


class Member(TypedDict):
    """One member of a consumer group and its messages. An unnamed one has no instance, epoch, fenced and joined_us."""

    member: int
    instance: Instance | None
    epoch: int | None
    fenced: Annotated[bool | None, "its process is fenced"]
    joined_us: TimeUs | None
    leases: Annotated[int, "held ones"]
    messages: Annotated[int, "held ones"]
    in_doubt: Annotated[int, "those in doubt"]
    held: Annotated[list[HeldLease], "oldest first"]
    heard_us: NotRequired[Annotated[TimeUs, "of a connected one: when its process was last heard"]]
    address: NotRequired[Annotated[str | None, "of a connected one; null: in the broker's process"]]
    receiving: NotRequired[Annotated[bool, "of a connected one: it waits for messages"]]


class Members(TypedDict):
    """The members of a consumer group."""

    members: list[Member]


class Fenced(TypedDict):
    """The fenced member."""

    member: int
    messages: Annotated[int, "returned to the group"]


class GroupQueue(NumberedQueue):
    """Position of a consumer group in one queue. The counts are messages by state."""

    topic: TopicName
    floor: Annotated[Offset, "everything below is settled"]
    next: Annotated[Offset, "everything from there on waits"]
    waiting: int
    leased: int
    retrying: Annotated[int, "waiting for redelivery; in an ordered group also later ones of their keys"]
    dead: int
    acked: int
    filtered: Annotated[int, "skipped because of their tags"]
    discarded: Annotated[int, "dead letters discarded by an operator"]
    expired: Annotated[int, "removed by retention"]
    skipped: Annotated[int, "before the group's start, or skipped by a reset"]


class Group(Subscription):
    """One consumer group."""

    group: Annotated[int, "number of the group"]
    name: ConsumerGroup
    leases: Annotated[int, "unsettled ones"]
    dead_letters: int
    paused: NotRequired[Annotated[bool, "nothing is delivered"]]
    paused_topics: NotRequired[Annotated[list[str], "nothing of these is delivered"]]
    paused_us: NotRequired[Annotated[TimeUs | None, "start of the pause; null: nothing is paused"]]
    limits: NotRequired[Limits]
    queues: list[GroupQueue]


class Groups(TypedDict):
    """All consumer groups of a broker."""

    groups: list[Group]


SUBSCRIBE = Action("groups.subscribe", Subscribe, Subscribed, "Create a consumer group, or join it.")
ALTER = Action("groups.alter", Alter, Subscription, "Change the subscription of a consumer group.")
RESET = Action("groups.reset", Reset, Moves, "Set the position of a consumer group.")
PAUSE = Action("groups.pause", Pause, Paused, "Stop deliveries to a consumer group.")
RESUME = Action("groups.resume", Pause, Paused, "Resume deliveries to a consumer group.")
LIMIT = Action("groups.limit", Limit, Limited, "Limit what a consumer group receives.")
DELETE = Action("groups.delete", Delete, Deleted, "Delete a consumer group with its state.")
JOIN = Action("groups.join", Join, Joined, "Become a named member of a consumer group with `in_doubt` `hold`.")
MEMBERS = Action(
    "groups.members",
    OfGroup,
    Members,
    "Connected consumers of a group, and its members with their messages.",
    reads_only=True,
)
FENCE = Action("groups.fence", FenceMember, Fenced, "Fence a silent named member, and release its messages.")
LIST = Action("groups.list", Nothing, Groups, "All consumer groups, with their positions.", reads_only=True)
