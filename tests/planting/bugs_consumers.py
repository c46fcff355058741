"""Bugs of consumers: acknowledgements, order, what was fetched ahead, quality of service."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.client.consuming import options, settling
from escrowmq.client.consuming.consumer import ConsumerBase
from escrowmq.client.consuming.consumption import Consumption
from escrowmq.client.consuming.fetching import Fetcher
from escrowmq.client.consuming.order import Order
from escrowmq.client.consuming.settling import SettlingCodec
from escrowmq.errors import Code
from escrowmq.model import Act
from planting import Plant, bug

CONSUMING = "client/consuming/test_client_consuming.py::"
ORDER = "client/consuming/test_client_order.py::"


@bug("consumers", CONSUMING + "test_close_gives_back_what_was_not_handed_out", 'len(twin.acked["c"]) == 10')
def acknowledge_before_the_effect(plant: Plant) -> None:
    real = ConsumerBase._screen

    @plant.instead(ConsumerBase, "_screen")
    async def screened(self: Any, rows: Any) -> Any:
        await self._consumption.act_on_all(rows, Act.ACK, 0, None, True)
        return await real(self, rows)


@bug("consumers", CONSUMING + "test_close_gives_back_what_was_not_handed_out", "returned[0] == 10")
def keep_what_was_fetched_ahead_at_the_close(plant: Plant) -> None:
    @plant.instead(Consumption, "give_back")
    def give_back(self: Any, number: int, batch: Any) -> None:
        pass


@bug("consumers", CONSUMING + "test_late_acts_are_told", "consumer.flush() == 1")
def call_an_ack_that_came_too_late_done(plant: Plant) -> None:
    @plant.instead(SettlingCodec, "_read_results")
    def told(self: Any, rows: Any, codes: Any) -> Any:
        return [Code.OK] * len(codes)


@bug("consumers", CONSUMING + "test_an_ack_that_was_lost_and_then_came_too_late_is_unknown", "LEASE_LOST")
def call_an_ack_refused_that_may_have_been_applied(plant: Plant) -> None:
    real = SettlingCodec.codes

    @plant.instead(SettlingCodec, "codes")
    def codes(answer: Any, resent: bool) -> Any:
        return real(answer, False)


@bug(
    "consumers",
    CONSUMING + "test_runs_cover_gaps_of_one_lease_and_never_two_leases",
    "assert [column.tolist() for column in runs] == [[1, 2, 1, 1], [0, 4, 9, 2], [4, 2, 1, 1]]",
)
def acknowledge_across_two_leases(plant: Plant) -> None:
    real = settling.lease_runs

    @plant.instead(settling, "lease_runs")
    def lease_runs(delivery: Any, apart: bool = False) -> Any:
        same = delivery.set_column(0, "lease", pa.array(np.ones(delivery.num_rows, np.int64)))
        return real(same, apart)


@bug("consumers", CONSUMING + "test_nack_brings_it_back_flagged", "None != 'no'")
def lose_the_cause_of_a_dead_letter(plant: Plant) -> None:
    @plant.instead(options, "cause_text")
    def cause_text(cause: Any) -> None:
        return None


@bug("consumers", CONSUMING + "test_qos_2_passes_over_what_the_database_has", 'assert found == [b"0", b"3", b"4"]')
def hand_out_what_the_database_has_a_mark_of(plant: Plant) -> None:
    @plant.instead(ConsumerBase, "_seen")
    def seen(self: Any, rows: Any) -> Any:
        return np.zeros(rows.count, np.bool_)


@bug("consumers", CONSUMING + "test_qos_0_acks_before_handing_out", 'len(twin.acked["c"]) == 5')
def hand_out_at_most_once_without_an_ack(plant: Plant) -> None:
    real = Consumption.act_on_all

    @plant.instead(Consumption, "act_on_all")
    async def act_on_all(self: Any, rows: Any, act: Any, delay_us: int, cause: Any, wait: bool) -> None:
        if self.qos:
            await real(self, rows, act, delay_us, cause, wait)


@bug("consumers", CONSUMING + "test_a_fenced_consumer_asks_no_more_and_every_call_says_so", "DID NOT RAISE Fenced")
def go_on_asking_when_fenced(plant: Plant) -> None:
    real = Fetcher._pause

    @plant.instead(Fetcher, "_pause")
    def pause(self: Any, number: int, problem: Any) -> None:
        real(self, number, problem)
        self._fenced = None
        self._ready.append(problem)


@bug(
    "consumers",
    "client/consuming/test_client_fetch_order.py::test_a_later_answer_waits_for_the_earlier_one",
    "assert fetcher.take() is None",
)
def hand_out_answers_as_they_come(plant: Plant) -> None:
    real = Fetcher._hand_out

    @plant.instead(Fetcher, "_hand_out")
    def hand_out(self: Any, number: int) -> None:
        waiting = self._order[number]
        self._order[number] = type(waiting)(sorted(waiting, key=lambda asked: not asked.done()))
        real(self, number)


@bug("consumers", ORDER + "test_a_nack_that_never_arrives_withdraws_all_the_same", "['1', '2', '3', '4'] == ['1', '4']")
def go_on_with_a_key_of_which_one_failed(plant: Plant) -> None:
    @plant.instead(Order, "fail")
    def fail(self: Any, number: int, lease: int, offset: int, key: Any) -> None:
        pass


@bug(
    "consumers",
    ORDER + "test_an_ack_that_came_too_late_withdraws_the_rest_of_its_lease_and_gives_it_back",
    "assert settled(twin, Act.RELEASE) == [(1, 3)]",
)
def go_on_with_a_lease_that_is_lost(plant: Plant) -> None:
    @plant.instead(Order, "lose")
    def lose(self: Any, number: int, lease: int, offset: int) -> None:
        pass


@bug(
    "consumers",
    ORDER + "test_a_lease_ends_by_this_process_clock_unless_it_is_extended",
    'assert withdrawn(known, rows(1, "abcd")) == "xxxx"',
)
def keep_a_lease_for_ever(plant: Plant) -> None:
    @plant.instead(Order, "add")
    def add(self: Any, number: int, batch: Any) -> None:
        pass
