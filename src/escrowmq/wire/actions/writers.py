"""Actions on writers of numbered batches (Spark queries): commit a batch, show, list, forget."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Paged, Signed
from escrowmq.wire.actions.producers import Undecided
from escrowmq.wire.values import ProducerGroup, SessionNumber, TimeUs

Status = Literal["COMMITTED", "ALREADY_COMMITTED"]
Batch = Annotated[int, "number of a batch"]


class OfWriter(TypedDict):
    """Identifies a writer."""

    writer: Annotated[str, "any text, such as a query's id; or 32 hex digits as listed"]


class Forget(OfWriter, Signed):
    """The writer to forget."""


class Commit(OfWriter):
    """One batch of a writer."""

    batch: Annotated[Batch, "higher than that of the batch before"]
    transactions: Annotated[list[str], "printed ids of the transactions of the batch"]
    session: SessionNumber


class Committed(TypedDict):
    """Result of a batch commit."""

    status: Annotated[Status, "ALREADY_COMMITTED: this batch, or a later one, was decided before"]
    last: Annotated[Batch, "the last decided one"]
    rolled_back: Annotated[int, "transactions of this attempt that were rolled back"]


class Shown(TypedDict):
    """Last batch of a writer."""

    batch: Annotated[Batch | None, "the last decided one; null: none"]


class List(Paged):
    """Page of a listing."""

    after: NotRequired[Annotated[str, "`next` of the previous page"]]


class WriterListed(Undecided):
    """One writer."""

    writer: Annotated[str, "32 hex digits"]
    batch: Annotated[Batch, "the last decided one"]
    decided_us: Annotated[TimeUs, "time of its decision"]
    used_us: Annotated[TimeUs, "last activity of its producer group"]


class Page(TypedDict):
    """Writers by their ids."""

    writers: list[WriterListed]
    next: NotRequired[Annotated[str, "`after` of the next page, if this one is full"]]


class Forgotten(TypedDict):
    """Result of ``forget``: the removed group and sessions."""

    group: Annotated[ProducerGroup, "of the writer"]
    sessions: Annotated[int, "removed sessions"]


COMMIT = Action("writers.commit", Commit, Committed, "Commit the transactions of one batch of a writer, once.")
SHOW = Action("writers.show", OfWriter, Shown, "The last decided batch of a writer.", reads_only=True)
LIST = Action("writers.list", List, Page, "Writers with their last batch, by pages.", reads_only=True)
FORGET = Action(
    "writers.forget",
    Forget,
    Forgotten,
    "Forget a writer with its producer group; CONFLICT while it has undecided transactions.",
)
