"""Actions on writers of numbered batches (Spark queries): commit a batch, show, list, forget."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Paged, Signed
from escrowmq.wire.actions.producers import Undecided
from escrowmq.wire.values import ProducerGroup, SessionNumber, TimeUs

Status = Literal["COMMITTED", "ALREADY_COMMITTED"]
Batch = Annotated[int, "number of a batch"]


class OfWriter(TypedDict):
    """Which writer."""

    writer: Annotated[str, "any text, such as a query's id; or 32 hex digits as listed"]


class Forget(OfWriter, Signed):
    """The writer that is to be forgotten."""


class Commit(OfWriter):
    """One batch of a writer."""

    batch: Annotated[Batch, "higher than that of the batch before"]
    transactions: Annotated[list[str], "ids as printed of the transactions that make up the batch"]
    session: SessionNumber


class Committed(TypedDict):
    """The result of the batch."""

    status: Annotated[Status, "ALREADY_COMMITTED: this batch, or a later one, was decided before"]
    last: Annotated[Batch, "the last one that is decided now"]
    rolled_back: Annotated[int, "transactions of this attempt that lost"]


class Shown(TypedDict):
    """Where a writer stands."""

    batch: Annotated[Batch | None, "the last one that is decided; null: none is"]


class List(Paged):
    """Which page."""

    after: NotRequired[Annotated[str, "`next` of the page before"]]


class WriterListed(Undecided):
    """One writer."""

    writer: Annotated[str, "32 hex digits"]
    batch: Annotated[Batch, "the last one that is decided"]
    decided_us: Annotated[TimeUs, "when it was decided"]
    used_us: Annotated[TimeUs, "when anything was done under its producer group"]


class Page(TypedDict):
    """Writers by their ids."""

    writers: list[WriterListed]
    next: NotRequired[Annotated[str, "`after` of the next page, if this one is full"]]


class Forgotten(TypedDict):
    """The forgotten writer."""

    group: Annotated[ProducerGroup, "the writer's"]
    sessions: Annotated[int, "how many of its sessions"]


COMMIT = Action("writers.commit", Commit, Committed, "Commit the transactions of one batch of a writer, once.")
SHOW = Action("writers.show", OfWriter, Shown, "The last decided batch of a writer.", reads_only=True)
LIST = Action("writers.list", List, Page, "Writers with their last batch, by pages.", reads_only=True)
FORGET = Action(
    "writers.forget",
    Forget,
    Forgotten,
    "Forget a writer with its producer group; CONFLICT while it has undecided transactions.",
)
