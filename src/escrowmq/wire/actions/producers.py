"""Actions on producer groups and their sessions."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing
from escrowmq.wire.values import MAX_SESSION, Bounds, Instance, ProducerGroup, SessionNumber, TimeUs


class OpenSession(TypedDict):
    """Who wants a session."""

    group: ProducerGroup
    instance: Instance
    transactional: NotRequired[Annotated[bool, "it will prepare half messages"]]
    resume: NotRequired[
        Annotated[
            int,
            Bounds(0, MAX_SESSION),
            "a session of this process that the broker has forgotten; Fenced if a newer process has its name",
        ]
    ]


class Opened(TypedDict):
    """The new session."""

    session: SessionNumber


class Producers(TypedDict):
    """All producer groups of a broker."""

    producers: list[Producer]


class ProducerEntry(TypedDict):
    """One producer group, as its ledger knows it."""

    group: ProducerGroup
    transactional: Annotated[bool, "it prepares half messages"]
    open: Annotated[int, "undecided transactions that will be asked about"]
    parked: Annotated[int, "undecided transactions that wait for a person"]
    oldest_us: Annotated[TimeUs | None, "when the oldest open one was prepared"]


class Producer(ProducerEntry):
    """One producer group."""

    members: Annotated[int, "sessions that are connected"]


OPEN_SESSION = Action("session.open", OpenSession, Opened, "Begin a producer session, or resume one.")
LIST = Action(
    "producers.list", Nothing, Producers, "All producer groups, with what they have undecided.", reads_only=True
)
