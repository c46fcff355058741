"""Actions on the record of operators' acts."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Paged
from escrowmq.wire.values import TimeUs

ActNumber = Annotated[int, "number of the act's record, from 1"]
Hash = Annotated[str, "64 hex digits"]


class List(Paged):
    """Which acts."""

    after: NotRequired[Annotated[ActNumber, "`next` of the page before"]]
    newest: NotRequired[Annotated[bool, "the last ones instead of the first"]]


class Act(TypedDict):
    """An operator action."""

    number: ActNumber
    time_us: TimeUs
    act: Annotated[str, "the action's name"]
    by: Annotated[str | None, "who, unverified; null: the client did not say"]
    why: Annotated[str | None, "the reason; null: none was given"]
    what: Annotated[dict[str, Any], "the request, with everything that it was about"]
    ended_us: NotRequired[Annotated[TimeUs, "absent while it is under way"]]
    ended: NotRequired[
        Annotated[dict[str, Any], "what came of it: `results` by code, `refused`, or what was `found` after a crash"]
    ]
    hash: Annotated[Hash, "of its record"]


class Page(TypedDict):
    """Acts, oldest first."""

    acts: list[Act]
    next: NotRequired[Annotated[ActNumber, "`after` of the next page, if there are more"]]


class Broken(TypedDict):
    """A place where the chain of records does not hold."""

    line: Annotated[int, "in the file `acts.journal`, from 1"]
    number: NotRequired[ActNumber]
    what: str


class Verified(TypedDict):
    """The verification of the chain."""

    shard: Annotated[int, "number of the shard"]
    records: Annotated[int, "lines of the file; an act that has ended has two"]
    last: Annotated[Hash, "of the last record: keep it elsewhere, and compare"]
    broken: list[Broken]


LIST = Action("acts.list", List, Page, "What operators did, by pages.", reads_only=True)
VERIFY = Action(
    "acts.verify", Nothing, Verified, "Whether a record of an act was changed, removed or moved.", reads_only=True
)
