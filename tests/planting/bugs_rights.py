"""Bugs of access rights: who gets in, what is checked, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from escrowmq.broker import guarded
from escrowmq.broker.guarded import GuardedCalls
from escrowmq.rights import guard, matrix
from escrowmq.rights.guard import Guard
from escrowmq.rights.rules import Need, Rule
from escrowmq.wire import Exchange
from planting import Plant, bug

MATRIX = "rights/test_matrix.py::"
GUARD = "rights/test_guard.py::"


@bug("rights", MATRIX + "test_a_call_with_rows_needs_exactly_its_rights[token-receive]", "was enough")
def check_nothing_of_a_receive(plant: Plant) -> None:
    real = GuardedCalls._check

    @plant.instead(GuardedCalls, "_check")
    def check(self: Any, kind: Exchange, topics: Any, options: Mapping[str, Any]) -> None:
        if kind is not Exchange.RECEIVE:
            real(self, kind, topics, options)


@bug(
    "rights",
    "rights/test_rules.py::test_a_prefix_covers_names_that_begin_with_it_and_not_the_other_way_round",
    "orders",
)
def compare_a_prefix_the_wrong_way_round(plant: Plant) -> None:
    @plant.instead(Rule, "grants")
    def grants(self: Rule, need: Need) -> bool:
        if self.access is not need.access or need.name is None:
            return self.access is need.access
        return self.name.startswith(need.name) if self.prefix else need.name == self.name


@bug("rights", GUARD + "test_whoever_lost_a_right_is_dropped_and_nobody_else[narrowed]", "[] == ['shop']")
def keep_the_rights_of_open_connections(plant: Plant) -> None:
    @plant.instead(Guard, "_check_callers")
    def check_callers(self: Guard) -> None:
        pass


@bug("rights", GUARD + "test_a_token_expires_by_the_clock", "assert dropped.wait(")
def accept_an_expired_token(plant: Plant) -> None:
    @plant.instead(guard, "_is_expired")
    def is_expired(token: Any) -> bool:
        return False


@bug("rights", MATRIX + "test_operator_actions_are_recorded_under_the_principal[token]", "somebody else")
def record_the_name_that_the_caller_chose(plant: Plant) -> None:
    @plant.instead(GuardedCalls, "_sign")
    def sign(self: Any, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return request


@bug("rights", MATRIX + "test_a_call_with_rows_needs_exactly_its_rights[token-end]", "was enough")
def let_every_session_end_transactions(plant: Plant) -> None:
    @plant.instead(guarded, "needs_of_session")
    def needs(session: int, lookups: Any) -> list[Need]:
        return []


@bug("rights", MATRIX + "test_each_role_may_call_with_rows_or_not[token-end]", "UNKNOWN_SESSION")
def tell_whose_session_it_is(plant: Plant) -> None:
    @plant.instead(GuardedCalls, "group_of_session")
    def group_of_session(self: Any, session: int) -> str | None:
        name: str | None = self._group_of(session)
        return name


@bug("rights", GUARD + "test_a_guessed_session_cannot_be_used_although_it_opens_meanwhile", "DID NOT RAISE")
def need_nothing_for_an_unknown_session(plant: Plant) -> None:
    @plant.instead(guarded, "needs_of_session")
    def needs(session: int, lookups: Any) -> list[Need]:
        group = lookups.group_of_session(session) if session else None
        return [Need(matrix.Access.PRODUCE, group)] if group is not None else []


@bug("rights", MATRIX + "test_a_batch_needs_a_right_for_each_of_its_topics[token-send]", "isinstance(denied, Denied)")
def check_the_first_topic_of_a_batch(plant: Plant) -> None:
    real = guarded._distinct

    @plant.instead(guarded, "_distinct")
    def distinct(topics: Any) -> list[str]:
        return real(topics)[:1]


@bug(
    "rights",
    MATRIX + "test_a_read_needs_exactly_its_right[token-%file.00000000000000000001.segment]",
    "may not view this broker",
)
def read_files_of_the_log_like_topics(plant: Plant) -> None:
    @plant.instead(guarded, "needs_of_read")
    def needs(request: Mapping[str, Any]) -> Need:
        source = str(request["source"])
        return matrix.VIEW if source.startswith("%") else Need(matrix.Access.READ, source)
