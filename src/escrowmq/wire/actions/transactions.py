"""Actions on transactions: listings, one in full, and decisions by an operator."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Paged, Results, Signed
from escrowmq.wire.actions.messages import Message, State
from escrowmq.wire.values import Bounds, Instance, Position, ProducerGroup, Seconds, TimeUs, TransactionText

Decider = Literal["producer", "check", "operator", "exhausted", "retention", "replaced"]


Cause = Annotated[
    Literal["not_due", "due", "unanswered", "asked_out", "aged"],
    "why it waits: `not_due`, its first question comes later; `due`, a question is due, and nobody of its group was "
    "there to be asked;"
    " `unanswered`, it was asked about without a decision, and waits for the next question or the end of waiting; "
    "`asked_out`, parked after the last"
    " question; `aged`, parked before that: `half_retention` ended, or it cannot be read",
]


class List(Paged):
    """Which transactions are asked for."""

    state: NotRequired[Annotated[str, "a state, or `undecided`: open and parked ones"]]
    group: NotRequired[ProducerGroup]
    older_than: NotRequired[Annotated[Seconds, "since the prepare, at least"]]
    cause: NotRequired[Cause]
    after: NotRequired[Annotated[Position, Bounds(-1), "`next` of the page before"]]


class Summary(TypedDict):
    """One transaction without its messages."""

    id: TransactionText
    position: Annotated[Position, "of its first half message"]
    group: Annotated[ProducerGroup | None, "null: its producers are forgotten"]
    instance: Annotated[Instance | None, "null: its producers are forgotten"]
    state: State
    checks: Annotated[int, "check-backs so far"]
    prepared_us: TimeUs
    due_us: NotRequired[Annotated[TimeUs, "of open ones: when the next check-back is due"]]
    decided_by: NotRequired[Annotated[Decider, "of decided ones"]]


class Transaction(Summary):
    """One transaction of a listing."""

    messages: Annotated[int, "how many half messages"]


class Page(TypedDict):
    """Transactions in the order of their prepare."""

    transactions: list[Transaction]
    next: NotRequired[Annotated[Position, "`after` of the next page, if this one is full"]]


class Show(TypedDict):
    """Which transaction."""

    id: TransactionText


class Event(TypedDict):
    """An event of a transaction."""

    time_us: TimeUs
    event: Literal["prepared", "checked", "parked", "reopened", "committed", "rolled_back", "expired"]
    position: NotRequired[Annotated[Position, "of all but `prepared`"]]
    messages: NotRequired[Annotated[int, "of `prepared`: how many half messages became durable then"]]
    attempt: NotRequired[Annotated[int, "of `checked`: 1 the first time"]]
    by: NotRequired[Annotated[Decider, "of decisions"]]
    session: NotRequired[Annotated[int, "of decisions: the session that brought it; 0 without one"]]


class Details(Summary):
    """One transaction but for its messages."""

    asked_session: NotRequired[
        Annotated[int | None, "the session that is asked about it at this moment; null: none is"]
    ]
    unknown_us: NotRequired[
        Annotated[
            TimeUs | None, "when UNKNOWN was last answered about it; null: not since the broker's start, or long ago"
        ]
    ]
    message_count: Annotated[int, "half messages of the transaction"]
    timeline: Annotated[list[Event], "oldest first"]


class Shown(Details):
    """One transaction in full."""

    messages: Annotated[list[Message], "the first 100"]


class Reveal(Signed):
    """The transaction whose bodies an operator asks for."""

    id: TransactionText


class Body(TypedDict):
    """The withheld content of a message."""

    position: Position
    body_base64: Annotated[str | None, "base64; null: damaged"]


class Revealed(TypedDict):
    """The bodies of a transaction's messages."""

    bodies: Annotated[list[Body], "of the messages that `transactions.show` gives"]


class Summarize(Paged):
    """Of which producer groups the undecided transactions are summed up."""

    group: NotRequired[Annotated[ProducerGroup, "all that have some, unless given"]]
    samples: NotRequired[Annotated[int, Bounds(0, 5), "transactions shown of each cause, 3 unless given"]]
    after: NotRequired[Annotated[int, Bounds(-1), "`next` of the answer before"]]


class Waiting(TypedDict):
    """Undecided transactions of one producer group that wait for the same reason."""

    state: Annotated[Literal["open", "parked"], "parked ones wait for a person"]
    cause: Cause
    count: int
    oldest_us: Annotated[TimeUs, "the first prepare"]
    newest_us: Annotated[TimeUs, "the last prepare"]
    checks: Annotated[tuple[int, int], "check-backs so far: the least and the most"]
    samples: Annotated[list[Transaction], "the oldest"]


class OfGroup(TypedDict):
    """Undecided transactions of a producer group."""

    group: Annotated[ProducerGroup | None, "null: its producers are forgotten"]
    number: Annotated[int, "of the group, at this broker"]
    causes: list[Waiting]


class Undecided(TypedDict):
    """Undecided transactions by producer group and cause."""

    groups: Annotated[list[OfGroup], "those that have something undecided"]
    next: NotRequired[Annotated[int, "`after` of the next page, if this one is full"]]


class Recheck(Signed):
    """Which transactions."""

    ids: Annotated[list[str], "transaction ids as printed"]


class Settle(Recheck):
    """An operator's decision."""

    outcome: Literal["commit", "rollback"]


LIST = Action("transactions.list", List, Page, "Transactions in the order of their prepare, by pages.", reads_only=True)
SUMMARY = Action(
    "transactions.summary", Summarize, Undecided, "Undecided transactions by producer group and cause.", reads_only=True
)
SHOW = Action("transactions.show", Show, Shown, "One transaction with its messages and its timeline.", reads_only=True)
SETTLE = Action("transactions.settle", Settle, Results, "Decide transactions by an operator's hand.")
RECHECK = Action(
    "transactions.recheck", Recheck, Results, "Ask about undecided transactions anew, all check-backs unspent."
)
REVEAL = Action(
    "transactions.reveal",
    Reveal,
    Revealed,
    "The bodies of a transaction that was rolled back or has expired, for an operator.",
)
