"""Groups that hold what is in doubt: members by name, new processes, lost answers, fencing (systems row 4.9)."""

import pytest
from groups_driver import Driver, FakeTopics, pairs

from escrowmq.errors import Code, Fenced, Rejected
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Subscription
from escrowmq.ledger.groups import subscriptions
from escrowmq.model import Act, member_id


def held_group(messages: int = 6, **options) -> Driver:
    driver = Driver(FakeTopics(t=1), max_attempts=options.pop("max_attempts", 3), retry_backoff_us=10)
    driver.subscribe("g", "t", in_doubt="hold", **options)
    driver.put(0, *[None] * messages)
    return driver


def receive(driver: Driver, name: str, epoch: int, most: int = 100):
    return driver.receive(member=member_id("g", name), epoch=epoch, most=most)


def offsets(leased) -> list[tuple[int, int]]:
    return [(offset, attempt) for _, offset, attempt in pairs(leased)]


def test_no_time_ends_a_lease_and_nobody_else_gets_it():
    driver = held_group()
    a, b = driver.join("a")["epoch"], driver.join("b")["epoch"]
    got = receive(driver, "a", a, 4)
    assert driver.groups.wake_us == NEVER_US
    driver.now += 10**12
    driver.tick()
    driver.reopen()
    assert offsets(receive(driver, "b", b)) == [(4, 1), (5, 1)]
    assert driver.ack(int(got.leases[0]), 0, 4) == Code.OK, "slow is not lost"


@pytest.mark.invariant("I23")
def test_a_new_process_of_the_name_gets_it_again_and_the_old_one_can_settle_it_no_more():
    driver = held_group()
    old = driver.join("a", process=1)["epoch"]
    got = receive(driver, "a", old, 4)
    lease = int(got.leases[0])
    assert driver.ack(lease, 0, 1) == Code.OK
    new = driver.join("a", process=2)["epoch"]
    assert driver.ack(lease, 1, 1) == Code.LEASE_LOST
    assert driver.ack(lease, 0, 1) == Code.OK, "said again: it is done"
    with pytest.raises(Fenced):
        receive(driver, "a", old)
    with pytest.raises(Fenced):
        driver.join("a", process=1, resume=True)
    driver.reopen()
    again = receive(driver, "a", new, 2)
    assert offsets(again) == [(1, 2), (2, 2)]
    assert offsets(receive(driver, "a", new)) == [(3, 2), (4, 1), (5, 1)]
    assert driver.ack(lease, 3, 1) == Code.LEASE_LOST
    assert driver.ack(int(again.leases[0]), 1, 2) == Code.OK


@pytest.mark.invariant("I23")
def test_a_process_that_lost_an_answer_keeps_what_reached_it():
    driver = held_group()
    epoch = driver.join("a", process=1)["epoch"]
    reached, lost = receive(driver, "a", epoch, 3), receive(driver, "a", epoch, 2)
    keep = [(int(reached.leases[0]), 2), (12345, 7)]  # two of its three rows came
    epoch = driver.join("a", process=1, resume=True, keep=keep)["epoch"]
    assert driver.ack(int(reached.leases[0]), 0, 2) == Code.OK
    assert driver.ack(int(lost.leases[0]), 3, 2) == Code.LEASE_LOST
    assert offsets(receive(driver, "a", epoch)) == [(2, 2), (3, 2), (4, 2), (5, 1)]


@pytest.mark.invariant("I27")
def test_fencing_gives_back_and_shuts_out():
    driver = held_group()
    a, b = driver.join("a")["epoch"], driver.join("b")["epoch"]
    got = receive(driver, "a", a, 4)
    driver.ack(int(got.leases[0]), 0, 1)
    assert driver.fence("a") == {"member": member_id("g", "a"), "messages": 3}
    assert driver.ack(int(got.leases[0]), 1, 1) == Code.LEASE_LOST
    for epoch in (a, driver.groups.groups[0].members[member_id("g", "a")].epoch - 1):
        with pytest.raises(Fenced):
            receive(driver, "a", epoch)
    with pytest.raises(Fenced):
        driver.join("a", resume=True)
    driver.reopen()
    assert offsets(receive(driver, "b", b)) == [(1, 2), (2, 2), (3, 2), (4, 1), (5, 1)]
    assert driver.fence("a")["messages"] == 0, "again: nothing left to give back"
    assert offsets(receive(driver, "a", driver.join("a", process=9)["epoch"])) == [], "the name may come back"


@pytest.mark.invariant("I25")
def test_attempts_are_bounded_also_when_its_process_dies_each_time():
    driver = held_group(2, max_attempts=2)
    for process, expected in ((1, [(0, 1), (1, 1)]), (2, [(0, 2), (1, 2)]), (3, [])):
        assert offsets(receive(driver, "a", driver.join("a", process=process)["epoch"])) == expected
    causes = {letter["cause"] for letter in driver.groups.dead_letters("g", driver.topics)}
    assert causes == {"in doubt when its consumer came back, attempt 2 of 2"}


@pytest.mark.invariant("I20")
def test_in_order_nothing_overtakes_what_is_in_doubt():
    driver = held_group(4, ordered=True)
    a = driver.join("a", process=1)["epoch"]
    b = driver.join("b")["epoch"]
    receive(driver, "a", a, 3)
    assert offsets(receive(driver, "b", b)) == []
    a = driver.join("a", process=2)["epoch"]
    assert offsets(receive(driver, "b", b)) == []
    again = receive(driver, "a", a, 1)
    assert offsets(again) == [(0, 2), (1, 2), (2, 2)], "whole, or its rest could be overtaken"
    assert offsets(receive(driver, "a", a)) == []
    driver.ack(int(again.leases[0]), 0, 3)
    assert offsets(receive(driver, "b", b)) == [(3, 1)]


def test_members_and_what_they_hold_are_listed():
    driver = held_group()
    epoch = driver.join("a")["epoch"]
    driver.join("b")
    receive(driver, "a", epoch, 4)
    driver.join("a", process=2)
    one, other = driver.groups.members("g", driver.topics)
    assert (one["instance"], one["messages"], one["in_doubt"], one["fenced"]) == ("a", 4, 4, False)
    assert [(x["queue"], x["first"], x["last"], x["deadline_us"]) for x in one["held"]] == [(0, 0, 3, None)]
    assert (other["instance"], other["held"]) == ("b", [])
    driver.subscribe("plain", "t")
    driver.receive("plain", 2)
    [unnamed] = driver.groups.members("plain", driver.topics)
    assert (unnamed["instance"], unnamed["member"], unnamed["messages"]) == (None, 7, 2)


def test_what_is_refused():
    driver = held_group()
    driver.subscribe("plain", "t")
    for act, code in (
        (lambda: driver.receive(), Code.BAD_REQUEST),
        (lambda: driver.join("a", group="plain"), Code.BAD_REQUEST),
        (lambda: driver.join("", process=1), Code.BAD_REQUEST),
        (lambda: driver.join("a", group="none"), Code.UNKNOWN_GROUP),
        (lambda: driver.fence("a"), Code.NOT_FOUND),
        (lambda: driver.subscribe("g", "t"), Code.SUBSCRIPTION_MISMATCH),
        (lambda: driver.subscribe("other", "t", in_doubt="forget"), Code.BAD_REQUEST),
    ):
        with pytest.raises(Rejected) as caught:
            act()
        assert caught.value.code is code
    driver.rules = type(driver.rules)(max_leases=1)
    driver.join("a")
    with pytest.raises(Rejected) as caught:
        driver.join("b")
    assert caught.value.code is Code.TOO_MANY


def test_extending_is_needless_and_releasing_costs_no_attempt():
    driver = held_group(3)
    epoch = driver.join("a")["epoch"]
    got = receive(driver, "a", epoch)
    lease = int(got.leases[0])
    assert driver.extend(lease, 0, 5) == Code.OK
    assert driver.events == []
    assert driver.settle((lease, 1, 2, Act.RELEASE, 0, None)) == [Code.OK]
    assert driver.settle((lease, 1, 2, Act.RELEASE, 0, None)) == [Code.LEASE_LOST]
    assert offsets(receive(driver, "a", epoch)) == [(1, 1), (2, 1)], "nobody was handed them"


def test_subscriptions_without_the_option_are_stored_and_read_as_before():
    text = subscriptions.dump(Subscription(topics=("t",)))
    assert "in_doubt" not in text
    assert subscriptions.load(text).in_doubt == "redeliver"
    held = Subscription(topics=("t",), in_doubt="hold")
    assert subscriptions.load(subscriptions.dump(held)) == held


def test_snapshots_from_before_are_read():
    driver = Driver(FakeTopics(t=1))
    driver.subscribe("g", "t")
    driver.put(0, None, None)
    got = driver.receive()
    tables = driver.groups.freeze()()
    del tables["groups_members"]
    tables["groups_leases"] = tables["groups_leases"].drop_columns(["doubt"])
    fresh = type(driver.groups)()
    fresh.restore(tables)
    driver.groups = fresh
    assert driver.ack(int(got.leases[0]), 0, 2) == Code.OK
