"""Consume queues: offsets (I16 to I18), start from a time, trims, look-ups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.ledger.columns.arrays import Columns, all_equal, unique_in_order
from escrowmq.ledger.queues.queues import Place, QueueIndex

appends = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=20)


class NaiveQueue:
    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int]] = []  # position, tag, time
        self.head = 0

    def offset_at(self, time: int) -> int:
        return max(next((o for o, (_, _, t) in enumerate(self.entries) if t >= time), len(self.entries)), self.head)


def filled(batches) -> tuple[QueueIndex, NaiveQueue, int]:
    queue, naive, now, position = QueueIndex(Place("t", 0)), NaiveQueue(), 100, 1000
    for count, pause in batches:
        now += pause
        positions = position + np.random.default_rng(position).permutation(count)
        tags = np.arange(count, dtype=np.int32)
        assert queue.append(positions, tags, now, 0) == len(naive.entries)
        naive.entries += [(p, t, now) for p, t in zip(positions.tolist(), tags.tolist(), strict=True)]
        position += 2 * count
    return queue, naive, now


def agree(queue: QueueIndex, naive: NaiveQueue, now: int) -> None:
    head, end = naive.head, len(naive.entries)
    assert (queue.head, queue.end) == (head, end)
    assert queue.positions(head, end).tolist() == [p for p, _, _ in naive.entries[head:]]
    assert queue.tags(head, end).tolist() == [t for _, t, _ in naive.entries[head:]]
    for time in range(98, now + 3):
        assert queue.offset_at(time) == naive.offset_at(time), time
    wanted = [p for p, _, _ in naive.entries] + [0, 1, 10**9]
    places = {p: o for o, (p, _, _) in enumerate(naive.entries) if o >= head}
    assert queue.offsets_of(np.array(wanted)).tolist() == [places.get(p, -1) for p in wanted]
    assert [queue.find(p) for p in wanted] == [places.get(p) for p in wanted]
    for start in range(head, end + 1):
        rest = [p for p, _, _ in naive.entries[start:]]
        assert queue.lowest_position(start) == min(rest, default=None)


@pytest.mark.invariant("I16", "I17", "I18")
@given(appends, st.lists(st.integers(0, 80), max_size=3))
def test_queue_against_a_list_through_trims(batches, heads):
    queue, naive, now = filled(batches)
    agree(queue, naive, now)
    for head in heads:
        naive.head = min(max(head, naive.head), len(naive.entries))
        queue.trim(head)
        agree(queue, naive, now)
    restored = QueueIndex(Place("t", 0))
    restored.load(queue.head, *queue.to_tables(), queue.bytes_total)
    agree(restored, naive, now)
    now += 1
    naive.entries.append((9999, 3, now))
    for one in (queue, restored):
        assert one.append(np.array([9999]), 3, now, 0) == len(naive.entries) - 1
        agree(one, naive, now)


@given(appends, st.integers(990, 1100))
def test_trim_below_lets_go_of_a_prefix(batches, position):
    queue, naive, _ = filled(batches)
    queue.trim_below(position)
    gone = [o for o, (p, _, _) in enumerate(naive.entries) if p < position]
    assert queue.head == (gone[-1] + 1 if gone else 0)
    assert queue.end == len(naive.entries)


@pytest.mark.invariant("I16")
def test_i16_offsets_go_on_after_everything_left():
    queue = QueueIndex(Place("t", 0))
    queue.append(np.arange(5), 0, 1, 0)
    queue.trim(5)
    assert (queue.head, queue.end, queue.offset_at(0)) == (5, 5, 5)
    assert queue.append(np.array([9]), 0, 2, 0) == 5
    assert queue.offset_at(1) == 5


def test_copies_do_not_change_with_the_queue():
    queue = QueueIndex(Place("t", 0))
    queue.append(np.arange(3), 1, 1, 0)
    positions, tags = queue.positions(0, 3), queue.tags(0, 3)
    queue.append(np.arange(10_000), 2, 2, 0)
    queue.trim(3)
    assert (positions.tolist(), tags.tolist()) == ([0, 1, 2], [1, 1, 1])


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4000)), max_size=30), st.integers(0, 5))
def test_columns_against_a_list(steps, first):
    columns, naive = Columns({"a": np.int64, "b": np.int32}, first=first), list(range(-first, 0))
    start = first
    for count, trim in steps:
        values = np.arange(len(naive), len(naive) + count)
        assert columns.extend(count, a=values, b=7) == len(naive)
        naive += values.tolist()
        columns.trim(trim)
        start = min(max(start, trim), len(naive))
        assert (columns.first, columns.end, len(columns)) == (start, len(naive), len(naive) - start)
        assert columns["a"].tolist() == naive[start:]
        assert columns["b"].tolist() == [7] * len(columns)
    restored = Columns({"a": np.int64, "b": np.int32})
    restored.load(columns.to_table())
    assert restored.to_table().equals(columns.to_table(), check_metadata=True)


def test_columns_let_memory_go():
    columns = Columns({"a": np.int64})
    for n in range(200):
        columns.extend(1000, a=n)
        columns.trim(columns.end - 10)
    assert len(columns._arrays["a"]) < 20_000


@given(st.lists(st.integers(0, 3)))
def test_small_helpers(values):
    assert all_equal(np.array(values)) == (len(set(values)) <= 1)
    assert unique_in_order(np.array(values, np.int64)).tolist() == list(dict.fromkeys(values))
