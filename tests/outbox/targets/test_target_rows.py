"""The rule that nothing overtakes within a key, for any keys and any failures."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code
from escrowmq.outbox.targets.rows import Rows, behind_failures, hold_back, number_keys, waves
from escrowmq.testing.target_conformance import batch

KEYS = st.lists(st.one_of(st.none(), st.sampled_from(["", "a", "b", "c"])), max_size=30)


@given(KEYS)
def test_rows_have_the_same_number_exactly_when_they_have_the_same_key(keys: list[str | None]) -> None:
    numbers = number_keys(pa.array(keys, pa.utf8())).tolist()
    for i, one in enumerate(keys):
        for j, other in enumerate(keys):
            assert (numbers[i] == numbers[j]) == (i == j or (one is not None and one == other))


@given(KEYS)
def test_a_wave_has_each_key_once_and_waves_keep_the_order(keys: list[str | None]) -> None:
    numbers = number_keys(pa.array(keys, pa.utf8()))
    rounds = [rows.tolist() for rows in waves(numbers)]
    assert sorted(row for rows in rounds for row in rows) == list(range(len(keys)))
    for rows in rounds:
        assert len(set(numbers[rows])) == len(rows)
    for number in set(numbers.tolist()):
        of_key = [row for rows in rounds for row in rows if numbers[row] == number]
        assert of_key == sorted(of_key)


@pytest.mark.invariant("I39")
@given(KEYS, st.data())
def test_nothing_behind_a_failure_counts(keys: list[str | None], data: st.DataObject) -> None:
    numbers = number_keys(pa.array(keys, pa.utf8()))
    answers = st.sampled_from([Code.OK, Code.BODY_TOO_LARGE, Code.TIMED_OUT])
    codes = np.array(data.draw(st.lists(answers, min_size=len(keys), max_size=len(keys))), np.uint8)
    before = codes.copy()
    hold_back(codes, numbers)
    for row in range(len(keys)):
        failed = any(numbers[r] == numbers[row] and before[r] for r in range(row))
        assert codes[row] == (Code.QUEUE_FULL if failed else before[row])
    assert not (codes[behind_failures(codes, numbers)] == Code.OK).any()


def test_from_the_first_stuck_row_of_each_key() -> None:
    keys = number_keys(pa.array(["a", "b", "a", "b", "a", None, "b", None]))
    codes = np.array([0, 0, Code.TIMED_OUT, 0, 0, Code.TIMED_OUT, Code.TIMED_OUT, 0], np.uint8)
    held = behind_failures(codes, keys) | (codes != Code.OK)
    assert held.tolist() == [False, False, True, False, True, True, True, False]


def test_names_of_our_headers_are_refused_as_properties() -> None:
    rows = Rows(batch("t", [{"properties": [("escrowmq-key", "forged")]}, {"properties": [("escrow", "fine")]}]))
    assert rows.refused(max_body_bytes=None, queues=True).tolist() == [Code.BAD_REQUEST, Code.OK]
