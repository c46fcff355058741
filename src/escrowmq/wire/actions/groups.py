"""Actions on consumer groups and their members."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, OfGroup, Signed
from escrowmq.wire.actions.topics import NumberedQueue
from escrowmq.wire.values import (
    LARGEST_NUMBER,
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
    Literal["redeliver", "hold"], "`redeliver`: when their lease ends; `hold`: until it comes back or is fenced"
]


Delays = "before the second, the third, … delivery, the last for all that follow; instead of a back-off"


class Subscribe(OfGroup):
    """The subscription of a group, the same for all its members."""

    topics: Annotated[list[str], "names of topics"]
    tags: NotRequired[Annotated[list[str], "messages with one of these tags; all unless given"]]
    ordered: NotRequired[Annotated[bool, "messages of one key one after another, also after one failed"]]
    start: NotRequired[Annotated[str, "in queues new to it: `earliest` (default), `latest`, microseconds since 1970"]]
    max_attempts: NotRequired[Annotated[int, Bounds(1, 1 << 30), "deliveries until a message is a dead letter"]]
    retry_backoff: NotRequired[Annotated[Seconds, "before the second delivery; doubled each time"]]
    retry_backoff_max: NotRequired[Annotated[Seconds, "before a delivery, at most"]]
    retry_delays: NotRequired[Annotated[list[Seconds], Delays]]
    in_doubt: NotRequired[
        Annotated[InDoubt, "what becomes of the messages of a silent member; `redeliver` unless given"]
    ]


class Subscribed(TypedDict):
    """The group."""

    group: Annotated[int, "number of the consumer group"]
    created: Annotated[bool, "it did not exist"]
    start: NotRequired[Annotated[str, "where it began in the queues that there were"]]
    lease_seconds: NotRequired[Annotated[Seconds, "how long a lease lasts unless a receive says otherwise"]]


class Alter(OfGroup, Signed):
    """The new subscription of a group; what is not given stays."""

    topics: NotRequired[Annotated[list[str], "names of topics"]]
    tags: NotRequired[Annotated[list[str], "messages with one of these tags, of those not passed over yet; none: all"]]
    ordered: NotRequired[Annotated[bool, "messages of one key one after another; CONFLICT while something is leased"]]
    in_doubt: NotRequired[Annotated[InDoubt, "CONFLICT while something is leased"]]
    start: NotRequired[Annotated[str, "in queues new to the group, as of `groups.subscribe`"]]
    max_attempts: NotRequired[Annotated[int, Bounds(1, 1 << 30), "deliveries until a message is a dead letter"]]
    retry_backoff: NotRequired[Annotated[Seconds, "before the second delivery; doubled each time"]]
    retry_backoff_max: NotRequired[Annotated[Seconds, "before a delivery, at most"]]
    retry_delays: NotRequired[Annotated[list[Seconds], Delays]]
    default_redelivery: NotRequired[Annotated[bool, "begin with the broker's settings of redelivery"]]


class Subscription(TypedDict):
    """The subscription of a group."""

    topics: list[str]
    tags: Annotated[list[str], "empty: all"]
    ordered: bool
    in_doubt: InDoubt
    start: Annotated[str, "where it began in the queues that there were"]
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
    """Where a group is to continue: at `start`, at an `offset`, by `shift`, or at `places`: one of the four."""

    topic: NotRequired[Annotated[str, "in its queues only; in those of all topics unless given"]]
    queue: NotRequired[Annotated[QueueNumber, "in this queue of the topic only"]]
    start: NotRequired[Annotated[str, "`earliest`, `latest`, or microseconds since 1970: what became visible then"]]
    offset: NotRequired[Annotated[Offset, "of the queue, which must be given"]]
    shift: NotRequired[
        Annotated[int, Bounds(-LARGEST_NUMBER, LARGEST_NUMBER), "offsets from where it is, back if below 0"]
    ]
    places: NotRequired[
        Annotated[list[Place], "as an answer has shown them; what has left the log since is passed over"]
    ]
    force: NotRequired[Annotated[bool, "also what members of a group of `in_doubt` `hold` hold; else CONFLICT"]]
    dry_run: NotRequired[Annotated[bool, "answer what it would do, and do nothing"]]


class Moved(TypedDict):
    """Where a group continues in one queue, and messages by what becomes of them."""

    queue_id: QueueId
    topic: TopicName
    queue: QueueNumber
    end: End
    was: Annotated[Offset, "where it was: the first to be delivered, or not settled"]
    now: Annotated[Offset, "where it goes on"]
    again: Annotated[int, "were settled, and are delivered again"]
    skipped: Annotated[int, "were to be delivered, and are passed over"]
    leased: Annotated[int, "were held by members, whose leases end"]
    dead: Annotated[int, "were dead letters, and are delivered again"]


class Moves(TypedDict):
    """The result of a reset, or its preview."""

    queues: list[Moved]


class Pause(OfGroup, Signed):
    """Topics to pause or resume for a group."""

    topics: NotRequired[Annotated[list[str], "of the group's; all of them unless given"]]


class Paused(TypedDict):
    """The topics that are paused now."""

    all: Annotated[bool, "the whole group"]
    topics: Annotated[list[str], "those that are paused by name"]
    leased: Annotated[int, "messages that members hold: they may be settled"]


class Delete(OfGroup, Signed):
    """The group that is to be forgotten."""

    number: NotRequired[
        Annotated[int, "that of the group that is meant; UNKNOWN_GROUP if another one has its name now"]
    ]
    force: NotRequired[Annotated[bool, "also while consumers wait for messages or hold some; else CONFLICT"]]


class Deleted(TypedDict):
    """Losses with a deleted group; counts are messages, except members."""

    number: Annotated[int, "that of the group"]
    leased: Annotated[int, "held by members"]
    retrying: Annotated[int, "were to be delivered again"]
    dead_letters: int
    members: Annotated[int, "named ones"]


class NamedMember(OfGroup):
    """A named member of a group."""

    instance: Instance


class FenceMember(NamedMember, Signed):
    """The member that is to be shut out."""


class Join(NamedMember):
    """The process that wants to be a named member of a group of `in_doubt` `hold`."""

    process: Annotated[int, "random number of the process"]
    resume: NotRequired[Annotated[bool, "it is the member already, and lost an answer"]]
    keep: NotRequired[Annotated[list[Pair], "[lease, offset behind the last of its messages that reached the process]"]]


class Joined(TypedDict):
    """Options of the member's receives."""

    member: int
    epoch: int


class HeldLease(TypedDict):
    """Messages that one lease still holds."""

    lease: Annotated[int, "number of the lease"]
    topic: TopicName
    queue: QueueNumber
    first: Annotated[Offset, "the first that is not settled"]
    last: Annotated[Offset, "the last that is not settled"]
    messages: Annotated[int, "how many are not settled"]
    in_doubt: Annotated[int, "how many of these were handed to a process that may have died with them"]
    attempt: Annotated[int, "1 the first time"]
    deadline_us: Annotated[TimeUs | None, "when the lease ends; null: not by time"]


class Member(TypedDict):
    """One member of a consumer group and what it holds. An unnamed one has no instance, epoch, fenced and joined_us."""

    member: int
    instance: Instance | None
    epoch: int | None
    fenced: Annotated[bool | None, "its process is shut out"]
    joined_us: TimeUs | None
    leases: Annotated[int, "how many it holds"]
    messages: Annotated[int, "how many it holds"]
    in_doubt: Annotated[int, "how many of these are in doubt"]
    held: Annotated[list[HeldLease], "oldest first"]


class Members(TypedDict):
    """The members of a consumer group."""

    members: list[Member]


class Fenced(TypedDict):
    """The member, which is shut out."""

    member: int
    messages: Annotated[int, "given back to the group"]


class GroupQueue(NumberedQueue):
    """Where a consumer group stands in one queue. The counts are messages by state."""

    topic: TopicName
    floor: Annotated[Offset, "everything below is settled"]
    next: Annotated[Offset, "everything from there on waits"]
    waiting: int
    leased: int
    retrying: Annotated[int, "wait for their next delivery; in an ordered group also those behind them, by key"]
    dead: int
    acked: int
    filtered: Annotated[int, "passed over because of their tags"]
    discarded: Annotated[int, "dead letters that a person let go"]
    expired: Annotated[int, "left the log by retention"]
    skipped: Annotated[int, "before the group's start, or passed over by a reset"]


class Group(Subscription):
    """One consumer group."""

    group: Annotated[int, "number of the group"]
    name: ConsumerGroup
    leases: Annotated[int, "unsettled ones"]
    dead_letters: int
    paused: NotRequired[Annotated[bool, "nothing is handed out"]]
    paused_topics: NotRequired[Annotated[list[str], "nothing of these is handed out"]]
    paused_us: NotRequired[Annotated[TimeUs | None, "since when something is paused; null: nothing is"]]
    queues: list[GroupQueue]


class Groups(TypedDict):
    """All consumer groups of a broker."""

    groups: list[Group]


SUBSCRIBE = Action("groups.subscribe", Subscribe, Subscribed, "Make a consumer group, or join it.")
ALTER = Action("groups.alter", Alter, Subscription, "Give a consumer group another subscription.")
RESET = Action("groups.reset", Reset, Moves, "Set where a consumer group goes on.")
PAUSE = Action("groups.pause", Pause, Paused, "Hand out nothing to a consumer group.")
RESUME = Action("groups.resume", Pause, Paused, "Hand out messages to a consumer group again.")
DELETE = Action("groups.delete", Delete, Deleted, "Forget a consumer group with all that it did.")
JOIN = Action("groups.join", Join, Joined, "Be a named member of a consumer group of `in_doubt` `hold`.")
MEMBERS = Action("groups.members", OfGroup, Members, "Which member of a consumer group holds what.", reads_only=True)
FENCE = Action("groups.fence", FenceMember, Fenced, "Give back to a consumer group what a silent named member holds.")
LIST = Action("groups.list", Nothing, Groups, "All consumer groups, with where they stand.", reads_only=True)
