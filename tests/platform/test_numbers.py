"""Numbers of consumers, members and producers' processes."""

import random

import pytest

from escrowmq.platform.backoff import Backoff
from escrowmq.platform.numbers import fraction, own_number


@pytest.mark.invariant("I7")
def test_own_numbers_differ_where_programs_begin_alike() -> None:
    """Members, consumers and processes are told apart by them."""
    numbers = []
    for _ in range(2):
        random.seed(1)
        numbers += [own_number() for _ in range(100)]
    assert len(set(numbers)) == 200
    assert max(numbers) < 1 << 62


def test_what_spreads_pauses_leaves_the_programs_own_numbers_alone() -> None:
    """A thread that waits for a broker must not change what the program draws, nor be the same in two programs that
    begin alike."""
    random.seed(1)
    before = random.getstate()
    drawn = [fraction() for _ in range(1000)]
    pauses = [Backoff(1.0, 8.0).failed() for _ in range(100)]
    assert random.getstate() == before
    assert 0 <= min(drawn) < 0.1
    assert 0.9 < max(drawn) < 1
    assert len(set(drawn)) == 1000
    assert len(set(pauses)) == 100
