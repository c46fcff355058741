"""Numbers of consumers, members and producers' processes."""

import random

from escrowmq.platform.numbers import own_number


def test_own_numbers_differ_where_programs_begin_alike() -> None:
    """Members, consumers and processes are told apart by them."""
    numbers = []
    for _ in range(2):
        random.seed(1)
        numbers += [own_number() for _ in range(100)]
    assert len(set(numbers)) == 200
    assert max(numbers) < 1 << 62
