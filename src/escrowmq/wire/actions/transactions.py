"""Actions on transactions: listings, one in full, and decisions by an operator."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Paged, Results, Signed
from escrowmq.wire.actions.messages import Message, State
from escrowmq.wire.values import Bounds, Instance, Position, ProducerGroup, Seconds, TimeUs, TransactionText

Decider = Literal["producer", "check", "operator", "exhausted", "retention", "replaced"]


class List(Paged):
    """Which transactions are asked for."""

    state: NotRequired[Annotated[str, "a state, or `undecided`: open and parked ones"]]
    group: NotRequired[ProducerGroup]
    older_than: NotRequired[Annotated[Seconds, "since the prepare, at least"]]
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
    """Something that happened to a transaction."""

    time_us: TimeUs
    event: Literal["prepared", "checked", "parked", "reopened", "committed", "rolled_back", "expired"]
    position: NotRequired[Annotated[Position, "of all but `prepared`"]]
    messages: NotRequired[Annotated[int, "of `prepared`: how many half messages became durable then"]]
    attempt: NotRequired[Annotated[int, "of `checked`: 1 the first time"]]
    by: NotRequired[Annotated[Decider, "of decisions"]]
    session: NotRequired[Annotated[int, "of decisions: the session that brought it; 0 without one"]]


class Details(Summary):
    """One transaction but for its messages."""

    message_count: Annotated[int, "half messages of the transaction"]
    timeline: Annotated[list[Event], "oldest first"]


class Shown(Details):
    """One transaction in full."""

    messages: Annotated[list[Message], "the first 100"]


class Recheck(Signed):
    """Which transactions."""

    ids: Annotated[list[str], "transaction ids as printed"]


class Settle(Recheck):
    """An operator's decision."""

    outcome: Literal["commit", "rollback"]


LIST = Action("transactions.list", List, Page, "Transactions in the order of their prepare, by pages.", reads_only=True)
SHOW = Action("transactions.show", Show, Shown, "One transaction with its messages and its timeline.", reads_only=True)
SETTLE = Action("transactions.settle", Settle, Results, "Decide transactions by an operator's hand.")
RECHECK = Action(
    "transactions.recheck", Recheck, Results, "Ask about undecided transactions anew, all check-backs unspent."
)
