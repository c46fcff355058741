"""Topics, producers and transactions as people see them; topics made and grown."""

import numpy as np
import pytest
from undecided_sums import undecided

from escrowmq.errors import Code, EscrowError
from escrowmq.ledger import listings
from escrowmq.ledger.commands import AlterProducers, CreateTopic, Park, ProducerRules, Rules
from escrowmq.ledger.queues.queues import ROW_BYTES
from escrowmq.model import COMMIT, ROLLBACK, DecidedBy, TransactionId
from escrowmq.testing.ledgers import LedgerDriver


def refused(act) -> Code:
    with pytest.raises(EscrowError) as caught:
        act()
    return caught.value.code


def test_topics_are_made_and_grown_never_shrunk(driver):
    assert driver.do(CreateTopic("a")) == {"name": "a", "queues": 4}
    assert driver.do(CreateTopic("b", 1)) == {"name": "b", "queues": 1}
    assert driver.do(CreateTopic("b", 3)) == {"name": "b", "queues": 3}
    assert driver.ledger.topics.queue_ids("b") == [4, 5, 6]
    assert refused(lambda: driver.do(CreateTopic("b", 2))) == Code.BAD_QUEUE
    assert refused(lambda: driver.do(CreateTopic("b", 3))) == Code.ALREADY_EXISTS
    assert refused(lambda: driver.do(CreateTopic("b"))) == Code.ALREADY_EXISTS
    assert driver.do(CreateTopic("b", may_exist=True)) == {"name": "b", "queues": 3}
    assert driver.do(CreateTopic("b", 3, may_exist=True)) == {"name": "b", "queues": 3}


@pytest.mark.invariant("I47")
@pytest.mark.parametrize("name", ["", "%half", ".", "a b", "x" * 128, "a/b", "ö", "a\n"])
def test_bad_topic_names(driver, name):
    assert refused(lambda: driver.do(CreateTopic(name))) == Code.BAD_TOPIC_NAME


@pytest.mark.parametrize("queues", [0, -1, 6])
def test_bad_numbers_of_queues(queues):
    driver = LedgerDriver(Rules(max_queues=5))
    assert refused(lambda: driver.do(CreateTopic("a", queues))) == Code.BAD_QUEUE
    assert driver.do(CreateTopic("a", 5))["queues"] == 5


def test_one_topic_too_many():
    driver = LedgerDriver(Rules(max_topics=1))
    driver.do(CreateTopic("a"))
    assert refused(lambda: driver.do(CreateTopic("b"))) == Code.TOO_MANY
    driver.do(CreateTopic("a", 5))


def test_queue_ids_by_number(driver):
    driver.do(CreateTopic("a", 2))
    assert driver.ledger.queue_id("a", 1) == 1
    assert refused(lambda: driver.ledger.queue_id("a", 2)) == Code.BAD_QUEUE
    assert refused(lambda: driver.ledger.queue_id("a", -1)) == Code.BAD_QUEUE
    assert refused(lambda: driver.ledger.queue_id("b", 0)) == Code.UNKNOWN_TOPIC


def test_topics_list(driver):
    driver.do(CreateTopic("a", 2))
    driver.send(*[{"topic": "a", "queue": 1}] * 3)
    queues = [
        {"queue": 0, "queue_id": 0, "head": 0, "end": 0, "bytes": 0},
        {"queue": 1, "queue_id": 1, "head": 0, "end": 3, "bytes": 3 * ROW_BYTES},
    ]
    assert listings.topics_list(driver.ledger) == [{"name": "a", "queues": queues}]


def test_transactions_by_state_group_and_age(driver):
    one, two = driver.session("one"), driver.session("two")
    a, b, c = driver.prepare(one, {}, {}, {})
    driver.advance(10)
    [d] = driver.prepare(two, {})
    driver.end(one, (a["transaction"], COMMIT), (b["transaction"], ROLLBACK), by=DecidedBy.CHECK)
    ledger = driver.ledger

    def found(**chosen) -> list[int]:
        return [row["position"] for row in listings.transactions(ledger, **chosen)]

    everything = [r["position"] for r in (a, b, c, d)]
    assert found() == everything
    assert found(limit=2) == everything[:2]
    assert found(after=everything[1]) == everything[2:]
    assert found(state="committed") == everything[:1]
    assert found(state="ROLLED_BACK") == everything[1:2]
    assert found(state="undecided") == found(state="open") == everything[2:]
    assert found(group="two") == everything[3:]
    assert found(before_us=driver.now_us) == everything[:3]
    assert found(before_us=driver.now_us, state="open") == everything[2:3]
    assert refused(lambda: listings.transactions(ledger, state="lost")) == Code.BAD_REQUEST
    assert refused(lambda: listings.transactions(ledger, group="nobody")) == Code.UNKNOWN_GROUP


def test_nothing_undecided_is_summed_up_as_nothing(driver):
    assert undecided(driver.ledger, None, -1, 10, 3, driver.now_us) == []


@pytest.mark.parametrize("span", [2, 65_536])
def test_undecided_ones_by_group_and_cause(driver, monkeypatch, span):
    monkeypatch.setattr(listings, "SPAN", span)
    one, two = driver.session("one"), driver.session("two")
    asked, out = driver.prepare(one, {}), driver.prepare(one, {}, {}, {})
    driver.do(AlterProducers("two", ProducerRules(check_max=1)))
    other, aged = driver.prepare(two, {}), driver.prepare(two, {})
    driver.advance(10)
    driver.ask("two", 1)
    driver.ask("one", 1)
    driver.do(Park(aged[0]["position"]))
    driver.advance(31)
    driver.tick()
    young = driver.prepare(one, {})
    ledger, now_us = driver.ledger, driver.now_us

    def told(group=None, after=-1, limit=10, samples=2):
        return undecided(ledger, group, after, limit, samples, now_us)

    def placed(rows):
        return [row["position"] for row in rows]

    summed = {
        (line["group"], cause["state"], cause["cause"]): (cause["count"], cause["checks"], placed(cause["samples"]))
        for line in told()
        for cause in line["causes"]
    }
    assert summed == {
        ("one", "open", "due"): (4, [0, 1], placed([*asked, out[0]])),
        ("one", "open", "not_due"): (1, [0, 0], placed(young)),
        ("two", "parked", "asked_out"): (1, [1, 1], placed(other)),
        ("two", "parked", "aged"): (1, [0, 0], placed(aged)),
    }
    (line,) = told("one", samples=0)
    due = next(cause for cause in line["causes"] if cause["cause"] == "due")
    assert due["oldest_us"] == due["newest_us"] < now_us
    first = told(limit=1)
    assert [one["group"] for one in first + told(after=first[0]["number"])] == ["one", "two"]
    found = [
        listings.transactions(ledger, cause=cause, now_us=now_us) for cause in ("due", "not_due", "asked_out", "aged")
    ]
    assert [placed(rows) for rows in found] == [placed(rows) for rows in ([*asked, *out], young, other, aged)]
    assert placed(listings.transactions(ledger, cause="due", now_us=now_us, limit=2)) == placed([*asked, out[0]])
    driver.ask("one", 10)
    (line,) = undecided(ledger, "one", -1, 1, 0, driver.now_us)
    assert {cause["cause"]: cause["count"] for cause in line["causes"]} == {"unanswered": 4, "not_due": 1}
    assert refused(lambda: told("nobody")) == Code.UNKNOWN_GROUP


def test_one_transaction_with_its_messages(driver):
    session = driver.session("g", "host-7")
    [r] = driver.prepare(session, {})
    [j] = driver.prepare(session, {"transaction": r["transaction"]})
    identity = TransactionId.from_bytes(r["transaction"])
    shown = listings.transaction(driver.ledger, identity)
    assert shown.pop("positions").tolist() == [r["position"], j["position"]]
    assert shown == {
        "id": str(identity),
        "position": r["position"],
        "group": "g",
        "instance": "host-7",
        "state": "open",
        "checks": 0,
        "messages": 2,
        "prepared_us": driver.now_us,
        "due_us": driver.now_us + 6_000_000,
    }
    driver.end(0, (r["transaction"], ROLLBACK), by=DecidedBy.OPERATOR)
    shown = listings.transaction(driver.ledger, identity)
    assert (shown["state"], shown["decided_by"]) == ("rolled_back", "operator")


def test_transactions_that_are_not_here(driver):
    session = driver.session()
    [r] = driver.prepare(session, {})
    right = TransactionId.from_bytes(r["transaction"])
    for wrong, code in (
        (TransactionId(right.shard + 1, right.epoch, right.position), Code.WRONG_SHARD),
        (TransactionId(right.shard, right.epoch + 1, right.position), Code.UNKNOWN_TRANSACTION),
        (TransactionId(right.shard, right.epoch, right.position + 1), Code.UNKNOWN_TRANSACTION),
    ):
        assert refused(lambda wrong=wrong: listings.transaction(driver.ledger, wrong)) == code


def test_messages_of_several_transactions(driver):
    session = driver.session()
    a, b = driver.prepare(session, {}, {})
    [ja] = driver.prepare(session, {"transaction": a["transaction"]})
    positions, index = listings.messages_of(driver.ledger, np.array([b["position"], a["position"]]))
    assert (positions.tolist(), index.tolist()) == ([b["position"], a["position"], ja["position"]], [0, 1, 1])


def test_stats_name_the_four_that_operators_miss():
    driver = LedgerDriver(Rules(check_max=1))
    session = driver.session()
    driver.prepare(session, {}, {})
    driver.advance(6)
    driver.prepare(session, {})
    driver.ask()
    driver.advance(30)
    stats = driver.ledger.stats(driver.now_us)
    assert (stats["open_half_messages"], stats["oldest_half_age_seconds"], stats["checks_asked_total"]) == (3, 36.0, 2)
    driver.tick()
    stats = driver.ledger.stats(driver.now_us)
    assert (stats["parked"], stats["parked_total"], stats["oldest_half_age_seconds"]) == (2, 2, 30.0)
