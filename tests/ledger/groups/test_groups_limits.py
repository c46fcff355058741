"""Limits of a consumer group, rule by rule: messages per second, in flight, and in flight of each key."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from groups_driver import Driver, FakeTopics, pairs
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.groups.groups import Groups
from escrowmq.ledger.groups.limits import BURST_SECONDS, NO_KEY, Bucket, KeyRoom
from escrowmq.ledger.groups.order import MAX_BEHIND
from escrowmq.model import Act, member_id

SECOND = 1_000_000


def group_of(keys: str = "", queues: int = 1, **options) -> Driver:
    driver = Driver(FakeTopics(t=queues), retry_backoff_us=100, max_attempts=3)
    driver.put_keys(0, keys)
    driver.subscribe("g", **options)
    return driver


def offsets(driver: Driver, **options) -> list[int]:
    return driver.receive(**{"lease": 100 * SECOND} | options).offsets.tolist()


# In flight


def test_no_more_is_in_flight_than_the_limit():
    driver = group_of("abcdef")
    driver.limit(in_flight=4)
    first = driver.receive(most=3)
    assert first.offsets.tolist() == [0, 1, 2]
    assert offsets(driver, member=8) == [3]
    assert not driver.groups.has_work("g", driver.topics, driver.now)
    assert offsets(driver) == []
    driver.ack(int(first.leases[0]), 1)
    assert driver.groups.has_work("g", driver.topics, driver.now)
    assert offsets(driver) == [4]


def test_messages_given_back_dead_or_expired_are_not_in_flight():
    driver = group_of("abcdef")
    driver.limit(in_flight=2)
    lease = int(driver.receive(lease=10).leases[0])
    driver.nack(lease, 0, delay=10_000)
    assert offsets(driver, lease=50_000) == [2]
    driver.now += 20
    driver.tick()  # offset 1 failed
    assert offsets(driver) == [3]


def test_a_lower_limit_takes_nothing_from_consumers_and_delivers_nothing_until_there_is_room():
    driver = group_of("abcdef")
    lease = int(driver.receive(most=4).leases[0])
    assert driver.limit(in_flight=2)["leased"] == 4
    assert offsets(driver) == []
    driver.ack(lease, 0, 2)
    assert offsets(driver) == []
    driver.ack(lease, 2)
    assert offsets(driver) == [4]


def test_without_limits_again_all_is_delivered_at_once():
    driver = group_of("aaaa")
    driver.limit(rate=1, in_flight=1, in_flight_per_key=1)
    assert offsets(driver) == [0]
    driver.limit()
    assert offsets(driver) == [1, 2, 3]
    assert driver.limit() == {"leased": 4}
    assert driver.events == [], "no event without a change"


@pytest.mark.parametrize("bad", ["rate 0", "rate -1", "rate nan", "rate inf", "in_flight 0", "in_flight_per_key 0"])
def test_bad_limits_change_nothing(bad):
    driver, (limit, value) = group_of("ab"), bad.split()
    with pytest.raises(EscrowError) as caught:
        driver.limit(**{limit: float(value)})
    assert caught.value.code is Code.BAD_REQUEST
    assert offsets(driver) == [0, 1]


def test_limits_of_an_unknown_group():
    with pytest.raises(EscrowError) as caught:
        group_of().limit("other", rate=1)
    assert caught.value.code is Code.UNKNOWN_GROUP


# Messages per second


def test_a_group_gets_a_burst_and_then_its_rate():
    driver = group_of("a" * 300)
    driver.limit(rate=100)
    assert offsets(driver, most=1000) == list(range(31)), "three tenths of a second, and one"
    assert offsets(driver) == []
    assert not driver.groups.has_work("g", driver.topics, driver.now)
    wake_us = driver.groups.wake_us
    assert wake_us == driver.now + 20_000, "leases are not granted for less than a fiftieth of a second"
    driver.now = wake_us
    driver.tick()
    assert driver.groups.has_work("g", driver.topics, driver.now)
    assert len(offsets(driver)) == 2
    driver.now += 100_000
    assert len(offsets(driver)) == 10
    driver.now += 60 * SECOND
    assert len(offsets(driver, most=1000)) == 31, "what was not used is lost"


def test_a_slow_rate_grants_one_message_after_the_other():
    driver = group_of("a" * 4)
    driver.limit(rate=0.1)
    assert offsets(driver) == [0]
    driver.now += round(9.7 * SECOND) - 1
    assert offsets(driver) == []
    driver.now += 1
    assert offsets(driver) == [1]
    driver.now += 10 * SECOND - 1
    assert offsets(driver) == []
    driver.now += 1
    assert offsets(driver) == [2]


@pytest.mark.parametrize("late_seconds", [0.0, 0.1, 0.27])
@pytest.mark.parametrize("rate", [2, 50])
def test_receives_that_come_late_get_the_rate(rate, late_seconds):
    """As when the machine stalls for that time before each of them, by the driver's clock."""
    driver = group_of("a" * 30 * rate)
    driver.limit(rate=rate)
    began, found = driver.now, []
    while driver.now < began + 20 * SECOND:
        found += [driver.now] * len(offsets(driver, most=1000))
        driver.now = max(driver.groups.wake_us, driver.now) + round(late_seconds * SECOND)
        driver.tick()
    for begin in (0, 5, 10):
        end = began + (begin + 10) * SECOND
        assert abs(sum(began + begin * SECOND <= at < end for at in found) - 10 * rate) <= 0.05 * 10 * rate + 1


def test_redeliveries_count_and_messages_that_nobody_received_do_not():
    driver = group_of("a" * 8)
    driver.limit(rate=4)
    lease = int(driver.receive(most=2).leases[0])
    driver.settle((lease, 0, 1, Act.RELEASE, -1, None), (lease, 1, 1, Act.NACK, 0, None))
    assert pairs(driver.receive()) == [(0, 0, 1)], "one of two: the other one counted"
    driver.now += SECOND // 4
    assert pairs(driver.receive()) == [(0, 1, 2)]


def test_an_unchanged_rate_goes_on_when_other_limits_change():
    driver = group_of("a" * 100)
    driver.limit(rate=100)
    offsets(driver, most=1000)
    driver.limit(rate=100, in_flight=36)
    assert offsets(driver) == []
    driver.limit(rate=200, in_flight=36)
    assert len(offsets(driver)) == 5, "the limit in flight"


@given(
    rate=st.floats(0.01, 1e6), steps=st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(0, 500)), max_size=30)
)
def test_the_rate_holds_in_every_window_of_time(rate, steps):
    bucket, now, taken = Bucket(rate, 0), 0, []
    for after_us, wanted in steps:
        now += after_us
        count = min(wanted, bucket.room(now))
        bucket.take(count, now)
        taken.append((now, count))
        assert bucket.room(bucket.ready_us) >= bucket.least, "what is waited for is there"
        assert bucket.room(bucket.ready_us - 1) == 0 or bucket.ready_us <= now
    for first, (begin, _) in enumerate(taken):
        for last in range(first, len(taken)):
            total, end = sum(count for _, count in taken[first : last + 1]), taken[last][0]
            assert total <= 1 + rate * (BURST_SECONDS + (end - begin) / SECOND) + 0.01


@given(st.floats(1, 50_000), st.lists(st.integers(1, 270_000), min_size=1, max_size=50))
def test_a_group_with_enough_messages_gets_its_rate(rate, late_us):
    """Served whenever the bucket is ready, up to 0.27 s late, it gets the rate within 5 % over 10 seconds."""
    bucket, now, total, late = Bucket(rate, 0), 0, 0, itertools.cycle(late_us)
    while now < 10 * SECOND:
        total += (count := bucket.room(now))
        bucket.take(count, now)
        now = bucket.ready_us + next(late)
    assert 10 * rate * 0.95 - 1 <= total <= 10 * rate * 1.05 + 1


# In flight of each key


def test_other_keys_pass_those_without_room():
    driver = group_of("aaabca")
    driver.limit(in_flight_per_key=1)
    first = driver.receive()
    assert pairs(first) == [(0, 0, 1), (0, 3, 1), (0, 4, 1)]
    assert offsets(driver) == []
    driver.ack(int(first.leases[0]), 0)
    second = driver.receive()
    assert pairs(second) == [(0, 1, 1)]
    driver.nack(int(second.leases[0]), 1, delay=0)
    assert pairs(driver.receive()) == [(0, 1, 2)], "the oldest first"


def test_the_limit_per_key_counts_over_queues_and_earlier_leases():
    driver = group_of("aa", queues=2)
    driver.put_keys(1, "ab")
    held = driver.receive(most=1, queues=[0])
    driver.limit(in_flight_per_key=1)
    assert pairs(driver.receive()) == [(1, 1, 1)]
    driver.ack(int(held.leases[0]), 0)
    assert len(offsets(driver)) == 1


def test_messages_without_a_key_have_no_limit_per_key():
    driver = group_of()
    driver.keys |= {driver.position + n: NO_KEY for n in range(3)}
    driver.put(0, None, None, None)
    driver.limit(in_flight_per_key=1)
    assert offsets(driver) == [0, 1, 2]


def test_messages_with_an_unreadable_key_come_one_by_one_and_block_none_for_good():
    driver = group_of("?a?a")
    driver.limit(in_flight_per_key=1)
    found = []
    while leased := pairs(batch := driver.receive()):
        found += [offset for _, offset, _ in leased]
        for lease, offset in zip(batch.leases.tolist(), batch.offsets.tolist(), strict=True):
            driver.ack(lease, offset)
    assert sorted(found) == [0, 1, 2, 3]


def test_a_key_that_is_full_blocks_its_queue_only_behind_very_many_messages():
    driver = group_of("a" * (MAX_BEHIND + 300) + "b")
    driver.limit(in_flight_per_key=1)
    for _ in range(MAX_BEHIND // 256 + 5):
        driver.receive()
    assert driver.line()["next"] < MAX_BEHIND + 300
    assert driver.account()["leased"] == [0]


def test_an_ordered_lease_ends_before_a_message_without_room():
    driver = group_of("abaab", ordered=True)
    driver.limit(in_flight_per_key=1)
    first = driver.receive()
    assert first.offsets.tolist() == [0, 1]
    assert offsets(driver) == []
    lease = int(first.leases[0])
    driver.nack(lease, 0, delay=0)
    assert driver.ack(lease, 1) == Code.OK
    assert pairs(driver.receive()) == [(0, 0, 2)]


def test_a_message_for_the_last_time_comes_alone_and_within_the_limit():
    driver = group_of("ab")
    driver.limit(in_flight_per_key=1)
    for _ in range(2):
        leased = driver.receive(most=1)
        driver.nack(int(leased.leases[0]), 0, delay=0)
    assert pairs(driver.receive(one_by_one=True)) == [(0, 0, 3)]
    driver.put_keys(0, "a")
    assert pairs(driver.receive(one_by_one=True)) == [(0, 1, 1)]


# Named members


def test_what_a_member_has_in_doubt_is_handed_over_whatever_the_limits():
    driver = group_of("aabc", in_doubt="hold")
    member = member_id("g", "x")
    epoch = driver.join("x", 1)["epoch"]
    assert offsets(driver, member=member, epoch=epoch) == [0, 1, 2, 3]
    driver.limit(rate=5, in_flight=1, in_flight_per_key=1)
    epoch = driver.join("x", 2)["epoch"]
    assert pairs(driver.receive(member=member, epoch=epoch)) == [(0, n, 2) for n in range(4)]
    driver.put_keys(0, "d")
    for lease in list(driver.groups.leases.live.values()):
        driver.ack(lease.id, lease.start, lease.end - lease.start)
    assert offsets(driver, member=member, epoch=epoch) == [], "they count for the rate"
    driver.now += SECOND
    assert offsets(driver, member=member, epoch=epoch) == [4]


# Snapshots


def test_limits_and_what_was_spent_survive_a_restart():
    driver = group_of("a" * 100)
    driver.limit(rate=100, in_flight=67)
    offsets(driver, most=26)
    driver.reopen()
    assert driver.groups.wake_us <= driver.now
    assert len(offsets(driver)) == 5
    driver.now += SECOND
    assert len(offsets(driver)) == 31
    driver.reopen()
    assert driver.groups.wake_us == driver.now + 20_000
    driver.now += SECOND
    assert len(offsets(driver)) == 5, "the limit in flight"


def test_a_snapshot_of_the_version_before_has_no_limits():
    driver = group_of("ab")
    tables = driver.groups.freeze()()
    assert not tables.pop("groups_limited").num_rows
    driver.use(Groups())
    driver.groups.restore(tables)
    assert offsets(driver) == [0, 1]
    assert driver.groups.wake_us < NEVER_US


# All of it, at random

LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "rate": st.sampled_from([0.5, 4, 40, 4000]),
        "in_flight": st.integers(1, 5),
        "in_flight_per_key": st.integers(1, 3),
    },
)
STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 1), st.text("abcd?", min_size=1, max_size=6)),
    st.tuples(st.just("receive"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("settle"), st.integers(0, 9), st.sampled_from([Act.ACK, Act.ACK, Act.NACK, Act.RELEASE])),
    st.tuples(st.just("limit"), LIMITS, st.none()),
    st.tuples(st.just("wait"), st.sampled_from([10, 1_000, SECOND // 10, 3 * SECOND]), st.none()),
    st.tuples(st.just("reopen"), st.none(), st.none()),
)


class Limited:
    """A driver that checks after each receive that no limit is exceeded, and collects the acknowledged messages."""

    def __init__(self, ordered: bool) -> None:
        self.driver = Driver(FakeTopics(t=2), retry_backoff_us=100, max_attempts=1 << 30)
        self.driver.subscribe("g", ordered=ordered)
        self.limits: dict[str, float] = {}
        self.acked: Counter[tuple[int, int]] = Counter()
        self.sent = 0

    def held(self) -> Counter[object]:
        """Messages in flight by key; those without a known one by "?"."""
        keys: Counter[object] = Counter()
        for lease in self.driver.groups.leases.live.values():
            queue = self.driver.topics.queues[lease.cursor.queue_id]
            for offset in lease.pending_offsets(lease.start).tolist():
                keys[self.driver.keys.get(int(queue.positions(offset, offset + 1)[0]), "?")] += 1
        return keys

    def receive(self, most: int, one_by_one: bool) -> int:
        before = self.held()
        leased = self.driver.receive(most=most, lease=SECOND, one_by_one=one_by_one)
        after, got = self.held(), len(leased.offsets)
        if got and "in_flight" in self.limits:
            assert after.total() <= self.limits["in_flight"]
        if "in_flight_per_key" in self.limits:
            assert all(after[key] <= max(self.limits["in_flight_per_key"], before[key]) for key in after)
        if "rate" in self.limits:
            assert got <= int(1 + self.limits["rate"] * BURST_SECONDS)
        return got

    def settle(self, choice: int, act: Act) -> None:
        live = list(self.driver.groups.leases.live.values())
        if not live:
            return
        lease = live[choice % len(live)]
        offset = int(lease.pending_offsets(lease.start)[0])
        code = self.driver.settle((lease.id, offset, 1, act, -1, None))[0]
        if code == Code.OK and act == Act.ACK:
            self.acked[lease.cursor.queue_id, offset] += 1

    def run(self, what: str, first, second) -> None:
        if what == "put":
            self.driver.put_keys(first, second)
            self.sent += len(second)
        elif what == "limit":
            self.limits = first
            self.driver.limit(**first)
        elif what == "wait":
            self.driver.now += first
            self.driver.tick()
        elif what == "reopen":
            self.driver.reopen()
        else:
            getattr(self, what)(first, second)

    def finish(self) -> None:
        """Each message is delivered and acknowledged in the end, when receives wake as a broker's do. Replay of the
        events gives the same state."""
        idle = 0
        while self.acked.total() < self.sent:
            now = self.driver.now
            self.driver.tick()
            if self.driver.groups.has_work("g", self.driver.topics, now) and self.receive(3, False):
                idle = 0
            elif self.driver.groups.leases.live:
                self.settle(0, Act.ACK)
            else:
                idle += 1
                assert idle < 50, "receives wait for ever"
                wake_us = self.driver.groups.wake_us
                self.driver.now = max(now, wake_us) if wake_us < NEVER_US else now
        replayed = Groups()
        for event, _, time_us in self.driver.log:
            replayed.apply(event.kind, event.batch, time_us, self.driver.topics, self.driver.rules)
        assert replayed.freeze()() == self.driver.groups.freeze()()


@given(ordered=st.booleans(), steps=st.lists(STEPS, max_size=40))
def test_never_more_than_the_limits_and_everything_is_delivered(ordered, steps):
    limited = Limited(ordered)
    for step in steps:
        limited.run(*step)
    limited.finish()
    assert set(limited.acked.values()) <= {1}


@given(st.lists(st.integers(1, 5)), st.lists(st.integers(1, 5)), st.integers(1, 3))
def test_the_room_of_keys_is_that_of_counting_one_by_one(in_flight, wanted, most):
    counts, expected = Counter(in_flight), []
    for key in wanted:
        seen = counts[key]
        expected.append(seen < most)
        counts[key] += 1
    room = KeyRoom(most, np.array(in_flight, np.int64))
    assert room.select(np.array(wanted, np.int64)).tolist() == expected
    assert room.count_first(np.array(wanted, np.int64)) == [*expected, False].index(False)
