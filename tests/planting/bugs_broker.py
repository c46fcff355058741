"""Bugs of the broker: whom it asks, who waits, what is read, and limits of groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from escrowmq.broker.reads import views
from escrowmq.broker.reads.filters import Filter
from escrowmq.broker.writer import checkback
from escrowmq.broker.writer.checkback import Listener, Listeners
from escrowmq.broker.writer.engine import Engine
from escrowmq.broker.writer.waiting import WaitingReceives
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.groups.limits import Bucket, KeyRoom
from planting import Plant, bug

ROUNDS = "broker/writer/test_checkback_rounds.py::"
WRITER = "broker/writer/test_rounds.py::"
LIMITS = "ledger/groups/test_groups_limits.py::"


@bug("check-back", ROUNDS + "test_the_session_that_sent_is_asked", "first.waiting == 0")
def ask_anybody_of_the_group(plant: Plant) -> None:
    real = checkback._share

    @plant.instead(checkback, "_share")
    def share(listeners: Any, free: Any, epochs: Any, turn: int) -> Any:
        return real(listeners, free, np.zeros_like(epochs), turn)


@bug("check-back", ROUNDS + "test_nobody_there_costs_no_attempt", "assert checks_of(bench) == [0]")
def count_a_question_that_nobody_hears(plant: Plant) -> None:
    real = Listeners.groups

    @plant.instead(Listeners, "groups")
    def groups(self: Any) -> Any:
        return real(self) or ["g"]

    @plant.instead(Listeners, "room")
    def room(self: Any, group: str, now_us: int) -> int:
        return self._window

    @plant.instead(Listeners, "wake_us")
    def wake_us(self: Any) -> int:
        return 0


@bug("check-back", ROUNDS + "test_a_question_that_is_overtaken_by_its_decision_is_not_put", "assert [c[")
def put_a_question_that_is_decided_meanwhile(plant: Plant) -> None:
    @plant.instead(Listeners, "settled")
    def settled(self: Any, transactions: Any) -> None:
        pass


@bug("check-back", ROUNDS + "test_a_window_bounds_the_open_questions_and_answers_free_it", "len(first) == 3")
def ask_without_a_bound(plant: Plant) -> None:
    real = Listeners.__init__

    @plant.instead(Listeners, "__init__")
    def init(self: Any, window: int, *given: Any) -> None:
        real(self, 1 << 30, *given)


@bug(
    "check-back",
    ROUNDS + "test_an_unanswered_question_gives_its_place_back_after_the_interval",
    "assert len(again) == 2",
)
def wait_for_ever_for_an_answer(plant: Plant) -> None:
    @plant.instead(Listener, "expire")
    def expire(self: Any, before_us: int) -> None:
        pass


@bug("check-back", ROUNDS + "test_a_slow_member_delays_nobody", "answered == 4")
def let_one_slow_producer_take_the_whole_window(plant: Plant) -> None:
    real = checkback._share

    @plant.instead(checkback, "_share")
    def share(listeners: Any, free: Any, epochs: Any, turn: int) -> Any:
        first = np.arange(len(listeners)) == 0
        return real(listeners, np.where(first, 1 << 20, 0), epochs, turn)


@bug("check-back", ROUNDS + "test_one_bad_record_never_stops_the_round", "assert [c[")
def give_a_whole_batch_up_for_one_bad_record(plant: Plant) -> None:
    real = Listener._build

    @plant.instead(Listener, "_build")
    def build(self: Any, questions: Any) -> Any:
        try:
            self._read(questions.positions)
        except checkback.EscrowError:
            return
        yield from real(self, questions)


@bug("check-back", ROUNDS + "test_the_count_is_durable_before_the_question_leaves", "member.waiting == 0")
def put_the_question_before_it_is_counted(plant: Plant) -> None:
    real = Listeners.assign

    @plant.instead(Listeners, "assign")
    def assign(self: Any, group: str, asked: Any, now_us: int) -> Any:
        given = real(self, group, asked, now_us)
        none = np.empty(0, np.int64)
        for listener, rows in given:
            few = checkback.Questions(asked.transactions, asked.epochs, asked.attempts, none, none)
            listener.put(few.take(rows))
        return given


@bug("broker", WRITER + "test_too_much_waiting_is_refused_at_once", "assert 6 <= len(refused) <= 8")
def let_requests_wait_without_a_bound(plant: Plant) -> None:
    real = Engine._enqueue

    @plant.instead(Engine, "_enqueue")
    def queued(self: Any, request: Any) -> Any:
        self._queued_bytes = 0
        return real(self, request)


@bug(
    "broker",
    "broker/test_embedded_calls.py::test_a_topic_is_browsed_by_offsets_and_hides_what_is_not_committed",
    "== [2, 3, 4]",
)
def read_a_row_more_than_was_asked_for(plant: Plant) -> None:
    real = views.range_of

    @plant.instead(views, "range_of")
    def range_of(request: Any, unit: str, first: int, end: int) -> Any:
        start, stop = real(request, unit, first, end)
        return start, min(stop + 1, end)


@bug("broker", "broker/reads/test_view_filters.py::test_times", "assert found[column]")
def include_the_end_of_a_time_window(plant: Plant) -> None:
    real = Filter.times

    @plant.instead(Filter, "times")
    def times(self: Any, stored_us: Any) -> Any:
        return real(self, np.asarray(stored_us) - 1)


@bug("broker", WRITER + "test_a_receive_that_arrives_with_the_message_does_not_overtake_one_that_waits", "[[1], [0]]")
def serve_the_newest_receive_first(plant: Plant) -> None:
    real = WaitingReceives._serve_line

    @plant.instead(WaitingReceives, "_serve_line")
    def serve_line(self: Any, group: str, new: Any, now_us: int) -> Any:
        self._lines[group].reverse()
        return real(self, group, new, now_us)


@bug("broker", WRITER + "test_a_receive_ends_empty_when_its_time_is_over", "assert wake == ")
def let_an_empty_receive_wait_for_ever(plant: Plant) -> None:
    real = WaitingReceives.serve

    @plant.instead(WaitingReceives, "serve")
    def serve(self: Any, fresh: Any, now_us: int, due: bool) -> Any:
        for receive in fresh:
            receive.wait_us = 1 << 60
        return real(self, fresh, now_us, due)


@bug(
    "broker",
    WRITER + "test_a_receive_of_the_same_round_sees_what_the_round_sent",
    "assert sorted(waiting.result(timeout=0).positions.tolist()) == sorted( sent.result(timeout",
)
def wake_nobody_when_messages_come(plant: Plant) -> None:
    @plant.instead(WaitingReceives, "on_event")
    def on_event(self: Any, kind: Any) -> None:
        pass


@bug("flow control", LIMITS + "test_no_more_is_in_flight_than_the_limit", "assert offsets(driver, member=8) == [3]")
def count_no_message_that_is_in_flight(plant: Plant) -> None:
    @plant.instead(Group, "in_flight")
    def in_flight(self: Any) -> int:
        return 0


@bug("flow control", LIMITS + "test_other_keys_pass_those_without_room", "assert offsets(driver) == []")
def forget_the_keys_in_flight(plant: Plant) -> None:
    real = KeyRoom.__init__

    @plant.instead(KeyRoom, "__init__")
    def init(self: Any, most: int, in_flight: Any) -> None:
        real(self, most, in_flight[:0])


@bug("flow control", LIMITS + "test_a_group_gets_a_burst_and_then_its_rate", "assert offsets(driver) == []")
def count_no_message_for_the_rate(plant: Plant) -> None:
    @plant.instead(Bucket, "take")
    def take(self: Any, count: int, now_us: int) -> None:
        pass


@bug("flow control", LIMITS + "test_a_group_gets_a_burst_and_then_its_rate", "wake_us == driver.now + 20_000")
def wake_no_receive_when_the_rate_allows_more(plant: Plant) -> None:
    @plant.instead(Groups, "_wake_at")
    def wake_at(self: Any, times: Any, after_us: int) -> None:
        pass
