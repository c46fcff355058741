"""Finding rising values, by one search for a run of neighbours or one for each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.ledger.columns.arrays import all_equal, all_true, locate

LARGEST = (1 << 63) - 1
NUMBERS = st.integers(-40, 40) | st.sampled_from([-LARGEST - 1, -LARGEST, LARGEST - 1, LARGEST])


@given(st.sets(NUMBERS), st.lists(NUMBERS))
def test_values_are_found_where_they_stand(rising, wanted):
    values = sorted(rising)
    expected = [values.index(one) if one in rising else -1 for one in wanted]
    assert locate(np.array(values, np.int64), np.array(wanted, np.int64)).tolist() == expected


@given(st.sets(st.integers(0, 60)), st.integers(-3, 60), st.integers(0, 30))
def test_runs_of_neighbours_are_found_whole_or_in_part(rising, first, count):
    values = sorted(rising)
    expected = [values.index(one) if one in rising else -1 for one in range(first, first + count)]
    assert locate(np.array(values, np.int64), np.arange(first, first + count)).tolist() == expected


@given(st.lists(st.integers(0, 2)))
def test_all_of_them(values):
    assert all_equal(np.array(values, np.int64)) == (len(set(values)) <= 1)
    assert all_true(np.array(values, np.int64) > 0) == all(values)
