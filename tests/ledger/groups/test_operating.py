"""What operators do to a whole group: reset, pause, delete, rule by rule (I22, I23, I25 to I27)."""

from __future__ import annotations

import numpy as np
import pytest
from groups_driver import Driver, FakeTopics, pairs
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.groups.cursors import MAX_RUNS, Again
from escrowmq.model import member_id


def group_of(count: int = 10, **options) -> Driver:
    driver = Driver(FakeTopics(t=1), retry_backoff_us=100, max_attempts=3)
    driver.put(0, *[None] * count)
    driver.subscribe("g", **options)
    return driver


def refused(code: Code):
    return pytest.raises(EscrowError, check=lambda problem: problem.code == code)


def counted(move: dict) -> dict:
    return {name: move[name] for name in ("was", "now", "again", "skipped", "leased", "dead")}


class TestReset:
    @pytest.mark.invariant("I22")
    def test_what_was_acknowledged_comes_again_as_a_repeat(self):
        driver = group_of()
        lease = int(driver.receive(most=6).leases[0])
        driver.ack(lease, 0, 6)
        [move] = driver.reset(start="earliest")
        assert counted(move) == {"was": 6, "now": 0, "again": 6, "skipped": 0, "leased": 0, "dead": 0}
        assert driver.account() == {"waiting": list(range(10))}
        assert driver.line()["floor"] == 0
        assert pairs(driver.receive()) == [(0, n, 2) for n in range(6)] + [(0, n, 1) for n in range(6, 10)]
        assert not len(driver.groups.group("g").cursors[0].again), "said once"

    @pytest.mark.invariant("I26")
    def test_what_is_passed_over_is_skipped(self):
        driver = group_of()
        leased = driver.receive(most=4)
        driver.nack(int(leased.leases[0]), 1)
        [move] = driver.reset(start="latest")
        assert counted(move) == {"was": 0, "now": 10, "again": 0, "skipped": 10, "leased": 3, "dead": 0}
        assert driver.account() == {"skipped": list(range(10))}
        assert driver.line()["floor"] == 10
        assert not driver.groups.has_work("g", driver.topics, NEVER_US)

    @pytest.mark.invariant("I27")
    def test_leases_from_before_are_lost_for_every_act(self):
        driver = group_of()
        first, second = driver.receive(most=2), driver.receive(most=3)
        old, done = int(first.leases[0]), int(second.leases[0])
        driver.ack(done, 2, 3)
        assert driver.ack(done, 2, 3) == Code.OK, "repeated"
        driver.reset(shift=0)
        assert driver.groups.group("g").leases == 0
        assert [driver.ack(old, 0, 2), driver.nack(old, 0), driver.extend(old, 0, 50)] == [Code.LEASE_LOST] * 3
        assert driver.ack(done, 2, 3) == Code.LEASE_LOST, "what it acknowledged waits again"
        assert driver.account() == {"waiting": list(range(10))}
        assert pairs(driver.receive()) == [(0, n, 2) for n in range(5)] + [(0, n, 1) for n in range(5, 10)]

    @pytest.mark.invariant("I25")
    def test_dead_letters_below_stay_and_those_above_wait(self):
        driver = Driver(FakeTopics(t=1), retry_backoff_us=100, max_attempts=1)
        driver.put(0, *[None] * 10)
        driver.subscribe("g")
        lease = int(driver.receive(most=8).leases[0])
        driver.nack(lease, 2)
        driver.nack(lease, 6)
        driver.ack(lease, 0, 8)
        assert driver.account()["dead"] == [2, 6]
        [move] = driver.reset(topic="t", queue=0, offset=4)
        assert counted(move) == {"was": 8, "now": 4, "again": 3, "skipped": 0, "leased": 0, "dead": 1}
        assert driver.account() == {"waiting": list(range(4, 10)), "dead": [2], "acked": [0, 1, 3]}
        assert driver.line()["floor"] == 2
        assert pairs(driver.receive()) == [(0, n, 1) for n in range(4, 10)], "one attempt is all that there is"

    def test_by_a_number_of_offsets_counts_from_what_is_to_be_done(self):
        driver = group_of()
        lease = int(driver.receive(most=6).leases[0])
        driver.ack(lease, 0, 4)
        [move] = driver.reset(shift=-2)
        assert counted(move) == {"was": 4, "now": 2, "again": 2, "skipped": 0, "leased": 2, "dead": 0}
        assert driver.reset(shift=3)[0]["now"] == 5
        assert driver.reset(shift=-100)[0]["now"] == 0
        assert driver.reset(shift=100)[0]["now"] == 10

    def test_before_the_start_of_the_group(self):
        driver = group_of(start="latest")
        driver.put(0, None, None)
        lease = int(driver.receive().leases[0])
        driver.ack(lease, 10, 2)
        driver.reset(topic="t", queue=0, offset=3)
        assert driver.account() == {"skipped": [0, 1, 2], "waiting": list(range(3, 12))}
        assert pairs(driver.receive()) == [(0, n, 1) for n in range(3, 10)] + [(0, 10, 2), (0, 11, 2)]
        driver.reopen()
        driver.reset(start="earliest")
        assert driver.account() == {"waiting": list(range(12))}
        assert driver.line()["skipped"] == 0

    def test_to_a_time(self):
        driver = group_of(3)
        driver.now += 1_000
        then = driver.now
        driver.put(0, None, None)
        lease = int(driver.receive().leases[0])
        driver.ack(lease, 0, 5)
        assert driver.reset(start=str(then))[0]["now"] == 3
        assert driver.reset(start=str(then + 1))[0]["now"] == 5

    @pytest.mark.invariant("I26")
    def test_what_left_the_log_stays_as_it_was(self):
        driver = group_of()
        driver.ack(int(driver.receive(most=4).leases[0]), 0, 2)
        driver.trim(0, 3)
        assert driver.reset(start="earliest")[0]["now"] == 3
        assert driver.account() == {"acked": [0, 1], "expired": [2], "waiting": list(range(3, 10))}
        with refused(Code.BAD_REQUEST):
            driver.reset(topic="t", queue=0, offset=2)
        with refused(Code.BAD_REQUEST):
            driver.reset(topic="t", queue=0, offset=11)

    @pytest.mark.parametrize(
        "where",
        [
            {},
            {"start": "latest", "shift": 1},
            {"offset": 1},
            {"offset": 1, "topic": "t"},
            {"start": "latest", "queue": 0},
        ],
    )
    def test_what_is_not_clear_is_refused(self, where):
        with refused(Code.BAD_REQUEST):
            group_of().reset(**where)

    def test_where_it_cannot_be(self):
        driver = group_of()
        with refused(Code.UNKNOWN_GROUP):
            driver.reset("nobody", start="latest")
        with refused(Code.UNKNOWN_TOPIC):
            driver.reset(topic="u", start="latest")
        with refused(Code.BAD_QUEUE):
            driver.reset(topic="t", queue=1, start="latest")

    def test_only_the_queue_that_is_meant(self):
        driver = Driver(FakeTopics(t=2, u=1))
        for queue in range(3):
            driver.put(queue, None, None)
        driver.subscribe("g", "t", "u")
        driver.receive()
        assert [m["queue_id"] for m in driver.reset(topic="t", queue=1, start="latest")] == [1]
        assert [driver.account(n) for n in range(3)] == [{"leased": [0, 1]}, {"skipped": [0, 1]}, {"leased": [0, 1]}]
        assert [m["queue_id"] for m in driver.reset(topic="t", start="earliest")] == [0, 1]
        assert driver.groups.group("g").leases == 1

    def test_to_where_it_is_changes_nothing(self):
        driver = group_of()
        driver.ack(int(driver.receive().leases[0]), 0, 10)
        driver.reset(start="latest")
        assert driver.events == []

    def test_in_order_the_keys_that_waited_begin_anew(self):
        driver = Driver(FakeTopics(t=1), retry_backoff_us=100, max_attempts=3)
        driver.put_keys(0, "abab")
        driver.subscribe("g", ordered=True)
        lease = int(driver.receive().leases[0])
        driver.nack(lease, 0)
        driver.ack(lease, 1, 3)
        driver.reset(start="earliest")
        assert pairs(driver.receive()) == [(0, n, 2) for n in range(4)]

    def test_in_order_what_is_taken_up_keeps_its_attempt(self):
        driver = Driver(FakeTopics(t=1), retry_backoff_us=100, max_attempts=3)
        driver.put_keys(0, "aabbcc")
        driver.subscribe("g", ordered=True)
        driver.ack(int(driver.receive(most=4).leases[0]), 0, 4)
        driver.reset(start="earliest")
        lease = int(driver.receive(most=1).leases[0])
        driver.nack(lease, 0)
        found: list[tuple[int, int, int]] = []
        while got := pairs(leased := driver.receive()):
            found += got
            for id, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True):
                driver.ack(id, offset)
        assert sorted(found) == [(0, 2, 2), (0, 3, 2), (0, 4, 1), (0, 5, 1)], "behind the key that failed"

    def test_tags_do_not_split_what_comes_again(self):
        driver = Driver(FakeTopics(t=1), max_attempts=3)
        driver.put(0, *["a", "b"] * 20, "a")
        driver.subscribe("g", tags=("a",))
        leased = driver.receive(most=10)
        driver.ack(int(leased.leases[0]), 0, 20)
        driver.reset(start="earliest")
        assert len(driver.groups.group("g").cursors[0].again) == 1
        assert pairs(driver.receive()) == [(0, n, 2 if n < 19 else 1) for n in range(0, 41, 2)]

    def test_a_group_that_holds_what_is_in_doubt_is_asked_for_force(self):
        driver = group_of(in_doubt="hold")
        epoch = driver.join("a")["epoch"]
        old = int(driver.receive(member=member_id("g", "a"), epoch=epoch).leases[0])
        with refused(Code.CONFLICT):
            driver.reset(start="earliest")
        driver.reset(start="earliest", force=True)
        assert driver.ack(old, 0) == Code.LEASE_LOST
        assert len(driver.receive(member=member_id("g", "a"), epoch=epoch).leases) == 10
        driver.reset(start="latest", force=True)
        assert not driver.groups.group("g").members[member_id("g", "a")].doubted


class TestPause:
    def test_nothing_is_handed_out_and_what_is_out_can_be_settled(self):
        driver = group_of()
        lease = int(driver.receive(most=3).leases[0])
        assert driver.pause() == {"all": True, "topics": [], "leased": 3}
        assert not driver.groups.has_work("g", driver.topics, NEVER_US)
        assert not len(driver.receive().leases)
        assert driver.events == []
        assert [driver.ack(lease, 0), driver.extend(lease, 1, 500), driver.nack(lease, 1)] == [Code.OK] * 3
        driver.now += 10_000
        assert not len(driver.receive().leases), "no retry either"
        driver.reopen()
        assert not len(driver.receive().leases), "a snapshot knows it"
        assert driver.resume() == {"all": False, "topics": [], "leased": 1}
        assert driver.groups.has_work("g", driver.topics, driver.now)
        assert pairs(driver.receive(most=2))[0] == (0, 1, 2)

    @pytest.mark.invariant("I25")
    def test_a_lease_that_ends_meanwhile_counts_no_attempt_and_kills_nothing(self):
        driver = Driver(FakeTopics(t=1), retry_backoff_us=100, max_attempts=2)
        driver.put(0, None)
        driver.subscribe("g")
        for _ in range(5):
            assert len(driver.receive(lease=10).leases) == 1
            driver.pause()
            driver.now += 1_000
            driver.tick()
            assert driver.account() == {"retrying": [0]}
            driver.resume()
        assert pairs(driver.receive(lease=10)) == [(0, 0, 2)], "told from a first delivery"
        driver.now += 1_000
        driver.tick()
        assert driver.account() == {"dead": [0]}

    def test_a_topic_alone(self):
        driver = Driver(FakeTopics(t=1, u=1))
        driver.put(0, None)
        driver.put(1, None)
        driver.subscribe("g", "t", "u")
        assert driver.pause("t")["topics"] == ["t"]
        assert pairs(driver.receive()) == [(1, 0, 1)]
        driver.pause("t")
        assert driver.events == [], "it is"
        driver.pause()
        with refused(Code.CONFLICT):
            driver.resume("t")
        assert driver.resume() == {"all": False, "topics": [], "leased": 1}
        assert pairs(driver.receive()) == [(0, 0, 1)]
        with refused(Code.UNKNOWN_TOPIC):
            driver.pause("v")

    def test_a_topic_that_the_group_leaves_is_not_paused_when_it_comes_back(self):
        driver = Driver(FakeTopics(t=1, u=1))
        driver.subscribe("g", "t", "u")
        driver.pause("u")
        driver.alter(topics=("t",))
        driver.alter(topics=("t", "u"))
        assert not driver.groups.group("g").is_paused("u")

    def test_what_is_in_doubt_is_not_handed_over(self):
        driver = group_of(in_doubt="hold")
        member = member_id("g", "a")
        epoch = driver.join("a")["epoch"]
        driver.receive(member=member, epoch=epoch)
        epoch = driver.join("a", process=2)["epoch"]
        driver.pause()
        assert not driver.groups.has_work("g", driver.topics, driver.now)
        assert not len(driver.receive(member=member, epoch=epoch).leases)
        driver.resume()
        assert len(driver.receive(member=member, epoch=epoch).leases) == 10


class TestDelete:
    def test_the_same_name_is_a_new_group(self):
        driver = group_of()
        driver.subscribe("h")
        lease = int(driver.receive(most=3).leases[0])
        with refused(Code.CONFLICT):
            driver.delete()
        assert driver.delete(force=True) == {
            "number": 0, "leased": 3, "retrying": 0, "dead_letters": 0, "members": 0,
        }  # fmt: skip
        with refused(Code.UNKNOWN_GROUP):
            driver.receive()
        assert driver.groups.has_work("g", driver.topics, driver.now), "receives that wait are refused"
        assert driver.groups.names() == {0: "g", 1: "h"}
        driver.reopen()
        made = driver.subscribe("g", start="latest")
        assert made == {"group": 2, "created": True, "start": "latest", "max_attempts": made["max_attempts"]}
        assert driver.ack(lease, 0) == Code.LEASE_LOST
        assert driver.account() == {"skipped": list(range(10))}
        assert [d["name"] for d in driver.groups.describe(driver.topics, driver.rules)] == ["h", "g"]
        driver.reopen()

    def test_its_number_is_not_given_again_and_its_name_is_known_as_long_as_its_acknowledgements(self):
        driver = group_of()
        driver.delete()
        before = driver.position
        driver.reopen()
        assert driver.groups.names() == {0: "g"}
        driver.groups.apply_trim(driver.topics, before)
        assert driver.groups.names() == {}
        driver.reopen()
        assert driver.subscribe("g")["group"] == 1

    def test_room_for_another(self):
        driver = Driver(FakeTopics(t=1), max_groups=1)
        driver.subscribe("g")
        driver.delete()
        assert driver.subscribe("h")["created"]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30), st.integers(0, 400))
def test_what_comes_again_is_a_set_of_offsets(gaps, cut):
    starts, ends, at = [], [], 0
    for gap, size in gaps:
        starts.append(at + gap)
        ends.append(at := at + gap + size)
    again = Again(np.array(starts, np.int64), np.array(ends, np.int64))
    again.trim(cut)
    expected = {n for a, b in zip(starts, ends, strict=True) for n in range(a, b) if n >= cut}
    offsets = np.arange(at + 10)
    assert set(np.flatnonzero(again.attempts(offsets, 2) == 2).tolist()) == expected
    place = 0
    while place < at + 10:
        inside, end = again.stretch(place, at + 10)
        assert all((n in expected) == inside for n in range(place, end))
        assert end > place
        place = end


def test_more_runs_than_are_remembered_are_merged_where_they_are_close():
    starts = np.arange(MAX_RUNS + 5) * 10
    starts[-1] += 1
    again = Again(starts, starts + 5)
    assert len(again) == MAX_RUNS
    assert set(again.attempts(np.concatenate([starts, starts + 4]), 2).tolist()) == {2}, (
        "no repeat passes for a first delivery"
    )
