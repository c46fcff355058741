"""Actions on producer groups and their sessions."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing
from escrowmq.wire.values import Instance, ProducerGroup, Session, SessionNumber, TimeUs


class OpenSession(TypedDict):
    """Who wants a session."""

    group: ProducerGroup
    instance: Instance
    transactional: NotRequired[Annotated[bool, "it will prepare half messages"]]
    resume: NotRequired[Annotated[Session, "one of this process that is forgotten; Fenced if a newer has its name"]]


class Opened(TypedDict):
    """The new session."""

    session: SessionNumber


class Producers(TypedDict):
    """All producer groups of a broker."""

    producers: list[Producer]


class Undecided(TypedDict):
    """What a producer group has undecided."""

    group: ProducerGroup
    open: Annotated[int, "undecided transactions that will be asked about"]
    parked: Annotated[int, "undecided transactions that wait for a person"]
    members: Annotated[int, "sessions that are connected"]


class Producer(Undecided):
    """One producer group."""

    transactional: Annotated[bool, "it prepares half messages"]
    oldest_us: Annotated[TimeUs | None, "when the oldest open one was prepared"]


OPEN_SESSION = Action("session.open", OpenSession, Opened, "Begin a producer session, or resume one.")
LIST = Action(
    "producers.list", Nothing, Producers, "All producer groups, with what they have undecided.", reads_only=True
)
