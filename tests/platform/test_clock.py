"""Broker time: it follows the monotonic clock, whatever the wall clock does, and goes on from where the log ends."""

import time

import pytest

from escrowmq.platform.clock import ContinuedClock, SystemClock
from escrowmq.testing.clock import SimulatedClock

SECOND_US = 1_000_000


class Machine:
    """The two clocks of a machine, under a test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.ran = 1_700_000_000.0, 50.0
        monkeypatch.setattr(time, "time_ns", lambda: round(self.wall * 1e9))
        monkeypatch.setattr(time, "monotonic_ns", lambda: round(self.ran * 1e9))

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.ran += seconds


@pytest.mark.invariant("I36")
@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_wall_clock_that_jumps_moves_nothing(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """I36: a jump back would make every lease and every question eternal, one forward would end them all."""
    machine = Machine(monkeypatch)
    clock = SystemClock()
    first = clock.now_us()
    assert first == round(machine.wall * SECOND_US)
    machine.passes(2.0)
    machine.wall += jump
    assert clock.now_us() == first + 2 * SECOND_US
    machine.passes(1.5)
    assert clock.now_us() == first + 3_500_000


@pytest.mark.invariant("I36")
def test_time_goes_on_from_a_floor_and_does_not_stand_still_until_it_is_reached() -> None:
    below = SimulatedClock(1_000 * SECOND_US)
    clock = ContinuedClock(below, 5_000 * SECOND_US)
    assert clock.now_us() == 5_000 * SECOND_US
    below.advance(7)
    assert clock.now_us() == 5_007 * SECOND_US


def test_a_clock_that_is_ahead_of_its_floor_is_left_as_it_is() -> None:
    assert ContinuedClock(SimulatedClock(9_000), 5_000).now_us() == 9_000
