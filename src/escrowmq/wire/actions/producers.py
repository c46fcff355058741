"""Actions on producer groups and their sessions."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Signed
from escrowmq.wire.values import Bounds, Instance, ProducerGroup, Seconds, Session, SessionNumber, TimeUs

KindName = Literal["plain", "transactional", "mixed"]
GroupKind = Annotated[KindName, "which messages it serves; the others are refused with GROUP_KIND"]
ExhaustedName = Literal["park", "rollback"]
Exhausted = Annotated[ExhaustedName, "what follows the last question"]
RuleName = Literal["kind", "transaction_timeout", "check_interval", "check_max", "checks_exhausted"]


class CheckRules(TypedDict):
    """How a producer group's check-back goes. What is not given follows the broker's setting of that name."""

    transaction_timeout: NotRequired[Annotated[Seconds, "before the first question"]]
    check_interval: NotRequired[Annotated[Seconds, "between two questions about one transaction"]]
    check_max: NotRequired[Annotated[int, Bounds(1, 1 << 30), "questions about one transaction"]]
    checks_exhausted: NotRequired[Exhausted]


class OpenSession(TypedDict):
    """A request for a session."""

    group: ProducerGroup
    instance: Instance
    transactional: NotRequired[Annotated[bool, "it will prepare half messages"]]
    resume: NotRequired[Annotated[Session, "one of this process that is forgotten; Fenced if a newer has its name"]]
    rules: NotRequired[Annotated[CheckRules, "what a new group is made with; a group that exists must have them"]]
    process: NotRequired[
        Annotated[int, "random number of the process: a repeat is given the same session, and fences nobody"]
    ]


class Opened(TypedDict):
    """The new session."""

    session: SessionNumber


class Producers(TypedDict):
    """All producer groups of a broker."""

    producers: list[Producer]


class Undecided(TypedDict):
    """A producer group with its undecided transactions."""

    group: ProducerGroup
    open: Annotated[int, "undecided transactions that will be asked about"]
    parked: Annotated[int, "undecided transactions that wait for a person"]
    members: Annotated[int, "sessions that are connected"]


class Producer(Undecided):
    """One producer group."""

    transactional: Annotated[bool, "it prepares half messages"]
    kind: Annotated[GroupKind | None, "null: it has sent nothing yet"]
    transaction_timeout: Annotated[Seconds, "before the first question about a transaction"]
    check_interval: Annotated[Seconds, "between two questions about one transaction"]
    check_max: Annotated[int, "questions about one transaction"]
    checks_exhausted: Exhausted
    own: Annotated[list[RuleName], "which of these are the group's own; the others are the broker's settings"]
    oldest_us: Annotated[TimeUs | None, "when the oldest open one was prepared"]


class Alter(CheckRules, Signed):
    """New settings of a producer group, which is created if it does not exist."""

    group: ProducerGroup
    kind: NotRequired[GroupKind]
    reset: NotRequired[
        Annotated[list[RuleName], "goes back to the broker's; of `kind`: what the group does next says it"]
    ]


class Altered(CheckRules):
    """The producer group's own settings now."""

    group: ProducerGroup
    kind: NotRequired[GroupKind]


OPEN_SESSION = Action("session.open", OpenSession, Opened, "Begin a producer session, or resume one.")
LIST = Action(
    "producers.list", Nothing, Producers, "All producer groups, with what they have undecided.", reads_only=True
)
ALTER = Action("producers.alter", Alter, Altered, "Give a producer group a kind and check-back rules of its own.")
