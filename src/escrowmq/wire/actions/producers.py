"""Actions on producer groups and their sessions."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Signed
from escrowmq.wire.values import Bounds, Instance, ProducerGroup, Seconds, Session, SessionNumber, TimeUs

KindName = Literal["plain", "transactional", "mixed"]
GroupKind = Annotated[KindName, "kind of its messages; others are rejected with GROUP_KIND"]
ExhaustedName = Literal["park", "rollback"]
Exhausted = Annotated[ExhaustedName, "action after the last check-back"]
RuleName = Literal["kind", "transaction_timeout", "check_interval", "check_max", "checks_exhausted"]


class CheckRules(TypedDict):
    """Check-back rules of a producer group. Missing values follow the broker's setting of that name."""

    transaction_timeout: NotRequired[Annotated[Seconds, "before the first check-back"]]
    check_interval: NotRequired[Annotated[Seconds, "between two check-backs of one transaction"]]
    check_max: NotRequired[Annotated[int, Bounds(1, 1 << 30), "check-backs of one transaction"]]
    checks_exhausted: NotRequired[Exhausted]


class OpenSession(TypedDict):
    """Request of a session."""

    group: ProducerGroup
    instance: Instance
    transactional: NotRequired[Annotated[bool, "it will prepare half messages"]]
    resume: NotRequired[Annotated[Session, "an expired one of this process; Fenced if a newer process has its name"]]
    rules: NotRequired[Annotated[CheckRules, "rules of a new group; an existing group must have the same"]]
    process: NotRequired[Annotated[int, "random number of the process: a repeated request gets the same session"]]


class Opened(TypedDict):
    """The new session."""

    session: SessionNumber


class Producers(TypedDict):
    """All producer groups of a broker."""

    producers: list[Producer]


class Undecided(TypedDict):
    """Undecided transactions of a producer group."""

    group: ProducerGroup
    open: Annotated[int, "undecided transactions awaiting check-backs"]
    parked: Annotated[int, "undecided transactions that wait for an operator"]
    members: Annotated[int, "sessions that are connected"]


class Producer(Undecided):
    """One producer group."""

    transactional: Annotated[bool, "it prepares half messages"]
    kind: Annotated[GroupKind | None, "null: it has sent nothing yet"]
    transaction_timeout: Annotated[Seconds, "before the first check-back of a transaction"]
    check_interval: Annotated[Seconds, "between two check-backs of one transaction"]
    check_max: Annotated[int, "check-backs of one transaction"]
    checks_exhausted: Exhausted
    own: Annotated[list[RuleName], "those set for the group; the others are the broker's settings"]
    oldest_us: Annotated[TimeUs | None, "when the oldest open one was prepared"]


class Alter(CheckRules, Signed):
    """New rules of a producer group, which is created if it does not exist."""

    group: ProducerGroup
    kind: NotRequired[GroupKind]
    reset: NotRequired[Annotated[list[RuleName], "returns to the broker's; `kind` follows the group's next message"]]


class Altered(CheckRules):
    """Rules set for a producer group."""

    group: ProducerGroup
    kind: NotRequired[GroupKind]


OPEN_SESSION = Action("session.open", OpenSession, Opened, "Open a producer session, or resume one.")
LIST = Action(
    "producers.list", Nothing, Producers, "All producer groups, with their undecided transactions.", reads_only=True
)
ALTER = Action("producers.alter", Alter, Altered, "Set the kind and the check-back rules of a producer group.")
