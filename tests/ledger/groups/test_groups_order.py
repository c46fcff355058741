"""Ordered groups, key by key: rule by rule, then under whatever nacks, expiries, kills and restarts Hypothesis thinks
of.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from groups_driver import Driver, FakeTopics, pairs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from escrowmq.errors import Code
from escrowmq.ledger.groups import order, settling
from escrowmq.ledger.groups.groups import Groups
from escrowmq.model import Act
from escrowmq.schemas import Kind

BACKOFF = 100


def keyed(keys: str, **options: Any) -> Driver:
    driver = Driver(FakeTopics(t=1), retry_backoff_us=BACKOFF, retry_backoff_max_us=1000)
    driver.subscribe("g", ordered=True, **options)
    driver.put_keys(0, keys)
    return driver


def lease_of(driver: Driver, most: int = 100) -> int:
    return int(driver.receive(most=most).leases[0])


def offsets(driver: Driver, most: int = 100) -> list[int]:
    return [offset for _, offset, _ in pairs(driver.receive(most=most))]


class TestRules:
    def test_a_nack_lets_only_the_later_ones_of_its_key_go(self):
        driver = keyed("abaab")
        lease = lease_of(driver)
        assert driver.nack(lease, 0) == Code.OK
        assert [driver.ack(lease, n) for n in range(1, 5)] == [Code.OK, Code.LEASE_LOST, Code.LEASE_LOST, Code.OK]
        assert driver.account() == {"acked": [1, 4], "retrying": [0, 2, 3]}

    @pytest.mark.invariant("I20")
    def test_other_keys_go_on_and_the_failed_key_waits_in_order(self):
        driver = keyed("aba")
        lease = lease_of(driver)
        driver.settle((lease, 0, 1, Act.NACK, -1, None), (lease, 1, 1, Act.ACK, -1, None))
        driver.put_keys(0, "babcab")
        again = driver.receive()
        assert pairs(again) == [(0, 3, 1), (0, 5, 1), (0, 6, 1), (0, 8, 1)], "b and c go on, told as first deliveries"
        assert [event.kind for event in driver.events] == [Kind.KEYED, Kind.LEASED]
        driver.now += BACKOFF
        assert pairs(driver.receive()) == [], "one lease a queue"
        driver.ack(int(again.leases[0]), 3, 6)
        failed = driver.receive()
        assert pairs(failed) == [(0, 0, 2), (0, 2, 2)]
        driver.ack(int(failed.leases[0]), 0, 3)
        assert pairs(driver.receive()) == [(0, 4, 1), (0, 7, 1)]

    def test_a_key_is_tried_alone_while_its_others_have_another_attempt_number(self):
        driver = keyed("aab")
        driver.nack(lease_of(driver, 2), 0, delay=0)
        lease = lease_of(driver)
        driver.nack(lease, 0)
        driver.now += 2 * BACKOFF
        taken = driver.receive()
        assert pairs(taken) == [(0, 2, 1)], "due for longer"
        driver.ack(int(taken.leases[0]), 2)
        assert pairs(driver.receive()) == [(0, 0, 3)]

    def test_keys_take_turns_though_one_is_given_back_without_a_delay(self):
        driver = keyed("ab" * 20, max_attempts=1000)
        seen = []
        for _ in range(12):
            leased = driver.receive(most=1)
            [(_, offset, _)] = pairs(leased)
            seen.append(offset)
            driver.now += 1
            if offset % 2:
                driver.ack(int(leased.leases[0]), offset)
            else:
                driver.nack(int(leased.leases[0]), offset, delay=0)
        others = [offset for offset in seen if offset % 2]
        assert others == list(range(1, 2 * len(others), 2))
        assert len(others) >= 6
        assert {offset for offset in seen if offset % 2 == 0} == {0}

    def test_a_dead_one_lets_its_key_go_on(self):
        driver = keyed("abaa", max_attempts=1)
        lease = lease_of(driver)
        driver.nack(lease, 0)
        assert driver.ack(lease, 1) == Code.OK
        assert driver.account() == {"acked": [1], "dead": [0], "retrying": [2, 3]}
        assert pairs(driver.receive()) == [(0, 2, 1), (0, 3, 1)]

    def test_a_dead_letter_that_a_person_retries_stands_in_its_keys_order_and_blocks_no_other(self):
        driver = keyed("abab", max_attempts=1)
        driver.nack(lease_of(driver, 1), 0)
        driver.settle_dead((0, 0), retry=True)
        driver.put_keys(0, "c")
        lease = driver.receive()
        assert pairs(lease) == [(0, n, 1) for n in range(5)], "it goes first, all the others may follow"
        driver.nack(int(lease.leases[0]), 1)
        driver.settle_dead((0, 1), retry=True)
        assert driver.account()["retrying"] == [1, 3]

    def test_an_expired_lease_charges_its_first_and_lets_the_others_go_each_with_its_key(self):
        driver = keyed("abaab")
        lease = lease_of(driver)
        driver.now += 1000
        driver.tick()
        assert driver.account() == {"retrying": [0, 1, 2, 3, 4]}
        others = driver.receive()
        assert pairs(others) == [(0, 1, 2), (0, 4, 2)], "a waits for its back-off"
        driver.ack(int(others.leases[0]), 1, 4)
        driver.now += BACKOFF
        assert pairs(driver.receive()) == [(0, 0, 2), (0, 2, 2), (0, 3, 2)]
        assert driver.ack(lease, 0) == Code.LEASE_LOST

    def test_what_was_released_unseen_keeps_its_place_and_its_attempt(self):
        driver = keyed("aba")
        lease = lease_of(driver)
        driver.settle((lease, 1, 2, Act.RELEASE, 0, None))
        driver.ack(lease, 0)
        assert pairs(driver.receive()) == [(0, 1, 1), (0, 2, 1)]

    def test_messages_whose_key_nobody_can_read_hold_up_the_whole_queue(self):
        driver = keyed("a?bb")
        lease = lease_of(driver, 3)
        driver.nack(lease, 1)
        assert driver.ack(lease, 2) == Code.LEASE_LOST
        assert driver.ack(lease, 0) == Code.OK
        assert pairs(driver.receive()) == []
        driver.now += BACKOFF
        assert pairs(driver.receive()) == [(0, 1, 2), (0, 2, 2)]

    def test_what_follows_an_unreadable_one_that_is_let_go_is_let_go_too(self):
        """It may be of the key that failed, and what follows it may be of its own."""
        driver = keyed("ab?b")
        lease = lease_of(driver)
        driver.nack(lease, 0)
        assert [driver.ack(lease, n) for n in (1, 2, 3)] == [Code.OK, Code.LEASE_LOST, Code.LEASE_LOST]

    def test_what_cannot_be_read_is_not_taken_up(self):
        driver = keyed("ab?b")
        driver.nack(lease_of(driver, 1), 0)
        taken = driver.receive()
        assert pairs(taken) == [(0, 1, 1)]
        driver.ack(int(taken.leases[0]), 1)
        assert pairs(driver.receive()) == []
        driver.now += BACKOFF
        failed = driver.receive()
        assert pairs(failed) == [(0, 0, 2)]
        driver.ack(int(failed.leases[0]), 0)
        assert pairs(driver.receive()) == [(0, 2, 1), (0, 3, 1)]

    def test_so_many_wait_behind_a_key_and_then_the_whole_queue_does(self, monkeypatch):
        monkeypatch.setattr(order, "MAX_BEHIND", 5)
        monkeypatch.setattr(order, "TAKE_UP", 2)
        driver = keyed("a" * 20 + "b")
        driver.nack(lease_of(driver, 1), 0)
        taken = 0
        while driver.groups.has_work("g", driver.topics, driver.now):
            assert pairs(driver.receive()) == []
            taken += 1
        assert taken == 2
        assert driver.account()["retrying"] == [0, 1, 2, 3, 4]
        driver.now += BACKOFF
        assert offsets(driver) == [0]

    def test_looking_costs_nothing_while_nothing_is_free(self, monkeypatch):
        """Many may wait behind a key, and every round looks."""
        driver = keyed("aaaa")
        driver.nack(lease_of(driver, 1), 0)
        assert offsets(driver) == []
        looks = []
        real = order.find_heads
        monkeypatch.setattr(order, "find_heads", lambda rows: looks.append(1) or real(rows))
        for _ in range(10):
            assert not driver.groups.has_work("g", driver.topics, driver.now)
            assert offsets(driver) == []
        assert len(looks) <= 1
        driver.now += BACKOFF
        assert driver.groups.has_work("g", driver.topics, driver.now)
        assert offsets(driver) == [0]

    def test_tags_pass_over_what_is_not_theirs(self):
        driver = Driver(FakeTopics(t=1), retry_backoff_us=BACKOFF)
        driver.subscribe("g", ordered=True, tags=("x",))
        driver.keys |= {driver.position + n: n % 2 for n in range(8)}
        driver.put(0, "x", "y", "x", "x", "y", "x", "y", "y")
        driver.nack(lease_of(driver, 1), 0)
        assert offsets(driver) == [3, 5]
        assert driver.account()["filtered"] == [1, 4]
        driver.reopen()
        assert driver.account() == {"filtered": [1, 4], "leased": [3, 5], "retrying": [0, 2], "waiting": [6, 7]}

    def test_retention_takes_what_waits_behind(self):
        driver = keyed("aaab")
        driver.nack(lease_of(driver, 1), 0)
        lease = lease_of(driver)
        driver.trim(0, 2)
        assert driver.account() == {"expired": [0, 1], "retrying": [2], "leased": [3]}
        driver.ack(lease, 3)
        assert offsets(driver) == [2]

    def test_frames_and_snapshots_without_keys_are_read_and_hold_up_the_whole_queue(self):
        driver = keyed("abab")
        driver.nack(lease_of(driver, 3), 0)
        old = Groups()
        for event, _, time_us in driver.log:
            if event.kind != Kind.KEYED:
                old.apply(event.kind, event.batch, time_us, driver.topics, driver.rules)
        tables = old.freeze()()
        tables["groups_retries"] = tables["groups_retries"].drop_columns(["key"])
        older = Groups()
        older.restore(tables)
        assert older.freeze()() == old.freeze()()
        driver.use(older)
        [lease] = older.leases.live
        driver.ack(lease, 1)
        assert offsets(driver) == [], "b@3 might be of the key of 0"
        driver.now += BACKOFF
        assert offsets(driver) == [0, 2]

    def test_a_member_that_holds_what_is_in_doubt_gets_it_key_by_key(self):
        driver = Driver(FakeTopics(t=1), retry_backoff_us=BACKOFF)
        driver.subscribe("g", ordered=True, in_doubt="hold")
        driver.put_keys(0, "aba")
        member = driver.join("one")
        lease = int(driver.receive(member=member["member"], epoch=member["epoch"]).leases[0])
        driver.nack(lease, 0)
        member = driver.join("one", process=2)
        again = driver.receive(member=member["member"], epoch=member["epoch"])
        assert pairs(again) == [(0, 1, 2)]
        driver.now += BACKOFF
        assert not pairs(driver.receive(member=member["member"], epoch=member["epoch"]))
        driver.ack(int(again.leases[0]), 1)
        assert [o for _, o, _ in pairs(driver.receive(member=member["member"], epoch=member["epoch"]))] == [0, 2]


# Whatever happens


class OrderMachine(RuleBasedStateMachine):
    """Processes that work through what they are handed in order, and pass over the later messages of a key that failed,
    as the client does. Each is killed at times, and its leases end. The effects of each key come in the order of its
    offsets."""

    consumers_pass_over = True

    @initialize(
        hold=st.booleans(),
        tags=st.sampled_from([(), (), ("x",)]),
        attempts=st.sampled_from([2, 3, 100]),
        readable=st.sampled_from([1.0, 1.0, 0.8]),
    )
    def begin(self, hold: bool, tags: tuple[str, ...], attempts: int, readable: float) -> None:
        self.readable = readable  # the share of messages whose key the broker can tell
        rules = {"retry_backoff_us": BACKOFF, "retry_backoff_max_us": 4 * BACKOFF, "max_attempts": attempts}
        self.driver = Driver(FakeTopics(t=2), **rules)
        self.hold, self.tags = hold, tags
        self.driver.subscribe("g", ordered=True, tags=tags, in_doubt="hold" if hold else "redeliver")
        self.key: list[list[str]] = [[], []]
        self.wanted: list[list[bool]] = [[], []]
        self.effects: list[set[int]] = [set(), set()]
        self.hands: list[list[tuple[int, int, int]]] = [
            []
        ]  # of each process: lease, queue, offset, in the order handed out
        self.member = self.driver.join("m") if hold else {"member": 7, "epoch": None}
        self.processes = 1

    @rule(queue=st.integers(0, 1), keys=st.text("abc", min_size=1, max_size=8), data=st.randoms(use_true_random=False))
    def produce(self, queue: int, keys: str, data: Any) -> None:
        tags = [data.choice("xxy") if self.tags else None for _ in keys]
        driver = self.driver
        readable = {driver.position + n: ord(key) for n, key in enumerate(keys) if data.random() < self.readable}
        driver.keys |= readable
        driver.put(queue, *tags)
        self.key[queue] += keys
        self.wanted[queue] += [not self.tags or tag in self.tags for tag in tags]

    @rule(most=st.integers(1, 9))
    def receive(self, most: int) -> None:
        leased = self.driver.receive(most=most, lease=1000, **self.member)
        hand = list(zip(leased.leases.tolist(), leased.queue_ids.tolist(), leased.offsets.tolist(), strict=True))
        for _, queue, offset in hand:
            key = self.key[queue][offset]
            behind = {o for o in self.open(queue, key) if o < offset}
            assert behind <= {o for _, q, o in hand if q == queue}, "delivered though an earlier one of its key waits"
        self.hands[-1] += hand

    def open(self, queue: int, key: str) -> list[int]:
        """Offsets of a key that are not done: neither acknowledged nor dead nor passed over."""
        account = self.driver.account(queue)
        return [
            offset
            for state in ("waiting", "leased", "retrying")
            for offset in account.get(state, [])
            if self.key[queue][offset] == key and self.wanted[queue][offset]
        ]

    @precondition(lambda self: self.hands[-1])
    @rule(
        act=st.sampled_from([Act.ACK, Act.ACK, Act.ACK, Act.NACK, Act.NACK, Act.RELEASE, Act.REJECT]),
        delay=st.sampled_from([-1, 0]),
    )
    def work(self, act: Act, delay: int) -> None:
        """The first message that this process was handed: its effect, or not."""
        hand = self.hands[-1]
        lease, queue, offset = hand.pop(0)
        key = self.key[queue][offset]
        [code] = self.driver.settle((lease, offset, 1, act, delay, None))
        if act == Act.ACK and code == Code.OK:
            before = [o for o in self.open(queue, key) if o < offset]
            assert not before, f"the effect of {key}@{offset} comes before that of {before}"
            self.effects[queue].add(offset)
        if act != Act.ACK or code != Code.OK:
            self.hands[-1] = [
                (x, q, o)
                for x, q, o in hand
                if not self.consumers_pass_over
                or not (x == lease and (self.key[q][o] == key or (code != Code.OK)) and o > offset)
            ]

    @rule(us=st.sampled_from([1, BACKOFF, 4 * BACKOFF, 1000]))
    def wait(self, us: int) -> None:
        self.driver.now += us
        self.driver.tick()

    @rule(resume=st.booleans())
    def kill(self, resume: bool) -> None:
        """The process is gone; another one takes over, or it comes back after a lost answer."""
        self.processes += 1
        if self.hold:
            keep = {lease: offset + 1 for lease, _, offset in self.hands[-1]} if resume else {}
            process = 1 if resume and self.processes == 2 else self.processes
            self.member = self.driver.join("m", process=process, keep=list(keep.items()))
            if keep:
                return
        self.hands.append([])

    @precondition(lambda self: self.hold)
    @rule()
    def fence(self) -> None:
        self.driver.fence("m")
        self.processes += 1
        self.member = self.driver.join("m", process=self.processes)
        self.hands.append([])

    @rule(queue=st.integers(0, 1), part=st.integers(0, 3))
    def trim(self, queue: int, part: int) -> None:
        index = self.driver.topics.queues[queue]
        self.driver.trim(queue, max(index.head, index.end * part // 4))

    @rule()
    def restart(self) -> None:
        """From a snapshot; and from the log alone, which must come to the same unless retention took part of it."""
        self.driver.reopen()

    @invariant()
    def a_process_that_is_gone_does_nothing(self) -> None:
        for hand in self.hands[:-1]:
            if self.hold and hand:
                lease, _, offset = hand.pop()
                assert self.driver.ack(lease, offset) != Code.OK

    def teardown(self) -> None:
        """In the end everything is done, in order."""
        if not hasattr(self, "driver"):
            return
        if self.hold:
            self.fence()
        self.hands.append([])
        for _ in range(2000):
            if not any(self.driver.account(q).keys() & {"waiting", "leased", "retrying"} for q in (0, 1)):
                return
            self.receive(9)
            while self.hands[-1]:
                self.work(Act.ACK, -1)
            self.driver.now += 1000
            self.driver.tick()
        raise AssertionError(f"it does not come to an end: {self.driver.account(0)}, {self.driver.account(1)}")


OrderMachine.TestCase.settings = settings(
    max_examples=max(settings.default.max_examples // 3, 20), deadline=None, suppress_health_check=list(HealthCheck)
)
TestEffectsOfAKeyComeInOrder = pytest.mark.invariant("I20")(OrderMachine.TestCase)


def walk(seed: int, machine: type[OrderMachine] = OrderMachine) -> None:
    """The same steps in a long run, weighted so that messages fail, wait and die: Hypothesis keeps its runs short."""
    rng, walker = Random(seed), machine()
    walker.begin(
        hold=seed % 3 == 2,
        tags=("x",) if seed % 4 == 3 else (),
        attempts=(2, 3, 100)[seed % 5 % 3],
        readable=1 - seed // 2 % 2 / 5,
    )
    acts = [Act.ACK] * 5 + [Act.NACK] * 2 + [Act.RELEASE]
    steps = {
        lambda: walker.produce(rng.randrange(2), "".join(rng.choices("abc", k=rng.randint(1, 8))), rng): 6,
        lambda: walker.receive(rng.randint(1, 9)): 20,
        lambda: walker.hands[-1] and walker.work(rng.choice(acts), rng.choice([-1, 0])): 60,
        lambda: walker.wait(rng.choice([1, BACKOFF, 4 * BACKOFF])): 10,
        lambda: walker.wait(1000): 2,
        lambda: walker.kill(rng.random() < 0.5): 1,
        lambda: walker.hold and walker.fence(): 0.5,
        lambda: walker.trim(rng.randrange(2), 1): 0.3,
        lambda: walker.restart(): 2,
    }
    for step in rng.choices(list(steps), weights=list(steps.values()), k=150):
        step()
        walker.a_process_that_is_gone_does_nothing()
    walker.teardown()


def walked(machine: type[OrderMachine] = OrderMachine) -> None:
    for seed in range(30):
        walk(seed, machine)


@pytest.mark.invariant("I20")
@pytest.mark.parametrize("seed", range(24))
def test_long_walks(seed: int) -> None:
    walk(seed)


def test_planted_the_later_ones_of_a_key_are_not_taken_up_but_delivered(monkeypatch):
    monkeypatch.setattr(order, "select_free", lambda rows, ready: ready)
    with pytest.raises(AssertionError):
        walked()


class Careless(OrderMachine):
    """A consumer that hands out what it has, whatever failed."""

    consumers_pass_over = False


@pytest.mark.parametrize("seed", range(8))
def test_the_acknowledgements_of_a_careless_consumer_are_refused(seed: int) -> None:
    walk(seed, Careless)


@pytest.mark.invariant("I20")
def test_planted_a_nack_lets_nothing_go(monkeypatch):
    monkeypatch.setattr(settling.Settling, "_release_later", lambda *_: None)
    with pytest.raises(AssertionError):
        walked(Careless)


def test_replay_gives_the_same_groups():
    driver = keyed("abcabcabc" * 5, max_attempts=3)
    generator = np.random.default_rng(7)
    for _ in range(60):
        leased = driver.receive(most=5, lease=300)
        for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True):
            act = generator.choice([Act.ACK, Act.ACK, Act.NACK])
            driver.settle((lease, offset, 1, Act(act), -1, None))
        driver.now += 150
        driver.tick()
    twin = Groups()
    for event, _, time_us in driver.log:
        twin.apply(event.kind, event.batch, time_us, driver.topics, driver.rules)
    assert twin.freeze()() == driver.groups.freeze()()
    assert {event.kind for event, _, _ in driver.log} >= {Kind.KEYED, Kind.RETRIED, Kind.DEAD}


def drained(driver: Driver, keys: str) -> list[int]:
    """The offsets that are acknowledged when everything that is left is consumed, in that order; of a broker that has
    just begun."""
    found: list[int] = []
    while driver.account().keys() & {"waiting", "leased", "retrying"}:
        driver.now += 10_000
        driver.tick()
        leased = driver.receive()
        for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True):
            behind = [o for o in open_offsets(driver, keys) if o < offset and keys[o] == keys[offset]]
            assert not behind, f"{offset} is handed out before {behind}"
            assert driver.ack(lease, offset) == Code.OK
            found.append(offset)
    return found


def open_offsets(driver: Driver, keys: str) -> list[int]:
    account = driver.account()
    held = [offset for state in ("waiting", "leased", "retrying") for offset in account.get(state, [])]
    return [offset for offset in held if offset < len(keys)]


@pytest.mark.invariant("I20")
def test_a_crash_between_any_two_frames_keeps_the_order_and_loses_nothing():
    """Each step of an ordered group writes up to three frames; a crash may leave any first part of the log."""
    keys = "abacabcabbca"
    driver = keyed(keys, max_attempts=3)
    generator = Random(3)
    for _ in range(8):
        leased = driver.receive(most=4, lease=300)
        for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=True):
            act = generator.choice([Act.ACK, Act.NACK, Act.NACK, Act.RELEASE])
            if generator.random() < 0.9:
                driver.settle((lease, offset, 1, act, -1, None))
        driver.now += 150
        driver.tick()
    kinds = [event.kind for event, _, _ in driver.log]
    assert (Kind.RETRIED, Kind.KEYED) in pairwise(kinds)
    assert (Kind.KEYED, Kind.LEASED) in pairwise(kinds)
    for count in range(1, len(driver.log) + 1):
        after = Driver(driver.topics, retry_backoff_us=BACKOFF, retry_backoff_max_us=1000, max_attempts=100)
        after.keys = driver.keys
        for event, position, time_us in driver.log[:count]:
            after.groups.apply(event.kind, event.batch, time_us, driver.topics, driver.rules)
            after.position, after.now = position + event.batch.num_rows, time_us
        if count % 2:
            after.reopen()
        done = {state: offsets for state, offsets in after.account().items() if state in ("acked", "dead")}
        found = drained(after, keys)
        finished = sorted(found + [offset for offsets in done.values() for offset in offsets])
        dead = after.account().get("dead", [])
        assert sorted({*finished, *dead}) == list(range(len(keys)))
        assert len(found) == len(set(found))
