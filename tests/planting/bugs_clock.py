"""Bugs of time: the broker's clock, delays, leases, the database's clock."""

from __future__ import annotations

import time
from typing import Any

from escrowmq.outbox import dialects
from escrowmq.platform.clock import ContinuedClock, SystemClock
from planting import Plant, bug

FLOOR = "platform/test_clock.py::test_time_goes_on_from_a_floor_and_does_not_stand_still_until_it_is_reached"
CLOCKS = "outbox/test_outbox_clocks.py::"


@bug(
    "clock",
    "platform/test_clock.py::test_a_wall_clock_that_jumps_moves_nothing[-3600.0]",
    "assert clock.now_us() == first + 2 * SECOND_US",
)
def ask_the_wall_clock(plant: Plant) -> None:
    @plant.instead(SystemClock, "now_us")
    def now_us(self: Any) -> int:
        return time.time_ns() // 1000


@bug("clock", FLOOR, "assert clock.now_us() == 5_000 * SECOND_US")
def let_broker_time_step_back_with_a_restart(plant: Plant) -> None:
    @plant.instead(ContinuedClock, "now_us")
    def now_us(self: Any) -> int:
        return self._clock.now_us()


@bug("clock", FLOOR, "assert clock.now_us() == 5_007 * SECOND_US")
def stand_still_until_the_floor_is_reached(plant: Plant) -> None:
    @plant.instead(ContinuedClock, "__init__")
    def init(self: Any, clock: Any, floor_us: int) -> None:
        self._clock, self._ahead_us, self._floor_us = clock, 0, floor_us

    @plant.instead(ContinuedClock, "now_us")
    def now_us(self: Any) -> int:
        return max(self._clock.now_us(), self._floor_us)


@bug(
    "clock",
    CLOCKS + "test_marks_are_purged_by_the_databases_clock[sqlite--315360000000000000]",
    "assert inbox.purge_seen(tables, 30 * 86400) == 0",
)
def stamp_marks_by_this_machines_clock(plant: Plant) -> None:
    @plant.instead(dialects, "database_now_us")
    def database_now_us(connection: Any) -> int:
        return time.time_ns() // 1000


@bug(
    "clock",
    "client/consuming/test_client_order.py::test_a_lease_ends_by_this_process_clock_unless_it_is_extended",
    'assert withdrawn(known, rows(2, "ab")) == ".."',
)
def end_a_lease_that_was_extended(plant: Plant) -> None:
    from escrowmq.client.consuming.order import Order

    @plant.instead(Order, "extend")
    def extend(self: Any, number: int, leases: Any, seconds: float) -> None:
        pass
