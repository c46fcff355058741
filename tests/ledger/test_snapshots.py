"""Snapshots and replay: what is restored is equal, and goes on equally (I28, I29)."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.ledger import listings
from escrowmq.ledger.commands import (
    Configure,
    Receive,
    Recheck,
    Retain,
    Rules,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.ledger import Ledger
from escrowmq.model import COMMIT, ROLLBACK, Act, TransactionId
from escrowmq.schemas import SETTLING
from escrowmq.testing.ledgers import LedgerDriver, ask_us, tables_equal, wake_us

SECOND = 1_000_000


def lived_in(driver: LedgerDriver) -> LedgerDriver:
    """A ledger with something of everything."""
    session = driver.session()
    driver.session("g", "other")
    driver.send({"tag": "a", "key": "1"}, {"delay_us": 50 * SECOND}, {"tag": "b", "topic": "points"})
    receipts = driver.prepare(session, *({"message_id": f"m{n}", "delay_us": n * SECOND} for n in range(6)))
    driver.prepare(session, {"transaction": receipts[0]["transaction"], "topic": "points"})
    driver.end(session, (receipts[0]["transaction"], COMMIT), (receipts[1]["transaction"], ROLLBACK))
    driver.end(session, (receipts[5]["transaction"], COMMIT))
    driver.advance(6)
    driver.ask(limit=2)
    driver.tick()
    driver.do(Recheck(pa.array([receipts[2]["transaction"]], pa.binary(16))))
    driver.do(Subscribe("cart", Subscription(topics=("orders", "points"), tags=("a", "b"))))
    driver.do(Subscribe("log", Subscription(topics=("orders",), ordered=True)))
    leased = driver.do(Receive("log", 1, 3, 60 * SECOND))
    lease, offset = int(leased.leases[0]), int(leased.offsets[0])
    row = {"lease": lease, "start": offset, "count": 1, "act": Act.ACK, "delay_us": 0, "cause": None}
    driver.do(Settle("log", pa.RecordBatch.from_pylist([row], schema=SETTLING)))
    driver.advance(100)
    driver.tick()
    return driver


def through_files(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """As a log stores them."""
    read = {}
    for name, table in tables.items():
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        read[name] = pa.ipc.open_stream(sink.getvalue()).read_all()
    return read


def test_restored_is_equal_also_through_files(driver):
    lived_in(driver)
    snapshot = driver.ledger.snapshot()
    for tables in (snapshot, through_files(snapshot)):
        restored = Ledger.restore(driver.ledger.shard, tables)
        assert tables_equal(restored.snapshot(), snapshot)
        assert restored.stats(driver.now_us) == driver.ledger.stats(driver.now_us)
        assert listings.transactions(restored) == listings.transactions(driver.ledger)
        assert listings.topics_list(restored) == listings.topics_list(driver.ledger)
        assert listings.producers_list(restored) == listings.producers_list(driver.ledger)
        assert wake_us(restored, driver.now_us) == wake_us(driver.ledger, driver.now_us)
        assert ask_us(restored, driver.now_us) == ask_us(driver.ledger, driver.now_us)
        assert restored.transactions.open == {g: n for g, n in driver.ledger.transactions.open.items() if n}
        assert restored.rules == driver.ledger.rules


def test_what_was_frozen_is_as_it_was_though_the_ledger_goes_on(driver):
    lived_in(driver)
    driver.do(Subscribe("once", Subscription(topics=("orders", "points"), max_attempts=1)))
    leased = driver.do(Receive("once", 1, 10, 60 * SECOND))
    rows = [
        {"lease": int(lease), "start": int(offset), "count": 1, "act": Act.NACK, "delay_us": 0,
        "cause": f"poison {offset}"}
        for lease, offset in zip(leased.leases.tolist(), leased.offsets.tolist(), strict=False)
    ]  # fmt: skip
    driver.do(Settle("once", pa.RecordBatch.from_pylist(rows, schema=SETTLING)))
    [group] = (g for g in driver.ledger.groups.groups.values() if g.name == "once")
    dead = [(id, int(offset)) for id, cursor in group.cursors.items() for offset in cursor.dead.offsets]
    assert dead
    frozen, then = driver.ledger.freeze(), driver.ledger.snapshot()
    assert then["groups_dead"].num_rows == len(dead)
    driver.do(SettleDead("once", *(np.array(column) for column in zip(*dead, strict=True)), retry=True))
    driver.send({}, {})
    assert not tables_equal(driver.ledger.snapshot(), then)
    assert tables_equal(frozen(), then)


@pytest.mark.invariant("I17", "I28")
def test_replay_is_equal(driver):
    lived_in(driver)
    assert tables_equal(driver.replay().snapshot(), driver.ledger.snapshot())


def test_an_empty_ledger_restores():
    empty = Ledger(3)
    assert tables_equal(Ledger.restore(3, through_files(empty.snapshot())).snapshot(), empty.snapshot())


def test_a_snapshot_does_not_change_with_its_ledger(driver):
    lived_in(driver)
    snapshot = driver.ledger.snapshot()
    copied = through_files(snapshot)
    lived_in(driver)
    driver.do(Retain(driver.now_us, driver.ledger.next_position))
    assert tables_equal(through_files(snapshot), copied)


@pytest.mark.invariant("I8", "I28")
def test_i28_every_prefix_of_the_log_restores_and_replays(driver):
    lived_in(driver)
    for cut in range(len(driver.events) + 1):
        whole, halved = Ledger(driver.ledger.shard), Ledger(driver.ledger.shard)
        for n, event in enumerate(driver.events):
            if n == cut:
                halved = Ledger.restore(driver.ledger.shard, halved.snapshot())
            whole.apply(*event)
            halved.apply(*event)
        assert tables_equal(whole.snapshot(), halved.snapshot())


@pytest.mark.invariant("I29")
def test_i29_what_is_derived_can_be_thrown_away_at_any_time(driver):
    """Counts and due times are in no snapshot: they come from the columns."""
    lived_in(driver)
    restored = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
    for name in ("open", "parked"):
        counted = {k: v for k, v in getattr(driver.ledger.transactions, name).items() if v}
        assert {k: v for k, v in getattr(restored.transactions, name).items() if v} == counted


@pytest.mark.invariant("I32")
def test_rules_of_another_version_are_read():
    """A name that is not known has no effect; a missing one has its default."""
    ledger = Ledger(1)
    ledger.apply(LedgerDriver(Rules(check_max=3)).events[0][0], _rules({"check_max": 4, "of_the_future": 1}), 0, 5)
    assert ledger.rules == Rules(check_max=4)
    tables = ledger.snapshot()
    state = json.loads(tables["ledger"]["state"][0].as_py())
    del state["rules"]["check_interval_us"]
    state["rules"]["of_the_future"] = True
    tables["ledger"] = pa.table({"state": [json.dumps(state)]})
    assert Ledger.restore(1, tables).rules == Rules(check_max=4)


def _rules(values: dict) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"rules": json.dumps(values)}])


def test_configure_with_the_same_rules_writes_nothing(driver):
    driver.do(Configure(Rules(check_max=3)))
    events = len(driver.events)
    driver.do(Configure(Rules(check_max=3)))
    assert len(driver.events) == events
    assert driver.replay().rules == Rules(check_max=3)


acts = st.lists(st.tuples(st.sampled_from("spjcrantwbx"), st.integers(0, 5)), max_size=30)


@pytest.mark.invariant("I28")
@given(before=acts, after=acts)
def test_restored_behaves_equally_afterwards(before, after):
    one = LedgerDriver(Rules(check_max=2, half_retention_us=300 * SECOND, default_queues=2), strict=False)
    one.session()
    one.session("p", "i", transactional=False)
    one.do(Subscribe("cart", Subscription(topics=("orders",))))
    for act in before:
        _do(one, *act)
    other = LedgerDriver(strict=False)
    other.ledger = Ledger.restore(one.ledger.shard, through_files(one.ledger.snapshot()))
    other.now_us, other.events = one.now_us, list(one.events)
    for act in after:
        assert _do(one, *act) == _do(other, *act)
        assert wake_us(one.ledger, one.now_us) == wake_us(other.ledger, other.now_us)
    assert tables_equal(one.ledger.snapshot(), other.ledger.snapshot())


def _do(driver: LedgerDriver, act: str, n: int):
    """One act, all of it given by its letter and number; the answer."""
    first = driver.ledger.transactions.rows["first"]
    raw = bytes(16)
    if len(first):
        epochs = driver.ledger.transactions.rows["epoch"]
        at = n % len(first)
        raw = bytes(TransactionId(driver.ledger.shard, int(epochs[at]), int(first[at])))
    match act:
        case "s":
            return driver.send({"message_id": f"s{n}", "key": str(n)}, session=2)
        case "p":
            return driver.prepare(1, {"message_id": f"p{n}"}, {"message_id": f"q{n}", "delay_us": n * SECOND})
        case "j":
            return driver.prepare(1, {"message_id": f"j{n}", "transaction": raw})
        case "c" | "r":
            return driver.end(1, (raw, COMMIT if act == "c" else ROLLBACK))
        case "a":
            return sorted(np.stack([*map(np.asarray, _fields(driver.ask()))]).T.tolist())
        case "n":
            driver.now_us += n * 7 * SECOND
        case "t":
            driver.tick()
        case "w":
            return driver.do(Retain(driver.now_us - n * 40 * SECOND, driver.ledger.next_position))
        case "b":
            return driver.do(Recheck(pa.array([raw], pa.binary(16)))).tolist()
        case "x":
            return [a.tolist() for a in _fields(driver.do(Receive("cart", n, n + 1, 10 * SECOND)))]
    return None


def _fields(value) -> list:
    return [getattr(value, name) for name in value.__slots__]
