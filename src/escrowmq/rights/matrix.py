"""The right that each call of a broker needs: one entry for every exchange, read and action.

A call that has no entry is denied. ``tests/rights/test_matrix.py`` compares these tables with the registries of the
protocol, so a new call without an entry fails the build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from escrowmq.errors import Code, error
from escrowmq.rights.rules import Access, Need
from escrowmq.wire import DEAD_LETTER_PREFIX, FILE_PREFIX
from escrowmq.wire.actions import (
    acts,
    backups,
    brokers,
    dead_letters,
    groups,
    messages,
    producers,
    rights,
    standing,
    topics,
    transactions,
    writers,
)

ALL = "*"
"""In place of a name: only a rule for all names grants it. No topic or group has this name."""


class Lookups(Protocol):
    """What is known of the things that requests name by number or id."""

    def group_of_session(self, session: int) -> str | None:
        """Return the producer group of a session; None if the caller may not use or there is no such session."""

    def groups_of_transactions(self, ids: Sequence[str]) -> set[str | None]:
        """Return the producer groups of the sessions in these printed ids; None stands for groups that the caller must
        not distinguish from unknown ones."""


Needs = Callable[[Mapping[str, Any], Lookups], Iterable[Need]]
VIEW, ADMIN = Need(Access.VIEW), Need(Access.ADMIN)


def needs_of_read(request: Mapping[str, Any]) -> Need:
    """Return the right that reading a source needs."""
    source = str(request.get("source", ""))
    if source.startswith(FILE_PREFIX):
        return ADMIN
    if source.startswith(DEAD_LETTER_PREFIX):
        return Need(Access.ACT, source.removeprefix(DEAD_LETTER_PREFIX))
    return VIEW if source.startswith("%") else Need(Access.READ, source)


def needs_of_session(session: int, lookups: Lookups) -> list[Need]:
    """Return the right that using a producer session needs; 0, no session, needs none.

    Raises Rejected(UNKNOWN_SESSION), the same for a session of another group as for one that does not exist or opens
    before the call is carried out: numbers can be guessed.
    """
    if not session:
        return []
    if (group := lookups.group_of_session(session)) is None:
        raise error(Code.UNKNOWN_SESSION)
    return [Need(Access.PRODUCE, group)]


def _open_to_all(_: Mapping[str, Any], __: Lookups) -> list[Need]:
    return []


def _view(_: Mapping[str, Any], __: Lookups) -> list[Need]:
    return [VIEW]


def _admin(_: Mapping[str, Any], __: Lookups) -> list[Need]:
    return [ADMIN]


def _named(access: Access, field: str) -> Needs:
    return lambda request, _: [Need(access, request[field])]


def _topic(request: Mapping[str, Any], _: Lookups) -> list[Need]:
    return [needs_of_read({"source": request["topic"]})]


def _subscribe(request: Mapping[str, Any], _: Lookups) -> list[Need]:
    return [Need(Access.CONSUME, request["group"]), *(Need(Access.READ, topic) for topic in request.get("topics", ()))]


def _alter_group(request: Mapping[str, Any], _: Lookups) -> list[Need]:
    return [Need(Access.ACT, request["group"]), *(Need(Access.READ, topic) for topic in request.get("topics", ()))]


def _transactions(request: Mapping[str, Any], lookups: Lookups) -> list[Need]:
    ids = request["ids"] if "ids" in request else [request["id"]]
    return [Need(Access.ACT, group or ALL) for group in lookups.groups_of_transactions(ids)]


def _show_transaction(request: Mapping[str, Any], lookups: Lookups) -> list[Need]:
    [group] = lookups.groups_of_transactions([request["id"]])
    return [VIEW if group is None else Need(Access.PRODUCE, group)]


def _commit_batch(request: Mapping[str, Any], lookups: Lookups) -> list[Need]:
    return needs_of_session(request["session"], lookups)


def _any_producer(_: Mapping[str, Any], __: Lookups) -> list[Need]:
    return [Need(Access.PRODUCE)]


def _lookup(request: Mapping[str, Any], _: Lookups) -> list[Need]:
    return [Need(Access.READ, request["topic"])] if "topic" in request else [Need(Access.PRODUCE)]


ACTIONS: dict[str, Needs] = {
    brokers.HELLO.name: _open_to_all,
    brokers.HEALTH.name: _open_to_all,
    brokers.STATS.name: _view,
    brokers.STEP_DOWN.name: _admin,
    topics.LIST.name: _view,
    topics.OFFSETS.name: _topic,
    topics.WAIT.name: _topic,
    topics.CREATE.name: _admin,
    topics.ALTER.name: _admin,
    topics.DELETE.name: _admin,
    producers.OPEN_SESSION.name: _named(Access.PRODUCE, "group"),
    producers.LIST.name: _view,
    producers.ALTER.name: _named(Access.ACT, "group"),
    groups.SUBSCRIBE.name: _subscribe,
    groups.ALTER.name: _alter_group,
    groups.RESET.name: _named(Access.ACT, "group"),
    groups.PAUSE.name: _named(Access.ACT, "group"),
    groups.RESUME.name: _named(Access.ACT, "group"),
    groups.LIMIT.name: _named(Access.ACT, "group"),
    groups.DELETE.name: _admin,
    groups.JOIN.name: _named(Access.CONSUME, "group"),
    groups.MEMBERS.name: _view,
    groups.FENCE.name: _named(Access.ACT, "group"),
    groups.LIST.name: _view,
    transactions.LIST.name: _view,
    transactions.SUMMARY.name: _view,
    transactions.SHOW.name: _show_transaction,
    transactions.SETTLE.name: _transactions,
    transactions.RECHECK.name: _transactions,
    transactions.REVEAL.name: _transactions,
    writers.COMMIT.name: _commit_batch,
    writers.SHOW.name: _any_producer,
    writers.LIST.name: _view,
    writers.FORGET.name: _admin,
    dead_letters.LIST.name: _view,
    dead_letters.SUMMARY.name: _view,
    dead_letters.EDIT.name: _named(Access.ACT, "group"),
    dead_letters.SETTLE.name: _named(Access.ACT, "group"),
    messages.LOOKUP.name: _lookup,
    messages.RECALL.name: _named(Access.SEND, "topic"),
    messages.VIEW.name: _topic,
    standing.ALL.name: _view,
    standing.OF_MESSAGE.name: _topic,
    acts.LIST.name: _view,
    acts.VERIFY.name: _view,
    backups.FILES.name: _admin,
    rights.WHOAMI.name: _open_to_all,
    rights.DENIALS.name: _view,
    rights.RELOAD.name: _admin,
}
"""By the action's name: the rights that a request, which is of the action's type, needs."""
VIEW_IS_ENOUGH = frozenset({messages.LOOKUP.name, transactions.SHOW.name})
"""Actions that ``view`` permits, too. Without it a look-up shows messages of topics that the caller may send to or
read, so that a producer can decide a transaction by its own message id."""
EXCHANGES = {
    "send": "`send TOPIC`, and `produce GROUP` of its session, if it has one",
    "prepare": "`send TOPIC` and `produce GROUP`",
    "end": "`produce GROUP`",
    "settle": "`consume GROUP`",
    "receive": "`consume GROUP`",
    "watch": "`produce GROUP`",
}
"""For the reference page: the rights that the calls with rows need; ``broker/guarded.py`` checks them."""
