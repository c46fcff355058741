"""Actions on transactions: listings, details, and decisions by an operator."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Paged, Results, Signed
from escrowmq.wire.actions.messages import Message, State
from escrowmq.wire.values import Bounds, Instance, Position, ProducerGroup, Seconds, TimeUs, TransactionText

Decider = Literal["producer", "check", "operator", "exhausted", "retention", "replaced"]


Cause = Annotated[
    Literal["not_due", "due", "unanswered", "asked_out", "aged"],
    "reason for waiting: `not_due`, its first check-back is later; `due`, a check-back is due, but no member of its"
    " group was connected; `unanswered`, checked without a decision, it waits for the next check-back or for parking;"
    " `asked_out`, parked after the last check-back; `aged`, parked earlier: `half_retention` ended, or it is"
    " unreadable",
]


class List(Paged):
    """Filters of a listing."""

    state: NotRequired[Annotated[str, "a state, or `undecided`: open and parked ones"]]
    group: NotRequired[ProducerGroup]
    older_than: NotRequired[Annotated[Seconds, "since the prepare, at least"]]
    cause: NotRequired[Cause]
    after: NotRequired[Annotated[Position, Bounds(-1), "`next` of the previous page"]]


class Summary(TypedDict):
    """One transaction without its messages."""

    id: TransactionText
    position: Annotated[Position, "of its first half message"]
    group: Annotated[ProducerGroup | None, "null: its producer sessions were removed"]
    instance: Annotated[Instance | None, "null: its producer sessions were removed"]
    state: State
    checks: Annotated[int, "check-backs so far"]
    prepared_us: TimeUs
    due_us: NotRequired[Annotated[TimeUs, "of open ones: time of the next check-back"]]
    decided_by: NotRequired[Annotated[Decider, "of decided ones"]]


class Transaction(Summary):
    """One transaction of a listing."""

    messages: Annotated[int, "number of half messages"]


class Page(TypedDict):
    """Transactions in the order of their prepare."""

    transactions: list[Transaction]
    next: NotRequired[Annotated[Position, "`after` of the next page, if this one is full"]]


class Show(TypedDict):
    """Identifies a transaction."""

    id: TransactionText


class Event(TypedDict):
    """One event of a transaction."""

    time_us: TimeUs
    event: Literal["prepared", "checked", "parked", "reopened", "committed", "rolled_back", "expired"]
    position: NotRequired[Annotated[Position, "of all but `prepared`"]]
    messages: NotRequired[Annotated[int, "of `prepared`: number of half messages that became durable"]]
    attempt: NotRequired[Annotated[int, "of `checked`: 1 the first time"]]
    by: NotRequired[Annotated[Decider, "of decisions"]]
    session: NotRequired[Annotated[int, "of decisions: the session that sent it; 0 without one"]]


class Details(Summary):
    """One transaction without its messages."""

    asked_session: NotRequired[Annotated[int | None, "the session with a current check-back of it; null: none"]]
    unknown_us: NotRequired[
        Annotated[TimeUs | None, "time of the last answer UNKNOWN; null: not since the broker's start, or long ago"]
    ]
    message_count: Annotated[int, "half messages of the transaction"]
    timeline: Annotated[list[Event], "oldest first"]


class Shown(Details):
    """One transaction in full."""

    messages: Annotated[list[Message], "the first 100"]


class Reveal(Signed):
    """The transaction whose bodies an operator requests."""

    id: TransactionText


class Body(TypedDict):
    """Withheld content of a message."""

    position: Position
    body_base64: Annotated[str | None, "base64; null: damaged"]


class Revealed(TypedDict):
    """The bodies of a transaction's messages."""

    bodies: Annotated[list[Body], "of the messages in `transactions.show`"]


class Summarize(Paged):
    """Producer groups of a summary of undecided transactions."""

    group: NotRequired[Annotated[ProducerGroup, "all that have some, unless given"]]
    samples: NotRequired[Annotated[int, Bounds(0, 5), "transactions shown of each cause, 3 unless given"]]
    after: NotRequired[Annotated[int, Bounds(-1), "`next` of the previous answer"]]


class Waiting(TypedDict):
    """Undecided transactions of one producer group with the same cause."""

    state: Annotated[Literal["open", "parked"], "parked ones wait for an operator"]
    cause: Cause
    count: int
    oldest_us: Annotated[TimeUs, "the first prepare"]
    newest_us: Annotated[TimeUs, "the last prepare"]
    checks: Annotated[tuple[int, int], "check-backs so far: minimum and maximum"]
    samples: Annotated[list[Transaction], "the oldest"]


class OfGroup(TypedDict):
    """Undecided transactions of one producer group."""

    group: Annotated[ProducerGroup | None, "null: its producer sessions were removed"]
    number: Annotated[int, "of the group, at this broker"]
    causes: list[Waiting]


class Undecided(TypedDict):
    """Undecided transactions by producer group and cause."""

    groups: Annotated[list[OfGroup], "groups with undecided transactions"]
    next: NotRequired[Annotated[int, "`after` of the next page, if this one is full"]]


class Recheck(Signed):
    """The transactions to recheck."""

    ids: Annotated[list[str], "transaction ids as printed"]


class Settle(Recheck):
    """An operator's decision."""

    outcome: Literal["commit", "rollback"]


LIST = Action("transactions.list", List, Page, "Transactions in the order of their prepare, by pages.", reads_only=True)
SUMMARY = Action(
    "transactions.summary", Summarize, Undecided, "Undecided transactions by producer group and cause.", reads_only=True
)
SHOW = Action("transactions.show", Show, Shown, "One transaction with its messages and its timeline.", reads_only=True)
SETTLE = Action("transactions.settle", Settle, Results, "Decide transactions as an operator.")
RECHECK = Action(
    "transactions.recheck", Recheck, Results, "Restart the check-backs of undecided transactions, with the count at 0."
)
REVEAL = Action(
    "transactions.reveal",
    Reveal,
    Revealed,
    "The bodies of a transaction that was rolled back or has expired, for an operator.",
)
