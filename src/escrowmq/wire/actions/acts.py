"""Actions on the record of operator actions."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Paged
from escrowmq.wire.values import TimeUs

ActNumber = Annotated[int, "number of the act's record, from 1"]
Hash = Annotated[str, "64 hex digits"]


class List(Paged):
    """Page of acts."""

    after: NotRequired[Annotated[ActNumber, "`next` of the previous page"]]
    newest: NotRequired[Annotated[bool, "the last ones instead of the first"]]


class Act(TypedDict):
    """One operator action."""

    number: ActNumber
    time_us: TimeUs
    act: Annotated[str, "the action's name"]
    by: Annotated[str | None, "operator, unverified; null: not given by the client"]
    why: Annotated[str | None, "the reason; null: none"]
    what: Annotated[dict[str, Any], "the request, with everything it affected"]
    ended_us: NotRequired[Annotated[TimeUs, "absent while it is in progress"]]
    ended: NotRequired[
        Annotated[dict[str, Any], "outcome: `results` by code, `refused`, or the state `found` after a crash"]
    ]
    hash: Annotated[Hash, "of its record"]


class Page(TypedDict):
    """Acts, oldest first."""

    acts: list[Act]
    next: NotRequired[Annotated[ActNumber, "`after` of the next page, if there are more"]]


class Broken(TypedDict):
    """A place where the chain of records is broken."""

    line: Annotated[int, "in the file `acts.journal`, from 1"]
    number: NotRequired[ActNumber]
    what: str


class Verified(TypedDict):
    """Result of checking the chain."""

    shard: Annotated[int, "number of the shard"]
    records: Annotated[int, "lines of the file; an act that has ended has two"]
    last: Annotated[Hash, "of the last record: store it elsewhere for comparison"]
    broken: list[Broken]


LIST = Action("acts.list", List, Page, "Operator actions, by pages.", reads_only=True)
VERIFY = Action(
    "acts.verify", Nothing, Verified, "Check whether a record of an act was changed, removed or moved.", reads_only=True
)
