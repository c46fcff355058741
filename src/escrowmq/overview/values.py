"""Results of the overview as plain values: events, stories, causes, and the state of everything. Each has
``to_json()``.

Times are microseconds since 1970, by the clock of the broker or the database that reported them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from escrowmq.client.links.presence import Missing


class AsJson:
    """A value that can be converted to JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        made: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return made


# The history of one message


@dataclass(frozen=True, slots=True)
class Event(AsJson):
    """One event in the history of a message."""

    time_us: int | None
    """None: the time is no longer stored."""
    event: str
    """A word for programs: ``prepared``, ``leased``, ..."""
    where: str
    """Address of the broker, or name of the database."""
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer(AsJson):
    """An operation that an operator can choose."""

    act: str
    """The name of the operation in plans: ``transactions.commit``, ``dead_letters.retry``, ..."""
    selection: Mapping[str, Any]
    """The selection of a plan."""


@dataclass(frozen=True, slots=True)
class Story(AsJson):
    """The history of one message over all brokers and databases that have it."""

    title: str
    message_id: str | None
    """32 hex digits; None if it is unknown, or the message is damaged."""
    topic: str | None
    key: str | None
    tag: str | None
    transaction: str | None
    """In printed form; None for a message without a transaction."""
    state: str
    waits: bool
    """Whether the message is pending anywhere."""
    why: str
    """One sentence: why the message waits, or that it does not."""
    events: tuple[Event, ...]
    """Oldest first. Events without a time keep their place after the event before them."""
    notes: tuple[str, ...] = ()
    """What is unknown, and why."""
    offers: tuple[Offer, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    """The beginning of the body as text; None if there is no body to show."""
    body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Timeline(AsJson):
    """The result of a search: stories, newest first, and whether there are more messages."""

    wanted: str
    stories: tuple[Story, ...]
    more: bool
    now_us: int
    missing: tuple[Missing, ...] = ()
    """Brokers and databases that did not answer; their facts are not included."""
    notes: tuple[str, ...] = ()


# Pending work


@dataclass(frozen=True, slots=True)
class Cause(AsJson):
    """Pending work with one cause: ``count`` of ``unit``, or more if ``at_least``; ``acts``: operations of plans."""

    kind: str
    """``parked``, ``undecided``, ``dead``, ``lagging``, ``outbox``, ``held``, ``stuck``, ``case``, ``suspended``,
    ``disk``, ``damaged``, ``broker`` or ``database``."""
    of: str
    """Their consumer or producer group, topic or compensation; or the broker itself."""
    cause: str
    count: int
    unit: str
    oldest_us: int | None
    """Time of the oldest; None: unknown."""
    needs_person: bool
    sentence: str
    where: str
    """Address of the broker, or name of the database; empty: all brokers."""
    samples: tuple[Mapping[str, Any], ...] = ()
    acts: tuple[str, ...] = ()
    selection: Mapping[str, Any] = field(default_factory=dict)
    """The selection of a plan; empty: no plan is possible."""
    at_least: bool = False


# The state of everything


@dataclass(frozen=True, slots=True)
class BrokerStands(AsJson):
    """One broker. Rates are per second since the previous status, None without one."""

    broker: str
    status: str
    """The status of ``health``, or ``unreachable``."""
    reason: str
    shard: int | None
    version: str | None
    epoch: int | None
    log_bytes: int | None
    free_bytes: int | None
    log_bytes_per_second: float | None
    asked_per_second: float | None
    unanswered: int | None
    """Check-backs without an answer yet."""
    rights: str | None = None
    """Digest of its rights file; None: it has none, or does not respond."""


@dataclass(frozen=True, slots=True)
class TopicStands(AsJson):
    """One topic, over all brokers."""

    topic: str
    stored: int
    per_second: float | None
    """Messages that became visible: since the previous status, or over the last minute."""


@dataclass(frozen=True, slots=True)
class GroupStands(AsJson):
    """One consumer group in one of its topics, over all brokers; counts are messages."""

    group: str
    topic: str
    lag: int
    lag_seconds: float
    leased: int
    retrying: int
    dead: int
    receiving: int
    """Pending requests for messages."""
    paused: bool
    limited: bool
    """An operator has set limits of the group."""


@dataclass(frozen=True, slots=True)
class ReaderStands(AsJson):
    """One streaming query in one of its topics, over all brokers; ``lag`` in messages."""

    reader: str
    topic: str
    lag: int
    read_us: int
    """Time of its last read."""


@dataclass(frozen=True, slots=True)
class ProducersStand(AsJson):
    """One producer group, over all brokers; counts are transactions."""

    group: str
    open: int
    parked: int
    oldest_seconds: float
    connected: int
    """Sessions that can be checked."""


@dataclass(frozen=True, slots=True)
class DatabaseStands(AsJson):
    """The outbox of one database; counts are rows."""

    database: str
    pending: int
    retrying: int
    held: int
    waiting: int
    lag_seconds: float
    relays: int


@dataclass(frozen=True, slots=True)
class Status(AsJson):
    """The state of everything now."""

    now_us: int
    brokers: tuple[BrokerStands, ...]
    topics: tuple[TopicStands, ...]
    groups: tuple[GroupStands, ...]
    producers: tuple[ProducersStand, ...]
    databases: tuple[DatabaseStands, ...]
    waiting: tuple[Cause, ...]
    missing: tuple[Missing, ...]
    readers: tuple[ReaderStands, ...] = ()
    counted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Counters by broker or topic, from which the next status derives rates."""

    @property
    def needs_person(self) -> bool:
        """Return whether any cause needs an operator."""
        return any(cause.needs_person for cause in self.waiting)
