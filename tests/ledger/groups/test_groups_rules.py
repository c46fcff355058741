"""Consumer groups rule by rule."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from groups_driver import Driver, FakeTopics, pairs

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.groups.failed import Redelivery
from escrowmq.ledger.groups.groups import Groups
from escrowmq.model import Act, member_id
from escrowmq.schemas import Kind


def one_queue(count: int = 10, **rules) -> Driver:
    driver = Driver(FakeTopics(t=1), **{"retry_backoff_us": 100, "retry_backoff_max_us": 1_000, **rules})
    driver.put(0, *[None] * count)
    return driver


def refused(code: Code):
    return pytest.raises(EscrowError, check=lambda problem: problem.code == code)


class TestSubscribing:
    def test_made_once_then_joined(self):
        driver = one_queue()
        began = {"start": "earliest", "max_attempts": 16}
        assert driver.subscribe("g", "t", tags=("a", "b")) == {"group": 0, "created": True, **began}
        assert driver.subscribe("h") == {"group": 1, "created": True, **began}
        again = driver.subscribe("g", "t", "t", tags=("b", "a"), start="latest")
        assert again == {"group": 0, "created": False, **began}
        assert driver.events == []
        assert driver.groups.names() == {0: "g", 1: "h"}

    @pytest.mark.parametrize(
        ("other", "words"),
        [
            ({"tags": ("a",)}, r"the tags \(all\), not a"),
            ({"ordered": True}, r"the order \(none\), not by key"),
            ({"in_doubt": "hold"}, "the in_doubt redeliver, not hold"),
            ({"max_attempts": 3}, "max_attempts 16, not 3"),
            ({"retry_backoff_us": 5_000_000}, r"a back-off of 0\.0001 to 0\.001 s, not retry_backoff 5"),
            ({"retry_delays_us": (5_000_000,)}, r"a back-off of 0\.0001 to 0\.001 s, not after 5 s"),
        ],
    )
    def test_another_subscription_is_refused_and_the_refusal_says_what_differs(self, other, words):
        driver = one_queue()
        driver.subscribe("g")
        with pytest.raises(EscrowError, match=words) as caught:
            driver.subscribe("g", **other)
        assert caught.value.code is Code.SUBSCRIPTION_MISMATCH

    def test_what_is_named_and_what_the_group_has_are_the_same_thing(self):
        driver = one_queue()
        driver.subscribe("g")
        assert not driver.subscribe("g", max_attempts=16, retry_backoff_us=100)["created"]

    @pytest.mark.parametrize("name", ["", ".g", "%g", "a b", "g/h", "é", "x" * 128, "g\n"])
    def test_names(self, name):
        with refused(Code.BAD_GROUP_NAME):
            one_queue().subscribe(name)

    def test_longest_name(self):
        assert one_queue().subscribe("x" * 127)["created"]

    def test_limits_and_topics(self):
        driver = one_queue(max_groups=1)
        with refused(Code.UNKNOWN_TOPIC):
            driver.subscribe("g", "nowhere")
        driver.subscribe("g")
        with refused(Code.TOO_MANY):
            driver.subscribe("h")
        assert driver.subscribe("g") == {"group": 0, "created": False, "start": "earliest", "max_attempts": 16}

    @pytest.mark.parametrize(
        "options", [{"start": "soon"}, {"start": "-1"}, {"max_attempts": 0}, {"retry_backoff_us": -1}, {"tags": ("",)}]
    )
    def test_nonsense(self, options):
        with refused(Code.BAD_REQUEST):
            one_queue().subscribe("g", **options)

    def test_starts(self):
        driver = one_queue(2)
        driver.now = 2_000_000
        driver.put(0, None, None)
        for start, first in (("earliest", 0), ("latest", 4), ("1500000", 2), ("9000000", 4)):
            driver.subscribe(start, start=start)
            assert driver.line(group=start)["next"] == first
            assert driver.account(group=start).get("skipped", []) == list(range(first))
        assert driver.groups.group("1500000").subscription.starts == {"0": 2}

    def test_a_queue_that_comes_later_is_consumed_from_its_beginning(self):
        driver = one_queue()
        driver.subscribe("g", start="latest")
        new = driver.topics.add_queue("t")
        assert not driver.groups.has_work("g", driver.topics, driver.now)
        driver.put(new, None)
        assert driver.groups.has_work("g", driver.topics, driver.now)
        assert pairs(driver.receive()) == [(new, 0, 1)]

    def test_unknown_group(self):
        driver = one_queue()
        for act in (
            lambda: driver.receive("nobody"),
            lambda: driver.settle((1, 0, 1, Act.ACK, -1, None), group="nobody"),
            lambda: driver.settle_dead((0, 0), retry=True, group="nobody"),
        ):
            with refused(Code.UNKNOWN_GROUP):
                act()
        assert driver.groups.has_work("nobody", driver.topics, 0), "a receive of it is refused"


class TestReceiving:
    @pytest.mark.invariant("I20")
    def test_first_deliveries_in_order_with_positions_and_lease_ids(self):
        driver = one_queue()
        driver.subscribe("g")
        expected = driver.position
        leased = driver.receive(most=4)
        assert pairs(leased) == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1)]
        assert leased.leases.tolist() == [expected] * 4
        assert leased.positions.tolist() == [1000, 1001, 1002, 1003]
        assert [event.kind for event in driver.events] == [Kind.LEASED]
        assert pairs(driver.receive(most=100))[0] == (0, 4, 1)
        assert pairs(driver.receive()) == []
        assert driver.events == []
        assert driver.groups.delivered == 10

    def test_queues_by_turns(self):
        driver = Driver(FakeTopics(t=3))
        driver.subscribe("g")
        for queue_id in range(3):
            driver.put(queue_id, *[None] * 10)
        served = [driver.receive(most=4).queue_ids.tolist()[0] for _ in range(6)]
        assert served == [0, 1, 2, 0, 1, 2]
        assert len(driver.receive(most=100).offsets) == 6

    def test_only_the_named_queues(self):
        driver = Driver(FakeTopics(t=2, other=1))
        driver.subscribe("g")
        driver.put(0, None)
        driver.put(1, None)
        assert pairs(driver.receive(queues=[1])) == [(1, 0, 1)]
        with refused(Code.BAD_QUEUE):
            driver.receive(queues=[2])

    @pytest.mark.invariant("I35")
    def test_the_limit_of_leases(self):
        driver = one_queue(max_leases=2)
        driver.subscribe("g")
        first, _ = driver.receive(most=1), driver.receive(most=1)
        assert pairs(driver.receive(most=1)) == []
        assert driver.events == []
        driver.ack(int(first.leases[0]), 0)
        assert pairs(driver.receive(most=1)) == [(0, 2, 1)]

    def test_nothing_for_nothing(self):
        driver = one_queue()
        driver.subscribe("g")
        assert pairs(driver.receive(most=0)) == []
        with refused(Code.BAD_REQUEST):
            driver.receive(lease=0)

    def test_groups_do_not_touch_each_other(self):
        driver = one_queue()
        driver.subscribe("g")
        driver.subscribe("h")
        mine = driver.receive("g")
        assert pairs(driver.receive("h")) == pairs(mine)
        lease = int(mine.leases[0])
        assert driver.settle((lease, 0, 10, Act.ACK, -1, None), group="h") == [Code.LEASE_LOST]
        assert driver.ack(lease, 0, 10) == Code.OK
        assert driver.account(group="h") == {"leased": list(range(10))}


class TestTags:
    def filtered(self) -> Driver:
        driver = Driver(FakeTopics(t=1), retry_backoff_us=0)
        driver.put(0, "a", "b", None, "a", "c", "a", "b")
        driver.subscribe("g", tags=("a", "c"))
        return driver

    def test_only_what_matches(self):
        driver = self.filtered()
        assert [o for _, o, _ in pairs(driver.receive())] == [0, 3, 4, 5]
        assert driver.account() == {"leased": [0, 3, 4, 5], "filtered": [1, 2, 6]}

    def test_the_range_ends_with_the_last_message_asked_for(self):
        driver = self.filtered()
        assert [o for _, o, _ in pairs(driver.receive(most=2))] == [0, 3]
        assert driver.line()["next"] == 4

    def test_an_ack_of_the_whole_range_passes_over_the_rest(self):
        driver = self.filtered()
        lease = int(driver.receive().leases[0])
        assert driver.ack(lease, 0, 6) == Code.OK
        assert driver.events[0].batch.num_rows == 1
        assert driver.account() == {"acked": [0, 3, 4, 5], "filtered": [1, 2, 6]}
        assert driver.line()["floor"] == 7

    def test_acking_only_what_was_never_leased(self):
        driver = self.filtered()
        lease = int(driver.receive().leases[0])
        assert driver.ack(lease, 1, 2) == Code.BAD_REQUEST

    def test_a_range_without_a_match_advances(self):
        driver = Driver(FakeTopics(t=1))
        driver.put(0, "b", "b")
        driver.subscribe("g", tags=("a",))
        assert driver.groups.has_work("g", driver.topics, driver.now)
        assert pairs(driver.receive()) == []
        assert driver.line()["filtered"] == 2
        assert not driver.groups.has_work("g", driver.topics, driver.now)
        assert driver.groups.describe(driver.topics, driver.rules)[0]["leases"] == 0
        driver.put(0, "a")
        assert pairs(driver.receive()) == [(0, 2, 1)]

    def test_a_rare_match_far_away_is_found_at_once_and_its_lease_is_small(self):
        driver = Driver(FakeTopics(t=1))
        driver.topics.tags["a"] = 1
        tags = np.full(600_000, 2, np.int32)
        tags[[500_000, 500_010]] = 1
        driver.topics.queues[0].append(np.arange(600_000), tags, 1, 0)
        driver.subscribe("g", tags=("a",))
        assert [o for _, o, _ in pairs(driver.receive(most=2))] == [500_000, 500_010]
        assert [row["count"] for row in driver.events[0].batch.to_pylist()] == [500_000, 11]
        assert driver.line()["next"] == 500_011

    def test_one_receive_passes_over_so_much_and_no_more(self, monkeypatch):
        monkeypatch.setattr("escrowmq.ledger.groups.receiving.MAX_PASSED", 3)
        driver = Driver(FakeTopics(t=1))
        driver.put(0, "b", "b", "b", "b", "a")
        driver.subscribe("g", tags=("a",))
        assert pairs(driver.receive()) == []
        assert driver.line()["next"] == 3
        assert driver.groups.has_work("g", driver.topics, driver.now)
        assert pairs(driver.receive()) == [(0, 4, 1)]

    def test_a_lease_spans_so_much_and_no_more(self, monkeypatch):
        monkeypatch.setattr("escrowmq.ledger.groups.receiving.SPAN", 3)
        driver = Driver(FakeTopics(t=1))
        driver.put(0, "b", "a", "b", "a", "a")
        driver.subscribe("g", tags=("a",))
        assert pairs(driver.receive()) == [(0, 1, 1), (0, 3, 1)]
        assert pairs(driver.receive()) == [(0, 4, 1)]

    def test_retries_of_a_filtered_lease_are_one_lease_again(self):
        driver = self.filtered()
        lease = int(driver.receive().leases[0])
        driver.nack(lease, 0, 6, delay=0)
        again = driver.receive()
        assert pairs(again) == [(0, 0, 2), (0, 3, 2), (0, 4, 2), (0, 5, 2)]
        assert len(set(again.leases.tolist())) == 1


class TestSettling:
    @pytest.mark.invariant("I22")
    def test_ack_is_idempotent_even_after_the_lease_ended(self):
        driver = one_queue(3)
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        assert driver.ack(lease, 0) == Code.OK
        assert driver.ack(lease, 0) == Code.OK
        assert driver.events == []
        assert driver.ack(lease, 0, 3) == Code.OK
        assert driver.ack(lease, 0, 3) == Code.OK
        assert driver.events == []
        assert driver.account() == {"acked": [0, 1, 2]}

    @pytest.mark.invariant("I27")
    def test_outside_the_lease(self):
        driver = one_queue()
        driver.subscribe("g")
        driver.receive(most=3)
        lease = int(driver.receive(most=3).leases[0])
        rows = [(2, 1), (6, 1), (5, 2), (2, 2), (3, 0), (3, -1)]
        assert driver.settle(*[(lease, start, count, Act.ACK, -1, None) for start, count in rows]) == [
            Code.BAD_REQUEST
        ] * len(rows)
        assert driver.settle((lease, 3, 1, 9, -1, None)) == [Code.BAD_REQUEST]
        assert driver.ack(424242, 3) == Code.LEASE_LOST

    def test_rows_see_the_rows_before_them(self):
        driver = one_queue()
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        codes = driver.settle(
            (lease, 0, 3, Act.ACK, -1, None),
            (lease, 1, 1, Act.NACK, -1, None),  # acked above
            (lease, 4, 1, Act.NACK, -1, None),
            (lease, 3, 3, Act.ACK, -1, None),  # passes over 4
            (lease, 4, 1, Act.ACK, -1, None),
            (lease, 6, 4, Act.ACK, -1, None),
            (lease, 9, 1, Act.EXTEND, 50, None),  # nothing is left
        )
        assert codes == [Code.OK, Code.LEASE_LOST, Code.OK, Code.OK, Code.LEASE_LOST, Code.OK, Code.LEASE_LOST]
        assert driver.account() == {"acked": [0, 1, 2, 3, 5, 6, 7, 8, 9], "retrying": [4]}

    def test_neighbouring_acks_are_one_row_of_the_log(self):
        driver = one_queue()
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        driver.settle(*[(lease, offset, 1, Act.ACK, -1, None) for offset in range(10)])
        assert [(e.kind, e.batch.num_rows) for e in driver.events] == [(Kind.ACKED, 1)]

    @pytest.mark.invariant("I23")
    def test_nack_waits_for_its_back_off_and_counts(self):
        driver = one_queue(1)
        driver.subscribe("g")
        for attempt, wait in ((1, 100), (2, 200), (3, 400), (4, 800), (5, 1000), (6, 1000)):
            leased = driver.receive()
            assert pairs(leased) == [(0, 0, attempt)]
            driver.nack(int(leased.leases[0]), 0)
            assert driver.groups.wake_us == driver.now + wait
            driver.now += wait - 1
            assert pairs(driver.receive()) == []
            assert not driver.groups.has_work("g", driver.topics, driver.now)
            driver.now += 1
            driver.tick()  # as the writer does when a time has come
            assert driver.groups.has_work("g", driver.topics, driver.now)

    def test_a_due_retry_does_not_make_the_timer_spin(self):
        driver = one_queue(1)
        driver.subscribe("g")
        driver.nack(int(driver.receive().leases[0]), 0, delay=10)
        assert driver.groups.wake_us == driver.now + 10
        driver.now += 10
        driver.tick()
        assert driver.groups.wake_us == NEVER_US
        assert driver.groups.has_work("g", driver.topics, driver.now)

    def test_nack_with_a_delay(self):
        driver = one_queue(1, max_delay_us=500)
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        assert driver.nack(lease, 0, delay=501) == Code.BAD_DELAY
        assert driver.nack(lease, 0, delay=-2) == Code.BAD_DELAY
        assert driver.nack(lease, 0, delay=0) == Code.OK
        assert pairs(driver.receive()) == [(0, 0, 2)]

    @pytest.mark.invariant("I20")
    def test_retries_come_before_first_deliveries(self):
        driver = one_queue()
        driver.subscribe("g")
        lease = int(driver.receive(most=4).leases[0])
        driver.settle((lease, 3, 1, Act.NACK, 0, None), (lease, 1, 1, Act.NACK, 0, None))
        assert pairs(driver.receive(most=3)) == [(0, 1, 2), (0, 3, 2), (0, 4, 1)]

    def test_extend(self):
        driver = one_queue(2)
        driver.subscribe("g")
        lease = int(driver.receive(lease=100).leases[0])
        assert driver.groups.wake_us == driver.now + 100
        assert driver.extend(lease, 0, 0) == Code.BAD_DELAY
        assert driver.extend(lease, 0, 500) == Code.OK
        driver.now += 499
        driver.tick()
        assert driver.events == []
        assert driver.extend(lease, 0, 1) == Code.OK  # shorter is allowed too
        driver.now += 1
        driver.tick()
        assert [e.kind for e in driver.events] == [Kind.RETRIED]
        assert driver.extend(lease, 0, 10) == Code.LEASE_LOST


class TestExpiry:
    @pytest.mark.invariant("I23", "I27")
    def test_an_expired_lease_comes_back_and_its_late_ack_is_refused(self):
        driver = one_queue(4)
        driver.subscribe("g")
        lease = int(driver.receive(lease=50).leases[0])
        driver.ack(lease, 1)
        driver.now += 50
        driver.tick()
        assert driver.account() == {"acked": [1], "retrying": [0, 2, 3]}
        assert driver.ack(lease, 0) == Code.LEASE_LOST
        assert driver.ack(lease, 1) == Code.OK  # this very lease acked it
        driver.now += 100
        again = driver.receive()
        assert pairs(again) == [(0, 0, 2), (0, 2, 2), (0, 3, 2)]
        assert driver.ack(lease, 0) == Code.LEASE_LOST
        assert driver.ack(int(again.leases[0]), 0, 4) == Code.OK
        assert driver.line()["floor"] == 4

    @pytest.mark.invariant("I25")
    def test_the_last_attempt_ends_in_a_dead_letter(self):
        driver = one_queue(2, max_attempts=2)
        driver.subscribe("g")
        for _ in range(2):
            driver.receive(lease=50)
            driver.now += 50
            driver.tick()
            driver.now += 100
        letters = driver.groups.dead_letters("g", driver.topics)
        assert [(d["offset"], d["attempts"], d["cause"]) for d in letters] == [
            (0, 2, "lease expired, attempt 2 of 2"),
            (1, 2, "lease expired, attempt 2 of 2"),
        ]
        assert letters[0]["position"] == 1000
        assert (letters[0]["topic"], letters[0]["queue"], letters[0]["dead_us"]) == ("t", 0, driver.now - 100)
        assert driver.groups.wake_us == NEVER_US

    def test_at_most_limit_leases_a_tick_earliest_first(self):
        driver = one_queue(3)
        driver.subscribe("g")
        for lease_us in (30, 10, 20):
            driver.receive(most=1, lease=lease_us)
        driver.now += 100
        driver.tick(limit=2)
        assert driver.account() == {"retrying": [1, 2], "leased": [0]}
        driver.tick()
        assert driver.account() == {"retrying": [0, 1, 2]}

    def test_expiry_of_many_groups_at_once(self):
        driver = one_queue(2)
        for name, attempts in (("g", 5), ("h", 1)):
            driver.subscribe(name, max_attempts=attempts)
            driver.receive(name, lease=10)
        driver.now += 10
        driver.tick()
        assert driver.account(group="g") == {"retrying": [0, 1]}
        assert driver.account(group="h") == {"dead": [0, 1]}


class TestDeadLetters:
    def dead(self) -> Driver:
        driver = one_queue(4, max_attempts=1)
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        driver.settle((lease, 0, 2, Act.NACK, -1, "no stock"), (lease, 2, 2, Act.NACK, -1, None))
        return driver

    @pytest.mark.invariant("I25")
    def test_cause(self):
        causes = [d["cause"] for d in self.dead().groups.dead_letters("g", self.dead().topics)]
        assert causes == ["no stock, attempt 1 of 1"] * 2 + ["not accepted by the consumer, attempt 1 of 1"] * 2

    @pytest.mark.invariant("I25")
    def test_a_rejected_message_is_dead_at_once_whatever_its_attempt(self):
        driver = one_queue(4)
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        codes = driver.settle((lease, 0, 2, Act.REJECT, 0, "no customer"), (lease, 2, 1, Act.REJECT, 0, None))
        assert codes == [Code.OK] * 2
        assert driver.settle((lease, 0, 1, Act.REJECT, 0, "again")) == [Code.LEASE_LOST]
        found = driver.groups.dead_letters("g", driver.topics)
        assert [(one["offset"], one["attempts"], one["cause"]) for one in found] == [
            (0, 1, "no customer"),
            (1, 1, "no customer"),
            (2, 1, "rejected by the consumer"),
        ]
        assert driver.account() == {"dead": [0, 1, 2], "leased": [3]}

    def test_a_long_cause_is_cut(self):
        driver = one_queue(1, max_attempts=1)
        driver.subscribe("g")
        driver.nack(int(driver.receive().leases[0]), 0, cause="x" * 100_000)
        assert len(driver.groups.dead_letters("g", driver.topics)[0]["cause"]) < 1100

    def test_pages(self):
        driver = self.dead()
        first = driver.groups.dead_letters("g", driver.topics, limit=3)
        assert [d["offset"] for d in first] == [0, 1, 2]
        after = (first[-1]["queue_id"], first[-1]["offset"])
        assert [d["offset"] for d in driver.groups.dead_letters("g", driver.topics, 3, after)] == [3]

    @pytest.mark.invariant("I25")
    def test_retry_counts_attempts_anew(self):
        driver = self.dead()
        assert driver.settle_dead((0, 2), (0, 0), retry=True) == [Code.OK, Code.OK]
        assert pairs(driver.receive()) == [(0, 0, 1), (0, 2, 1)]

    def test_discard(self):
        driver = self.dead()
        assert driver.line()["floor"] == 0
        assert driver.settle_dead((0, 0), (0, 1), (0, 0), (0, 99), (5, 0), retry=False) == [
            Code.OK,
            Code.OK,
            Code.NOT_FOUND,
            Code.NOT_FOUND,
            Code.NOT_FOUND,
        ]
        assert driver.account() == {"discarded": [0, 1], "dead": [2, 3]}
        assert driver.line()["floor"] == 2
        assert driver.groups.describe(driver.topics, driver.rules)[0]["dead_letters"] == 2
        assert driver.settle_dead((0, 0), retry=True) == [Code.NOT_FOUND]

    @pytest.mark.invariant("I25")
    def test_only_the_death_that_was_shown_is_settled(self):
        driver = self.dead()
        shown = [letter["dead_us"] for letter in driver.groups.dead_letters("g", driver.topics)]
        assert driver.settle_dead((0, 0), (0, 1), retry=True, dead_us=shown[:2]) == [Code.OK, Code.OK]
        driver.now += 1000
        driver.nack(int(driver.receive().leases[0]), 0, 2)
        again = driver.settle_dead((0, 0), (0, 1), (0, 2), (0, 99), retry=False, dead_us=[*shown[:3], 1])
        assert again == [Code.CONFLICT, Code.CONFLICT, Code.OK, Code.NOT_FOUND]
        assert driver.account() == {"dead": [0, 1, 3], "discarded": [2]}


class TestOrdered:
    def ordered(self, count: int = 6, **options) -> Driver:
        driver = one_queue(count)
        driver.subscribe("g", ordered=True, **options)
        return driver

    @pytest.mark.invariant("I20")
    def test_one_lease_a_queue(self):
        driver = Driver(FakeTopics(t=2))
        driver.subscribe("g", ordered=True)
        driver.put(0, *[None] * 4)
        driver.put(1, *[None] * 4)
        first = driver.receive(most=2)
        assert pairs(first) == [(0, 0, 1), (0, 1, 1)]
        assert pairs(driver.receive(most=2)) == [(1, 0, 1), (1, 1, 1)]
        assert pairs(driver.receive()) == []
        assert not driver.groups.has_work("g", driver.topics, driver.now)
        driver.ack(int(first.leases[0]), 0)
        assert pairs(driver.receive()) == []
        driver.ack(int(first.leases[0]), 1)
        assert pairs(driver.receive()) == [(0, 2, 1), (0, 3, 1)]

    def test_a_nack_lets_the_later_ones_go_uncharged(self):
        driver = self.ordered()
        lease = int(driver.receive(most=4).leases[0])
        driver.ack(lease, 0)
        assert driver.nack(lease, 1) == Code.OK
        assert driver.ack(lease, 2) == Code.LEASE_LOST
        assert driver.account() == {"acked": [0], "retrying": [1, 2, 3], "waiting": [4, 5]}
        assert pairs(driver.receive()) == []  # nothing overtakes it, though 2 and 3 have no back-off of their own
        assert driver.groups.wake_us == driver.now + 100
        driver.now += 100
        again = driver.receive()
        assert pairs(again) == [(0, 1, 2), (0, 2, 2), (0, 3, 2)]
        driver.nack(int(again.leases[0]), 1)
        driver.now += 200
        alone = driver.receive()
        assert pairs(alone) == [(0, 1, 3)]  # the others are still at 2, so it is tried alone
        assert pairs(driver.receive()) == []
        driver.ack(int(alone.leases[0]), 1)
        assert pairs(driver.receive()) == [(0, 2, 2), (0, 3, 2)]

    def test_what_was_before_the_failed_one_must_be_settled_first(self):
        driver = self.ordered()
        lease = int(driver.receive(most=3).leases[0])
        driver.nack(lease, 2, delay=0)
        assert pairs(driver.receive()) == []
        assert driver.ack(lease, 0, 2) == Code.OK
        assert pairs(driver.receive()) == [(0, 2, 2)]

    def test_a_dead_one_lets_the_queue_go_on(self):
        driver = self.ordered(max_attempts=1)
        lease = int(driver.receive(most=3).leases[0])
        driver.nack(lease, 0)
        assert driver.account() == {"dead": [0], "retrying": [1, 2], "waiting": [3, 4, 5]}
        assert pairs(driver.receive()) == [(0, 1, 1), (0, 2, 1)]  # one attempt is all there is, and it was not theirs

    def test_an_expired_lease_charges_its_first_pending(self):
        driver = self.ordered(3, max_attempts=2)
        lease = int(driver.receive(lease=10).leases[0])
        driver.ack(lease, 0)
        for wait in (100, 200):
            driver.now += 10
            driver.tick()
            driver.now += wait
            driver.receive(lease=10)
        assert [d["offset"] for d in driver.groups.dead_letters("g", driver.topics)] == [1]
        assert driver.account() == {"acked": [0], "dead": [1], "leased": [2]}


class TestRetention:
    def test_what_is_not_done_expires(self):
        driver = one_queue(10, max_attempts=1)
        driver.subscribe("g")
        lease = int(driver.receive(most=6).leases[0])
        driver.settle((lease, 0, 1, Act.ACK, -1, None), (lease, 1, 1, Act.NACK, -1, None))
        driver.trim(0, 4)
        assert driver.account() == {"acked": [0], "expired": [1, 2, 3], "leased": [4, 5], "waiting": [6, 7, 8, 9]}
        assert driver.groups.dead_letters("g", driver.topics) == []
        assert driver.ack(lease, 2) == Code.LEASE_LOST
        assert driver.ack(lease, 4, 2) == Code.OK
        driver.trim(0, 9)
        assert driver.account() == {"acked": [0, 4, 5], "expired": [1, 2, 3, 6, 7, 8], "waiting": [9]}
        assert (driver.line()["floor"], driver.line()["expired"]) == (9, 6)
        assert pairs(driver.receive()) == [(0, 9, 1)]

    def test_a_lease_wholly_below_ends(self):
        driver = one_queue()
        driver.subscribe("g", ordered=True)
        lease = int(driver.receive(most=2).leases[0])
        driver.trim(0, 2)
        assert driver.ack(lease, 0, 2) == Code.LEASE_LOST
        assert driver.groups.wake_us == NEVER_US
        assert pairs(driver.receive(most=1)) == [(0, 2, 1)]

    def test_retries_below_are_let_go(self):
        driver = one_queue()
        driver.subscribe("g")
        driver.nack(int(driver.receive(most=4).leases[0]), 0, 4, delay=0)
        driver.trim(0, 3)
        assert pairs(driver.receive(most=1)) == [(0, 3, 2)]

    def test_a_queue_that_was_never_met(self):
        driver = one_queue()
        driver.subscribe("g")
        new = driver.topics.add_queue("t")
        driver.put(new, *[None] * 5)
        driver.trim(new, 3)
        assert driver.account(new) == {"expired": [0, 1, 2], "waiting": [3, 4]}
        assert (new, 3, 1) in pairs(driver.receive())

    @pytest.mark.invariant("I26")
    def test_a_shredded_history_is_merged_but_its_counts_stay(self, monkeypatch):
        monkeypatch.setattr("escrowmq.ledger.groups.cursors.MAX_HISTORY_RUNS", 5)
        driver = Driver(FakeTopics(t=1))
        driver.put(0, *["a", "b"] * 10)
        driver.subscribe("g", tags=("a",))
        driver.ack(int(driver.receive().leases[0]), 0, 19)
        driver.trim(0, 18)
        found = driver.account()
        assert found["gone"] == list(range(14))
        assert found["acked"] == [14, 16, 18]
        assert (driver.line()["acked"], driver.line()["filtered"]) == (10, 10)
        driver.reopen()
        assert driver.account() == found


@pytest.mark.invariant("I22", "I26")
def test_replaying_the_events_gives_the_same_state():
    driver = one_queue(50, max_attempts=3)
    driver.subscribe("g")
    driver.subscribe("o", ordered=True)
    for round_ in range(12):
        for name in ("g", "o"):
            leased = driver.receive(name, most=7, lease=30)
            for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True):
                act = (Act.ACK, Act.NACK, Act.EXTEND)[(offset + round_) % 3]
                driver.settle((lease, offset, 1, act, 5 if act != Act.ACK else -1, "why"), group=name)
        driver.now += 20
        driver.tick()
    twin = Groups()
    for event, _, time_us in driver.log:
        twin.apply(event.kind, event.batch, time_us, driver.topics, driver.rules)
    assert twin.freeze()() == driver.groups.freeze()()


def test_ended_leases_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr("escrowmq.ledger.groups.group.MAX_ENDED", 3)
    driver = one_queue()
    driver.subscribe("g")
    leases = [int(driver.receive(most=1).leases[0]) for _ in range(5)]
    for offset, lease in enumerate(leases):
        driver.ack(lease, offset)
    assert [driver.ack(lease, offset) for offset, lease in enumerate(leases)] == [Code.LEASE_LOST] * 2 + [Code.OK] * 3
    driver.reopen()
    assert [driver.ack(lease, offset) for offset, lease in enumerate(leases)] == [Code.LEASE_LOST] * 2 + [Code.OK] * 3


def test_snapshots_share_no_memory():
    driver = one_queue(6, max_attempts=2)
    driver.subscribe("g")
    lease = int(driver.receive(most=5).leases[0])
    driver.nack(lease, 1, 2)
    before = driver.groups.freeze()()
    text = {name: table.to_pylist() for name, table in before.items()}
    driver.ack(lease, 3)
    driver.now += 1000
    driver.receive()
    driver.trim(0, 3)
    assert {name: table.to_pylist() for name, table in before.items()} == text
    assert all(name.startswith("groups_") and isinstance(table, pa.Table) for name, table in before.items())


def test_back_off_does_not_overflow():
    assert [Redelivery(9, 100, 1000).wait_us(n) for n in (1, 2, 4, 5, 10_000)] == [100, 200, 800, 1000, 1000]
    assert Redelivery(9, 0, 1000).wait_us(100) == 0


def test_a_million_messages_in_runs_stay_runs():
    driver = Driver(FakeTopics(t=1), max_leases=100)
    driver.topics.queues[0].append(np.arange(1_000_000), 0, 1, 0)
    driver.subscribe("g")
    for _ in range(100):
        leased = driver.receive(most=10_000)
        driver.ack(int(leased.leases[0]), int(leased.offsets[0]), 10_000)
    tables = driver.groups.freeze()()
    assert tables["groups_runs"].num_rows == 1
    assert tables["groups_leases"]["mask"].null_count == 100
    assert driver.line()["floor"] == 1_000_000


def test_a_row_does_not_depend_on_how_rows_are_batched():
    driver = Driver(FakeTopics(t=1))
    driver.put(0, "a", "b", "a")
    driver.subscribe("g", tags=("a",))
    driver.subscribe("h", tags=("a",))
    one, other = int(driver.receive("g").leases[0]), int(driver.receive("h").leases[0])
    together = driver.settle((one, 0, 3, Act.NACK, -1, None), (one, 1, 1, Act.ACK, -1, None))
    rows = ((0, 3, Act.NACK), (1, 1, Act.ACK))
    apart = [driver.settle((other, start, count, act, -1, None), group="h")[0] for start, count, act in rows]
    assert together == apart == [Code.OK, Code.LEASE_LOST]


def test_a_run_ends_where_the_next_retry_is_not_due_or_far_away():
    driver = one_queue(1000)
    driver.subscribe("g", max_attempts=99)
    lease = int(driver.receive(most=1000).leases[0])
    waits = ((0, 0), (1, 50), (2, 0), (600, 0))
    driver.settle(*[(lease, offset, 1, Act.NACK, wait, None) for offset, wait in waits])
    again = driver.receive(most=4)
    assert pairs(again) == [(0, 0, 2), (0, 2, 2), (0, 600, 2)]
    assert len(set(again.leases.tolist())) == 3
    assert driver.groups.wake_us == driver.now + 50


@pytest.mark.parametrize("early", [True, False])
def test_an_ordered_retry_is_no_work_while_its_queue_is_leased(early):
    driver = one_queue(3)
    driver.subscribe("g", ordered=True)
    lease = int(driver.receive().leases[0])
    driver.nack(lease, 2, delay=5)
    if early:
        driver.ack(lease, 0, 2)
        assert driver.groups.wake_us == driver.now + 5
        assert not driver.groups.has_work("g", driver.topics, driver.now)
    driver.now += 5
    driver.tick()
    assert driver.groups.wake_us == (NEVER_US if early else driver.now + 995), "its time has come, the lease's has not"
    assert driver.groups.has_work("g", driver.topics, driver.now) == early
    driver.ack(lease, 0, 2)
    assert driver.groups.has_work("g", driver.topics, driver.now)


MINUTES = 60_000_000


class TestRedelivery:
    @pytest.mark.invariant("I25")
    def test_3_8_three_times_five_minutes_apart_then_it_waits_for_a_person(self):
        driver = one_queue(1)
        driver.subscribe("g", retry_delays_us=(5 * MINUTES,) * 3)
        for attempt in (1, 2, 3):
            assert pairs(driver.receive()) == [(0, 0, attempt)]
            driver.nack(driver.position - 1, 0)
            driver.now += 5 * MINUTES - 1
            assert pairs(driver.receive()) == []
            driver.now += 1
            driver.reopen()
        assert pairs(driver.receive()) == [(0, 0, 4)]
        driver.nack(driver.position - 1, 0, cause="no")
        assert driver.account() == {"dead": [0]}
        assert driver.groups.group("g").cursor(0).dead["causes"].tolist() == ["no, attempt 4 of 4"]

    def test_the_last_delay_counts_for_all_that_follow(self):
        driver = one_queue(1)
        driver.subscribe("g", retry_delays_us=(1 * MINUTES, 2 * MINUTES), max_attempts=5)
        waited = []
        for _ in range(4):
            driver.receive()
            driver.nack(driver.position - 1, 0)
            waited.append(int(driver.groups.group("g").cursor(0).retries.least_due_us - driver.now) // MINUTES)
            driver.now += 2 * MINUTES
        assert waited == [1, 2, 2, 2]

    @pytest.mark.parametrize(
        "options",
        [{"retry_delays_us": (-1,)}, {"retry_delays_us": (1,) * 101}, {"retry_delays_us": (1,), "retry_backoff_us": 1}],
    )
    def test_nonsense(self, options):
        with refused(Code.BAD_REQUEST):
            one_queue().subscribe("g", **options)


class TestAltering:
    def test_tags_choose_among_what_was_not_passed_over_yet(self):
        driver = one_queue(0)
        driver.subscribe("g", tags=("a",))
        driver.put(0, "a", "b", "a")
        first = driver.receive()
        driver.alter(tags=("b",))
        driver.put(0, "b", "a")
        assert pairs(driver.receive()) == [(0, 3, 1)]
        assert driver.account() == {"leased": [0, 2, 3], "filtered": [1, 4]}
        driver.nack(int(first.leases[0]), 0, 3, delay=0)
        assert pairs(driver.receive())[:2] == [(0, 0, 2), (0, 2, 2)], (
            "what was delivered once is delivered until it is done"
        )
        driver.alter(tags=())
        driver.put(0, None)
        driver.reopen()
        assert pairs(driver.receive()) == [(0, 5, 1)]

    def test_a_topic_that_is_new_to_the_group_begins_at_start_and_one_that_it_had_goes_on(self):
        driver = Driver(FakeTopics(t=1, u=1))
        driver.put(0, None, None)
        driver.put(1, None, None)
        driver.subscribe("g")
        driver.receive(most=1)
        driver.ack(driver.position - 1, 0)
        driver.alter(topics=("u",), start="latest")
        assert driver.account(1) == {"skipped": [0, 1]}
        driver.put(1, None)
        driver.put(0, None)
        assert pairs(driver.receive()) == [(1, 2, 1)]
        driver.alter(topics=("t", "u"), start="latest")
        assert pairs(driver.receive()) == [(0, 1, 1), (0, 2, 1)]

    def test_what_is_held_of_a_topic_that_is_left_can_be_settled_and_is_shown(self):
        driver = Driver(FakeTopics(t=1, u=1), max_attempts=2)
        driver.put(0, *[None] * 4)
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        driver.alter(topics=("u",))
        assert driver.ack(lease, 0) == Code.OK
        assert driver.line(0)["leased"] == 3
        driver.now += 1_000
        driver.tick()
        assert driver.account() == {"acked": [0], "retrying": [1, 2, 3]}
        driver.now += 10_000_000
        assert pairs(driver.receive()) == [], "not a topic of the group's any more"
        driver.trim(0, 2)
        assert driver.account() == {"acked": [0], "expired": [1], "retrying": [2, 3]}
        driver.alter(topics=("t",))
        assert pairs(driver.receive()) == [(0, 2, 2), (0, 3, 2)]

    @pytest.mark.parametrize("change", [{"ordered": True}, {"in_doubt": "hold"}])
    def test_order_and_what_is_in_doubt_change_while_nothing_is_leased(self, change):
        driver = one_queue(2)
        driver.subscribe("g")
        lease = int(driver.receive().leases[0])
        with refused(Code.CONFLICT):
            driver.alter(**change)
        driver.nack(lease, 0, 2, delay=0)
        driver.alter(**change)
        if change.get("ordered"):
            assert pairs(driver.receive()) == [(0, 0, 2), (0, 1, 2)]
        else:
            epoch = driver.join("one")["epoch"]
            assert pairs(driver.receive(member=member_id("g", "one"), epoch=epoch)) == [(0, 0, 2), (0, 1, 2)]

    def test_redelivery_is_one_thing(self):
        driver = one_queue(1)
        driver.subscribe("g", max_attempts=2)
        assert driver.alter(retry_delays_us=(MINUTES,)).max_attempts is None
        assert driver.alter(max_attempts=7).retry_delays_us == (MINUTES,)
        assert driver.alter(retry_backoff_us=5).retry_delays_us == ()
        altered = driver.alter(default_redelivery=True)
        assert (altered.max_attempts, altered.retry_backoff_us) == (None, None)
        assert driver.alter(default_redelivery=True) == altered
        assert driver.events == []
        with refused(Code.BAD_REQUEST):
            driver.alter(retry_delays_us=(1,), retry_backoff_us=1)
        with refused(Code.UNKNOWN_TOPIC):
            driver.alter(topics=("nowhere",))
        with refused(Code.UNKNOWN_GROUP):
            driver.alter(group="nobody", tags=())

    def test_fewer_attempts_count_for_what_fails_from_now_on(self):
        driver = one_queue(1)
        driver.subscribe("g")
        for _ in range(3):
            driver.receive()
            driver.nack(driver.position - 1, 0, delay=0)
        driver.alter(max_attempts=2)
        assert pairs(driver.receive()) == [(0, 0, 4)]
        driver.nack(driver.position - 1, 0)
        assert driver.account() == {"dead": [0]}

    def test_the_members_of_before_are_told_what_differs(self):
        driver = one_queue()
        driver.subscribe("g", tags=("a",))
        driver.alter(tags=("b",))
        with pytest.raises(EscrowError, match="the tags b, not a"):
            driver.subscribe("g", tags=("a",))
        assert not driver.subscribe("g", tags=("b",))["created"]


@pytest.mark.invariant("I25")
class TestUnreached:
    """A dead letter is never made of what nobody was handed (members.py)."""

    def crash(self, driver: Driver, poison: int) -> list[int]:
        """A consumer that takes messages one by one, with two answers fetched ahead, dies at one of them. What it
        acknowledged."""
        handed, member = [], driver.position
        for _ in range(3):
            leased = driver.receive(most=4, lease=100, member=member, one_by_one=True)
            handed += list(zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True))
            driver.now += 1
        done = [offset for _, offset in handed[: [offset for _, offset in handed].index(poison)]]
        for lease, offset in handed[: len(done)]:
            assert driver.ack(lease, offset) == Code.OK
        driver.now += 200
        driver.tick()
        driver.now += 1_000
        return done

    def test_a_message_that_kills_its_consumer_dies_alone(self):
        driver = one_queue(20, max_attempts=3)
        driver.subscribe("g")
        for _ in range(3):
            self.crash(driver, 0)
        assert driver.account()["dead"] == [0]
        leased = driver.receive(most=100)
        assert sorted(leased.offsets.tolist()) == list(range(1, 20)), "all others are delivered to whoever comes"

    def test_a_neighbour_at_its_last_attempt_that_was_not_come_to_is_given_back(self):
        driver = one_queue(2, max_attempts=2)
        driver.subscribe("g")
        driver.nack(int(driver.receive().leases[0]), 0, 2, delay=0)
        first = driver.receive(one_by_one=True, lease=100)
        driver.now += 1
        second = driver.receive(one_by_one=True, lease=100)
        assert (pairs(first), pairs(second)) == ([(0, 0, 2)], [(0, 1, 2)])
        driver.now += 99
        driver.tick()
        assert driver.account() == {"dead": [0], "retrying": [1]}
        driver.reopen()
        assert pairs(driver.receive(one_by_one=True, lease=100)) == [(0, 1, 2)], "the attempt did not count"
        driver.now += 100
        driver.tick()
        assert driver.account() == {"dead": [0, 1]}, "now it was the first"

    def test_the_earlier_of_two_leases_decides_also_when_it_ends_later(self):
        driver = one_queue(2, max_attempts=1)
        driver.subscribe("g")
        driver.receive(most=1, lease=1_000)
        driver.receive(most=1, lease=10)
        driver.now += 10
        driver.tick()
        assert driver.account() == {"leased": [0], "retrying": [1]}

    def test_what_was_handed_out_together_dies_together(self):
        driver = Driver(FakeTopics(t=3), max_attempts=1)
        for queue_id in range(3):
            driver.put(queue_id, None, None)
        driver.subscribe("g")
        driver.receive(lease=10)
        driver.now += 10
        driver.tick()
        assert [driver.account(queue_id) for queue_id in range(3)] == [{"dead": [0, 1]}] * 3

    def test_what_was_begun_was_come_to(self):
        driver = one_queue(3, max_attempts=1)
        driver.subscribe("g")
        driver.receive(most=1, lease=10)
        driver.now += 1
        second = int(driver.receive(most=2, lease=10).leases[0])
        driver.ack(second, 1)
        driver.now += 10
        driver.tick()
        assert driver.account() == {"dead": [0, 2], "acked": [1]}

    def test_another_member_is_another_matter(self):
        driver = one_queue(2, max_attempts=1)
        driver.subscribe("g")
        driver.receive(most=1, lease=1_000, member=1)
        driver.receive(most=1, lease=10, member=2)
        driver.now += 10
        driver.tick()
        assert driver.account() == {"leased": [0], "dead": [1]}

    def test_in_order_the_last_attempt_is_the_only_lease_of_its_answer(self):
        driver = Driver(FakeTopics(t=2), max_attempts=2, retry_backoff_us=0)
        for queue_id in range(2):
            driver.put_keys(queue_id, "ab")
        driver.subscribe("g", ordered=True)
        for lease in sorted(set(driver.receive().leases.tolist())):
            driver.nack(lease, 0)
            driver.ack(lease, 1)
        leased = driver.receive(one_by_one=True, lease=100)
        assert len(set(leased.queue_ids.tolist())) == 1
