"""Topics that are altered, cut and deleted: what stays, what goes, and that a name made again is another topic."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.commands import (
    AlterGroup,
    AlterTopic,
    CreateTopic,
    Cut,
    DeleteTopic,
    Receive,
    Retain,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
    TopicRules,
)
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.queues import topics as topics_module
from escrowmq.ledger.queues.queues import ROW_BYTES
from escrowmq.model import COMMIT, ROLLBACK, Act, TransactionState
from escrowmq.schemas import SETTLING, Kind
from escrowmq.testing.ledgers import LedgerDriver, tables_equal

SECOND = 1_000_000
DAY = 86_400 * SECOND


def refused(act) -> EscrowError:
    with pytest.raises(EscrowError) as caught:
        act()
    return caught.value


def made(driver: LedgerDriver, name: str = "t", queues: int = 1) -> None:
    driver.do(CreateTopic(name, queues))


def alter(driver: LedgerDriver, name: str = "t", *, reset=(), queues=None, **rules) -> dict:
    return driver.do(AlterTopic(name, queues, TopicRules(**rules), reset))


def kept(driver: LedgerDriver, name: str = "t", queue: int = 0) -> tuple[int, int]:
    index = driver.ledger.queue(driver.ledger.queue_id(name, queue))
    return index.head, index.end


def subscribe(driver: LedgerDriver, group: str, *topics: str, **given) -> dict:
    return driver.do(Subscribe(group, Subscription(topics=topics, **given)))


def receive(driver: LedgerDriver, group: str, most: int = 100):
    return driver.do(Receive(group, 1, most, 60 * SECOND))


def settle(driver: LedgerDriver, group: str, lease: int, start: int, act: Act) -> int:
    row = {"lease": lease, "start": start, "count": 1, "act": int(act), "delay_us": -1, "cause": "no"}
    return driver.do(Settle(group, pa.RecordBatch.from_pylist([row], SETTLING))).column("code").to_pylist()[0]


def account(driver: LedgerDriver, group: str, queue_id: int) -> dict[str, list[int]]:
    found = driver.ledger.groups.account(group, queue_id, driver.ledger.topics)
    return {name: offsets.tolist() for name, offsets in found.items() if len(offsets)}


def same_after_replay_and_snapshot(driver: LedgerDriver) -> Ledger:
    """The two ways of equality; the ledger that was restored."""
    now = driver.ledger.snapshot()
    assert tables_equal(driver.replay().snapshot(), now)
    restored = Ledger.restore(driver.ledger.shard, now)
    assert tables_equal(restored.snapshot(), now)
    return restored


# Retention of a topic


def test_a_topic_keeps_messages_as_long_as_it_says(driver):
    made(driver)
    driver.send(*[{"topic": "t"}] * 3)
    driver.advance(10)
    driver.send(*[{"topic": "t"}] * 2)
    assert alter(driver, retention_us=10 * SECOND) == {
        "name": "t",
        "queues": 1,
        "rules": TopicRules(retention_us=10 * SECOND),
    }
    assert kept(driver) == (0, 5), "exactly as old as the retention stays"
    driver.now_us += 1
    assert driver.do(Cut(DAY)) == 1
    assert kept(driver) == (3, 5)
    assert driver.do(Cut(DAY)) == 0
    driver.advance(100)
    driver.do(Cut(DAY))
    assert kept(driver) == (5, 5)
    same_after_replay_and_snapshot(driver)


def test_the_bound_of_bytes_is_of_each_queue_and_keeps_what_came_last(driver):
    made(driver, queues=2)
    for _ in range(5):
        driver.advance(1)
        driver.send({"topic": "t", "queue": 0, "body": b"x" * 900})
    driver.send({"topic": "t", "queue": 1})
    alter(driver, retention_bytes=2 * (900 + ROW_BYTES))
    assert (kept(driver), kept(driver, queue=1)) == ((3, 5), (0, 1))
    driver.advance(1)
    driver.send(*[{"topic": "t", "queue": 0, "body": b"x" * 900}] * 9)
    driver.do(Cut(DAY))
    assert kept(driver) == (5, 14), "what came at one time goes as a whole"
    assert driver.ledger.queue(0).bytes_kept == 9 * (900 + ROW_BYTES)


def test_half_and_delayed_messages_count_when_they_become_visible(driver):
    made(driver)
    session = driver.session()
    [half] = driver.prepare(session, {"topic": "t", "body": b"x" * 400})
    driver.prepare(session, {"topic": "t", "body": b"y" * 400, "transaction": half["transaction"]})
    driver.send({"topic": "t", "body": b"z" * 400, "delay_us": 50 * SECOND})
    driver.advance(20)
    alter(driver, retention_us=10 * SECOND, retention_bytes=1)
    driver.end(session, (half["transaction"], COMMIT))
    driver.do(Cut(DAY))
    assert kept(driver) == (0, 2), "a message's time begins when it is visible"
    assert driver.ledger.queue(0).bytes_kept == 2 * (400 + ROW_BYTES)
    driver.advance(30)
    driver.tick()
    assert driver.ledger.queue(0).bytes_total == 3 * (400 + ROW_BYTES)
    driver.do(Cut(DAY))
    assert kept(driver) == (2, 3)
    same_after_replay_and_snapshot(driver)


def test_a_row_by_row_and_a_columnar_send_count_the_same(driver):
    made(driver)
    driver.send({"topic": "t", "body": b"abc", "message_id": "a"})
    one = driver.ledger.queue(0).bytes_total
    assert one == 3 + ROW_BYTES


@pytest.mark.invariant("I20")
def test_groups_are_told_what_they_lost(driver):
    made(driver)
    subscribe(driver, "g", "t")
    driver.send(*[{"topic": "t"}] * 6)
    leased = receive(driver, "g", 2)
    settle(driver, "g", int(leased.leases[0]), 0, Act.ACK)
    driver.advance(20)
    alter(driver, retention_us=10 * SECOND)
    assert account(driver, "g", 0) == {"acked": [0], "expired": [1, 2, 3, 4, 5]}
    assert settle(driver, "g", int(leased.leases[0]), 1, Act.ACK) == Code.LEASE_LOST
    [group] = listings_of(driver)
    assert (group["queues"][0]["expired"], group["queues"][0]["floor"], group["leases"]) == (5, 6, 0)
    same_after_replay_and_snapshot(driver)


def listings_of(driver):
    return driver.ledger.groups.describe(driver.ledger.topics, driver.ledger.rules)


def test_rules_go_back_to_the_brokers_and_nonsense_is_refused(driver):
    made(driver)
    alter(driver, retention_us=SECOND, retention_bytes=7)
    assert listings.topics_list(driver.ledger)[0]["retention_size"] == 7
    assert alter(driver, reset=["retention_bytes"])["rules"] == TopicRules(retention_us=SECOND)
    events = len(driver.events)
    alter(driver, retention_us=SECOND)
    assert len(driver.events) == events, "nothing new is no event"
    assert alter(driver, reset=["retention_us"], queues=3) == {"name": "t", "queues": 3, "rules": TopicRules()}
    for wrong in (
        lambda: alter(driver, retention_us=SECOND - 1),
        lambda: alter(driver, retention_us=1 << 62),
        lambda: alter(driver, retention_bytes=0),
        lambda: alter(driver, reset=["colour"]),
        lambda: alter(driver, reset=["retention_us"], retention_us=SECOND),
    ):
        assert refused(wrong).code == Code.BAD_REQUEST
    assert refused(lambda: alter(driver, queues=2)).code == Code.BAD_QUEUE
    assert refused(lambda: alter(driver, "nobody", queues=2)).code == Code.UNKNOWN_TOPIC


# The log and its topics


def retain(driver: LedgerDriver, seconds: float, early: int | None = None) -> int:
    end = driver.ledger.next_position
    return driver.do(Retain(driver.now_us - int(seconds * SECOND), 0 if early is not None else end, early or 0))


def test_the_log_may_go_before_the_brokers_retention_where_nothing_of_it_is_kept(driver):
    made(driver)
    made(driver, "long")
    driver.send(*[{"topic": "t"}] * 3)
    [kept_one] = driver.send({"topic": "long"})
    driver.send(*[{"topic": "t"}] * 3)
    end = driver.ledger.next_position
    driver.advance(20)
    assert retain(driver, 100, early=end) == 0, "every topic keeps what the log keeps"
    alter(driver, retention_us=10 * SECOND)
    assert retain(driver, 100, early=end) == kept_one["position"]
    assert driver.visible("long") == [kept_one["position"]]


def test_a_topic_that_keeps_longer_holds_the_log_but_not_the_other_topics(driver):
    made(driver, "long")
    made(driver, "short")
    [first] = driver.send({"topic": "long"})
    driver.send({"topic": "short"})
    alter(driver, "long", retention_us=1000 * SECOND)
    driver.advance(100)
    assert retain(driver, 50) == first["position"]
    driver.do(Cut(50 * SECOND))
    assert (kept(driver, "long"), kept(driver, "short")) == ((0, 1), (1, 1))
    driver.advance(1000)
    driver.do(Cut(50 * SECOND))
    assert retain(driver, 50) == driver.ledger.next_position - 1, "all but the event that says so"


def test_what_became_of_a_kept_message_stays_known(driver):
    """A transaction leaves as a whole, though one of its topics keeps less than the other."""
    made(driver, "short")
    made(driver, "long")
    session = driver.session()
    [half] = driver.prepare(session, {"topic": "short"})
    [other] = driver.prepare(session, {"topic": "long", "transaction": half["transaction"]})
    [lone] = driver.prepare(session, {"topic": "short"})
    [late] = driver.prepare(session, {"topic": "short"})
    driver.prepare(session, {"topic": "short", "transaction": late["transaction"]})
    driver.end(session, *[(t["transaction"], COMMIT) for t in (half, lone, late)])
    driver.advance(20)
    alter(driver, "short", retention_us=10 * SECOND)
    assert retain(driver, 100, early=driver.ledger.next_position) == half["position"]
    states = driver.ledger.half_states(np.array([half["position"], other["position"]]))[0].tolist()
    assert states == [TransactionState.COMMITTED] * 2
    assert driver.end(session, (half["transaction"], COMMIT)) == [Code.ALREADY_COMMITTED]
    alter(driver, "long", retention_us=10 * SECOND)
    assert retain(driver, 100, early=late["position"] + 1) == late["position"]
    same_after_replay_and_snapshot(driver)


def test_undecided_messages_hold_the_log_as_ever(driver):
    made(driver)
    session = driver.session()
    alter(driver, retention_us=SECOND)
    [half] = driver.prepare(session, {"topic": "t"})
    driver.advance(50)
    driver.do(Cut(DAY))
    assert retain(driver, 100, early=driver.ledger.next_position) == half["position"]
    driver.advance(51)
    assert retain(driver, 100, early=driver.ledger.next_position) > half["position"]
    assert driver.end(session, (half["transaction"], COMMIT)) == [Code.EXPIRED]


# Deleting


def delete(driver: LedgerDriver, name: str = "t", **given) -> dict:
    return driver.do(DeleteTopic(name, **given))


def test_an_unused_topic_is_deleted_with_its_messages(driver):
    made(driver, queues=2)
    driver.send(*[{"topic": "t", "queue": 1}] * 3)
    driver.send({"topic": "t", "delay_us": SECOND})
    answer = delete(driver)
    assert answer == {
        "name": "t",
        "deleted": True,
        "queues": 2,
        "messages": 3,
        "delayed": 1,
        "rolled_back": 0,
        "groups": [],
        "dead_letters": 0,
    }
    assert not driver.ledger.topics.has("t")
    assert refused(lambda: delete(driver)).code == Code.UNKNOWN_TOPIC
    assert driver.ledger.stats(driver.now_us)["delayed_waiting"] == 0
    driver.advance(2)
    driver.tick()
    same_after_replay_and_snapshot(driver)


def test_what_is_undecided_or_consumed_is_refused_and_forced(driver):
    made(driver)
    session = driver.session()
    [half] = driver.prepare(session, {"topic": "t"})
    [two] = driver.prepare(session, {"topic": "orders"})
    driver.prepare(session, {"topic": "t", "transaction": two["transaction"]})
    [other] = driver.prepare(session, {"topic": "orders"})
    subscribe(driver, "g", "t", "orders")
    subscribe(driver, "only", "t", max_attempts=1)
    driver.send(*[{"topic": "t"}] * 2)
    leased = receive(driver, "only")
    settle(driver, "only", int(leased.leases[0]), 0, Act.NACK)
    problem = refused(lambda: delete(driver))
    assert problem.code == Code.CONFLICT
    assert "2" in problem.message
    driver.end(session, (half["transaction"], ROLLBACK), (two["transaction"], ROLLBACK))
    problem = refused(lambda: delete(driver))
    assert "g, only" in problem.message
    [half] = driver.prepare(session, {"topic": "t"})
    would = delete(driver, force=True, check=True)
    assert driver.ledger.topics.has("t")
    answer = delete(driver, force=True)
    assert answer == {**would, "deleted": True}
    assert (answer["rolled_back"], answer["groups"], answer["dead_letters"]) == (1, ["g", "only"], 1)
    kinds = [kind for kind, *_ in driver.events[-2:]]
    assert kinds == [Kind.DECIDED, Kind.TOPIC_DELETED]
    assert driver.end(session, (half["transaction"], COMMIT)) == [Code.CONFLICT]
    assert driver.end(session, (other["transaction"], COMMIT)) == [Code.COMMITTED]
    groups = {group["name"]: group for group in listings_of(driver)}
    assert (groups["g"]["topics"], groups["only"]["topics"]) == (["orders"], [])
    assert (groups["only"]["leases"], groups["only"]["dead_letters"], groups["only"]["queues"]) == (0, 0, [])
    assert settle(driver, "only", int(leased.leases[0]), 1, Act.ACK) == Code.LEASE_LOST
    assert len(receive(driver, "only").offsets) == 0
    assert len(receive(driver, "g").offsets) == 1
    same_after_replay_and_snapshot(driver)


def test_many_undecided_transactions_are_rolled_back_in_steps(driver):
    made(driver)
    session = driver.session()
    driver.prepare(session, *[{"topic": "t"}] * 5)
    steps = [delete(driver, force=True, limit=2) for _ in range(3)]
    assert [(step["deleted"], step["rolled_back"]) for step in steps] == [(False, 2), (False, 2), (True, 1)]


@pytest.mark.invariant("I16")
def test_a_name_made_again_is_another_topic_whose_offsets_go_on(driver):
    made(driver, queues=2)
    driver.send(*[{"topic": "t", "queue": 0, "message_id": f"m{n}"} for n in range(3)])
    old_id = driver.ledger.queue_id("t", 0)
    delete(driver)
    made(driver, queues=1)
    assert driver.ledger.queue_id("t", 0) != old_id
    assert kept(driver) == (4, 4), "one offset is left out: a reader at the old end is told, too"
    [again] = driver.send({"topic": "t", "message_id": "m1"})
    assert again["offset"] == 4, "the same id in another topic is another message"
    restored = same_after_replay_and_snapshot(driver)
    driver.ledger = restored
    assert driver.send({"topic": "t", "message_id": "m1"})[0]["offset"] == 4
    alter(driver, queues=3)
    assert [kept(driver, queue=queue) for queue in range(3)] == [(4, 5), (1, 1), (0, 0)]
    delete(driver)
    made(driver, queues=3)
    assert [kept(driver, queue=queue) for queue in range(3)] == [(6, 6), (2, 2), (1, 1)]


def test_a_group_meets_queues_that_begin_late_where_they_begin(driver):
    made(driver, queues=2)
    driver.send({"topic": "t", "queue": 1})
    delete(driver)
    made(driver, queues=1)
    subscribe(driver, "g", "t")
    alter(driver, queues=2)
    driver.send({"topic": "t", "queue": 1})
    assert receive(driver, "g").offsets.tolist() == [2]
    id = driver.ledger.queue_id("t", 1)
    assert account(driver, "g", id) == {"skipped": [0, 1], "leased": [2]}
    same_after_replay_and_snapshot(driver)


def test_nobodys_use_makes_a_deleted_topic_again(driver):
    driver.send({"topic": "t"})
    delete(driver)
    assert [row["code"] for row in driver.send({"topic": "t"}, {"topic": "new"})] == [Code.UNKNOWN_TOPIC, Code.OK]
    assert driver.prepare(driver.session(), {"topic": "t"})[0]["code"] == Code.UNKNOWN_TOPIC
    assert refused(lambda: subscribe(driver, "g", "t", "other")).code == Code.UNKNOWN_TOPIC
    assert not driver.ledger.topics.has("other")
    made(driver)
    assert driver.send({"topic": "t"})[0]["code"] == Code.OK


def test_a_group_without_topics_takes_those_of_whoever_joins_it(driver):
    made(driver)
    subscribe(driver, "g", "t", tags=("red",))
    delete(driver, force=True)
    made(driver)
    driver.send({"topic": "t", "tag": "red"})
    assert refused(lambda: subscribe(driver, "g", "t")).code == Code.SUBSCRIPTION_MISMATCH
    assert subscribe(driver, "g", "t", tags=("red",))["created"] is False
    assert receive(driver, "g").offsets.tolist() == [1]
    same_after_replay_and_snapshot(driver)


def test_a_repeat_of_an_acknowledgement_of_a_deleted_topic(driver):
    """An ended lease of it is remembered no more: a snapshot could not say whose it was."""
    made(driver)
    subscribe(driver, "g", "t")
    driver.send({"topic": "t"})
    [lease] = receive(driver, "g").leases.tolist()
    assert settle(driver, "g", lease, 0, Act.ACK) == Code.OK
    delete(driver, force=True)
    assert settle(driver, "g", lease, 0, Act.ACK) == Code.LEASE_LOST
    same_after_replay_and_snapshot(driver)


def test_a_group_that_left_a_topic_is_asked_while_it_has_something_of_it(driver):
    made(driver)
    made(driver, "u")
    subscribe(driver, "g", "t", max_attempts=1)
    driver.send({"topic": "t"})
    [lease] = receive(driver, "g").leases.tolist()
    settle(driver, "g", lease, 0, Act.NACK)
    driver.do(AlterGroup(group="g", topics=("u",)))
    assert refused(lambda: delete(driver)).code == Code.CONFLICT
    driver.do(SettleDead("g", np.array([0]), np.array([0]), retry=False))
    assert delete(driver)["deleted"]
    same_after_replay_and_snapshot(driver)


def test_deleted_names_are_remembered_within_a_bound(driver, monkeypatch):
    monkeypatch.setattr(topics_module, "MAX_DELETED", 2)
    for number, name in enumerate("abc"):
        made(driver, name)
        driver.send(*[{"topic": name}] * (7 - number))
        delete(driver, name)
    restored = same_after_replay_and_snapshot(driver)
    assert list(restored.topics.deleted) == ["b", "c"]
    for name, head in (("a", 8), ("b", 7), ("c", 6), ("never", 8)):
        made(driver, name)
        assert kept(driver, name) == (head, head)
    assert driver.send({"topic": "auto"})[0]["offset"] == 8


def test_a_snapshot_of_format_3_is_read(driver):
    made(driver, queues=2)
    session = driver.session()
    [half] = driver.prepare(session, {"topic": "t", "body": b"x" * 50})
    driver.send({"topic": "t"}, {"topic": "t", "delay_us": 5 * SECOND})
    tables = driver.ledger.snapshot()
    del tables["topics_deleted"]
    tables["topics"] = tables["topics"].select(["name", "turn"])
    tables["queues"] = tables["queues"].select(["topic", "head", "entries", "times"])
    for name in ("queue_times", "transactions", "joined", "delays"):
        extra = {"bytes", "size"} & set(tables[name].column_names)
        tables[name] = tables[name].drop_columns(list(extra))
    restored = driver.ledger = Ledger.restore(driver.ledger.shard, tables)
    assert (restored.topics.made, restored.topics.deleted) == (1, {})
    driver.end(session, (half["transaction"], COMMIT))
    driver.send({"topic": "t", "queue": 0})
    assert restored.queue(0).bytes_total + restored.queue(1).bytes_total == 2 * ROW_BYTES, "what was there counts as 0"
    assert delete(driver)["deleted"]


# In any order


class Topics(RuleBasedStateMachine):
    """Topics that come, are cut, go and come again, beside plain lists."""

    @initialize()
    def begin(self) -> None:
        self.driver = LedgerDriver(strict=False)
        self.shadow = Ledger(self.driver.ledger.shard)
        self.applied = 0
        self.session = self.driver.session()
        self.open: list[tuple[bytes, str, int]] = []
        self.queues: dict[str, list[list[tuple[int, int, int, int]]]] = {}  # offset, position, time, bytes
        self.begins: dict[str, list[int]] = {}
        self.ends: dict[str, list[int]] = {}
        self.own: dict[str, tuple[int | None, int | None]] = {}
        self.used: set[tuple[str, int, int]] = set()
        self.groups: dict[str, set[str]] = {}

    names = st.sampled_from(["a", "b", "c"])

    @rule(name=names, queues=st.integers(1, 3))
    def create(self, name, queues) -> None:
        if len(self.queues.get(name, [])) > queues:
            assert refused(lambda: self.driver.do(CreateTopic(name, queues, True))).code == Code.BAD_QUEUE
            return
        self.driver.do(CreateTopic(name, queues, True))
        begins = self.begins.get(name, [])
        lists, ends = self.queues.setdefault(name, []), self.ends.setdefault(name, [])
        self.own.setdefault(name, (None, None))
        for queue in range(len(lists), queues):
            lists.append([])
            ends.append(begins[queue] if queue < len(begins) else 0)

    def place(self, name, queue, position, body) -> None:
        offset = self.ends[name][queue]
        self.ends[name][queue] += 1
        assert (name, queue, offset) not in self.used, "no offset of a name names two messages (I16)"
        self.used.add((name, queue, offset))
        self.queues[name][queue].append((offset, position, self.driver.now_us, body + ROW_BYTES))

    @rule(name=names, queue=st.integers(0, 2), size=st.sampled_from([0, 50, 200]), half=st.booleans())
    def send(self, name, queue, size, half) -> None:
        row = {"topic": name, "queue": queue, "body": b"x" * size}
        [answer] = self.driver.prepare(self.session, row) if half else self.driver.send(row)
        if name not in self.queues:
            if name in self.begins:
                assert answer["code"] == Code.UNKNOWN_TOPIC
            elif answer["code"] == Code.OK:  # made by its use
                self.queues[name], self.ends[name], self.own[name] = [[] for _ in range(4)], [0] * 4, (None, None)
        elif queue >= len(self.queues[name]):
            assert answer["code"] == Code.BAD_QUEUE
        if answer["code"] != Code.OK:
            return
        if half:
            self.open.append((answer["transaction"], name, queue, answer["position"], size))
        else:
            assert answer["offset"] == self.ends[name][queue]
            self.place(name, queue, answer["position"], size)

    @rule(number=st.integers(0, 5), outcome=st.sampled_from([COMMIT, COMMIT, ROLLBACK]))
    def end(self, number, outcome) -> None:
        if self.open:
            raw, name, queue, position, size = self.open.pop(number % len(self.open))
            assert self.driver.end(self.session, (raw, outcome))[0] in (Code.COMMITTED, Code.ROLLED_BACK)
            if outcome == COMMIT:
                self.place(name, queue, position, size)

    @rule(seconds=st.sampled_from([1, 5, 20]))
    def wait(self, seconds) -> None:
        self.driver.advance(seconds)

    @rule(name=names, seconds=st.sampled_from([None, 3, 30]), size=st.sampled_from([None, 1, 400]))
    def alter(self, name, seconds, size) -> None:
        if name not in self.queues:
            return
        rules = TopicRules(retention_us=seconds and seconds * SECOND, retention_bytes=size)
        reset = [field for field in ("retention_us", "retention_bytes") if getattr(rules, field) is None]
        self.driver.do(AlterTopic(name, None, rules, reset))
        self.own[name] = (rules.retention_us, size)
        self.cut_one(name, None)

    @rule(seconds=st.sampled_from([10, 100]))
    def cut(self, seconds) -> None:
        self.driver.do(Cut(seconds * SECOND))
        longer = any((own[0] or 0) > seconds * SECOND for own in self.own.values())
        for name, own in self.own.items():
            if longer or own != (None, None):
                self.cut_one(name, seconds * SECOND)

    def cut_one(self, name, broker) -> None:
        age, size = self.own[name]
        age = broker if age is None else age
        for queue, listed in enumerate(self.queues[name]):
            left = [one for one in listed if age is None or one[2] >= self.driver.now_us - age]
            if size is not None and left:
                whole = [one for one in listed if one[2] in {other[2] for other in left}]
                while len({one[2] for one in whole}) > 1 and sum(one[3] for one in whole) > size:
                    whole = [one for one in whole if one[2] != whole[0][2]]
                left = [one for one in left if one in whole]
            self.queues[name][queue] = left

    @rule(name=names, force=st.booleans())
    def delete(self, name, force) -> None:
        if name not in self.queues:
            assert refused(lambda: self.driver.do(DeleteTopic(name, force))).code == Code.UNKNOWN_TOPIC
            return
        undecided = [one for one in self.open if one[1] == name]
        consumed = sorted(group for group, topics in self.groups.items() if name in topics)
        if not force and (undecided or consumed):
            assert refused(lambda: self.driver.do(DeleteTopic(name, force))).code == Code.CONFLICT
            return
        answer = self.driver.do(DeleteTopic(name, force))
        assert (answer["rolled_back"], sorted(answer["groups"])) == (len(undecided), consumed)
        assert answer["messages"] == sum(map(len, self.queues.pop(name)))
        self.open = [one for one in self.open if one[1] != name]
        before = self.begins.get(name, [])
        begins = [end + 1 for end in self.ends.pop(name)]
        self.begins[name] = begins + before[len(begins) :]
        del self.own[name]
        for topics in self.groups.values():
            topics.discard(name)

    @rule(group=st.sampled_from(["g", "h"]), most=st.integers(1, 4), ack=st.booleans())
    def consume(self, group, most, ack) -> None:
        if not self.groups.get(group):
            if not self.queues:
                return
            subscribe(self.driver, group, *sorted(self.queues))
            self.groups[group] = set(self.queues)
        leased = receive(self.driver, group, most)
        alive = {
            (self.driver.ledger.queue_id(n, q), m[0])
            for n, qs in self.queues.items()
            for q in range(len(qs))
            for m in qs[q]
        }
        for lease, queue_id, offset in zip(
            *(c.tolist() for c in (leased.leases, leased.queue_ids, leased.offsets)), strict=True
        ):
            assert (queue_id, offset) in alive, "only what is kept is delivered"
            if ack:
                assert settle(self.driver, group, lease, offset, Act.ACK) == Code.OK

    @rule()
    def restart(self) -> None:
        snapshot = self.driver.ledger.snapshot()
        self.driver.ledger = Ledger.restore(self.driver.ledger.shard, snapshot)
        assert tables_equal(self.driver.ledger.snapshot(), snapshot)

    @invariant()
    def the_fold_of_the_log_is_the_state(self) -> None:
        for event in self.driver.events[self.applied :]:
            self.shadow.apply(*event)
        self.applied = len(self.driver.events)
        assert tables_equal(self.shadow.snapshot(), self.driver.ledger.snapshot())

    @invariant()
    def queues_hold_what_is_kept(self) -> None:
        ledger = self.driver.ledger
        assert set(ledger.topics.by_name) == set(self.queues)
        for name, lists in self.queues.items():
            for queue, listed in enumerate(lists):
                index = ledger.queue(ledger.queue_id(name, queue))
                assert index.end == self.ends[name][queue]
                assert index.positions(index.head, index.end).tolist() == [one[1] for one in listed]

    @invariant()
    def every_offset_has_one_state_in_each_group(self) -> None:
        """I26, also of queues that begin late."""
        ledger = self.driver.ledger
        for group, topics in self.groups.items():
            for queue_id in (id for name in topics for id in ledger.topics.queue_ids(name)):
                states = ledger.groups.account(group, queue_id, ledger.topics)
                together = np.sort(np.concatenate([states[name] for name in states]))
                assert together.tolist() == list(range(ledger.queue(queue_id).end))


TestTopics = pytest.mark.invariant("I16")(Topics.TestCase)
TestTopics.settings = settings(
    max_examples=settings.default.max_examples if settings.default.max_examples > 1000 else 25, stateful_step_count=30
)
