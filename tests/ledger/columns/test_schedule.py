"""The due index against a naive list of entries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from escrowmq.ledger.columns.schedule import NEVER_US, DueIndex

times = st.integers(0, 20)


class DueIndexMachine(RuleBasedStateMachine):
    """The owner's columns are a dict: entry → the time for which it waits; what is not there is dead."""

    @initialize()
    def start(self) -> None:
        self.now = 0
        self.next_entry = 0
        self.waits: dict[int, int] = {}
        self.index = DueIndex(self.alive)

    def alive(self, entries, due) -> np.ndarray:
        times = np.broadcast_to(due, len(entries)).tolist()
        return np.array([self.waits.get(e) == at for e, at in zip(entries.tolist(), times, strict=True)], bool)

    @rule(due=st.lists(times, max_size=6))
    def put_new(self, due) -> None:
        entries = np.arange(self.next_entry, self.next_entry + len(due))
        self.next_entry += len(due)
        self.waits |= dict(zip(entries.tolist(), [self.now + d for d in due], strict=True))
        self.index.put(entries, np.array(due, np.int64) + self.now)

    @rule(count=st.integers(0, 5), due=times)
    def put_new_at_one_time(self, count, due) -> None:
        entries = np.arange(self.next_entry, self.next_entry + count)
        self.next_entry += count
        self.waits |= dict.fromkeys(entries.tolist(), self.now + due)
        self.index.put(entries, self.now + due)

    @rule(data=st.data(), due=times)
    def put_again(self, data, due) -> None:
        if self.waits:
            entry = data.draw(st.sampled_from(sorted(self.waits)))
            if self.waits[entry] != self.now + due:
                self.waits[entry] = self.now + due
                self.index.put(np.array([entry]), self.now + due)

    @rule(data=st.data())
    def kill(self, data) -> None:
        if self.waits:
            del self.waits[data.draw(st.sampled_from(sorted(self.waits)))]

    @rule(pause=st.integers(0, 8))
    def pass_time(self, pause) -> None:
        self.now += pause

    @rule()
    def drop_dead(self) -> None:
        if self.index._size:
            self.index._drop_dead()
        assert self.index._size == len(self.waits)

    @rule()
    def done(self) -> None:
        self.index.done()

    @rule(limit=st.integers(0, 4))
    def take(self, limit) -> None:
        for entry in self.index.due(self.now, limit).tolist():
            del self.waits[entry]

    @invariant()
    def due_is_what_is_due(self) -> None:
        due = sorted(at for at in self.waits.values() if at <= self.now)
        found = self.index.due(self.now, 1 << 30).tolist()
        assert sorted(found) == sorted(e for e, at in self.waits.items() if at <= self.now)
        assert [self.waits[e] for e in found] == due, "the longest overdue come first"
        assert [self.waits[e] for e in self.index.due(self.now, 2).tolist()] == due[:2]

    @invariant()
    def next_is_the_least(self) -> None:
        assert self.index.wake_us <= min(self.waits.values(), default=NEVER_US), "a lower bound before one has looked"
        self.index.due(self.now, 1)
        assert self.index.wake_us == min(self.waits.values(), default=NEVER_US)


TestDueIndex = DueIndexMachine.TestCase
TestDueIndex.settings = settings(max_examples=max(40, settings.default.max_examples - 60), stateful_step_count=25)


@given(st.lists(st.integers(0, 5)))
def test_nothing_is_kept_of_the_dead(due):
    index = DueIndex(lambda entries, _: np.zeros(len(entries), bool))
    index.put(np.arange(len(due)), np.array(due, np.int64))
    assert not len(index.due(2, 1))
    assert index.wake_us == NEVER_US
    assert (index._heap, index._buckets, index._overdue) == ([], {}, [])


@pytest.mark.parametrize("look", [NEVER_US, 5], ids=["before its time", "when it is overdue"])
def test_an_entry_that_comes_back_to_a_time_that_it_had_is_given_once(look):
    waits = 5
    index = DueIndex(lambda entries, due: np.broadcast_to(np.asarray(due) == waits, len(entries)))
    for waits in (5, 9, 5):
        index.put(np.array([3]), waits)
        if look == waits:
            index.due(look, 1)
    assert index.due(5, 10).tolist() == [3]
    index.put(np.array([3]), 5)
    index._drop_dead()
    assert index._size == 1
    assert index.due(5, 10).tolist() == [3]


def test_large_batches_go_in_and_come_out_whole():
    index = DueIndex(lambda entries, _: np.ones(len(entries), bool))
    index.put(np.arange(50_000), 7)
    assert index.due(7, 1 << 30).tolist() == list(range(50_000))
    assert index.due(7, 20_000).tolist() == list(range(20_000))
    assert len(index.due(6, 10)) == 50_000 - 50_000 + 10, "looked at once, an entry stays overdue"


def test_a_look_that_finds_nothing_moves_the_bound_and_does_a_bounded_amount_of_work():
    looked = 0

    def dead(entries, _):
        nonlocal looked
        looked += 1
        return np.zeros(len(entries), bool)

    index = DueIndex(dead)
    index.put(np.arange(1000), np.arange(1000))
    bounds = []
    while index.wake_us < NEVER_US:
        looked = 0
        assert not len(index.due(index.wake_us, 1))
        bounds.append(index.wake_us)
        assert looked <= 65
    assert bounds == sorted(set(bounds))
    assert len(bounds) <= 1 + 1000 // 64


def test_the_dead_that_nobody_looks_for_are_dropped_when_they_are_far_more_than_the_living():
    alive = {0}
    index = DueIndex(lambda entries, _: np.isin(entries, list(alive)))
    for entry in range(30_000):
        index.put(np.array([entry]), 5 + entry, len(alive))
        assert index._size <= 8192 + 2 * len(alive) + 1
    assert index.due(5, 10).tolist() == [0]
    assert index.wake_us == 5
