"""Bugs that RocketMQ shipped in transactional messages, each as a test that it would fail here."""

from __future__ import annotations

import pytest
from bug_shard import BugShard

from escrowmq.errors import Code, EscrowError, error
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.ledger import Ledger
from escrowmq.ledger.listings import transactions
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, DecidedBy, TransactionId
from escrowmq.testing.disks import MODES, SimulatedCrash
from escrowmq.testing.ledgers import LedgerDriver

SECOND = 1_000_000


def one_half(driver: LedgerDriver, **row) -> tuple[int, bytes, int]:
    """A session, a transaction, its position."""
    session = driver.session()
    [answer] = driver.prepare(session, row)
    return session, answer["transaction"], answer["position"]


def test_the_same_commit_twice_put_the_message_in_the_topic_twice():
    driver = LedgerDriver()
    session, raw, position = one_half(driver)
    assert driver.end(session, (raw, COMMIT), (raw, COMMIT)) == [Code.COMMITTED, Code.ALREADY_COMMITTED]
    assert driver.end(session, (raw, COMMIT)) == [Code.ALREADY_COMMITTED]
    assert driver.end(session, (raw, COMMIT), by=DecidedBy.CHECK) == [Code.ALREADY_COMMITTED]
    assert driver.end(0, (raw, COMMIT), by=DecidedBy.OPERATOR) == [Code.ALREADY_COMMITTED]
    assert driver.visible() == [position]


def test_a_crash_between_append_final_and_note_done_put_it_there_twice():
    """There is one write: whatever prefix of the log a crash leaves, the repeated commit makes it exactly one
    message."""
    driver = LedgerDriver()
    session, raw, position = one_half(driver)
    driver.end(session, (raw, COMMIT))
    prepared = next(n for n, (_, _, first, _) in enumerate(driver.events) if first == position)
    for kept in range(prepared + 1, len(driver.events) + 1):
        again = LedgerDriver()
        again.ledger, again.events = Ledger(driver.ledger.shard), driver.events[:kept]
        again.ledger = again.replay()
        assert again.end(session, (raw, COMMIT)) in ([Code.COMMITTED], [Code.ALREADY_COMMITTED])
        assert again.visible() == [position]


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("mode", MODES)
def test_a_crash_in_the_middle_of_a_commit_put_it_there_twice(mode):
    """The power fails at each operation of the commit in turn, until it comes to its end."""
    for operation in range(1, 40):
        shard = BugShard()
        session = shard.session()
        [answer] = shard.prepare(session, {"body": b"once"})
        shard.disk.crash_at = shard.disk.operations + operation
        codes: list[Code] = []
        try:
            codes = shard.end(session, COMMIT, answer["transaction"])
            shard.pass_time(1)
        except (SimulatedCrash, EscrowError):
            pass
        again = shard.after_a_crash(shard.disk.survivors(mode, operation))
        repeated = again.end(session, COMMIT, answer["transaction"])
        assert (
            repeated == [Code.ALREADY_COMMITTED] if codes else repeated[0] in (Code.COMMITTED, Code.ALREADY_COMMITTED)
        )
        again.subscribe()
        assert again.consume() == [b"once"]
        assert again.consume() == []
        if codes:
            return
    raise AssertionError("the commit never came to its end")


@pytest.mark.invariant("I5")
def test_commit_after_rollback_still_delivered():
    driver = LedgerDriver()
    session, raw, _ = one_half(driver)
    driver.end(session, (raw, ROLLBACK))
    for by in (DecidedBy.PRODUCER, DecidedBy.CHECK):
        assert driver.end(session, (raw, COMMIT), by=by) == [Code.CONFLICT]
    assert driver.end(0, (raw, COMMIT), by=DecidedBy.OPERATOR) == [Code.CONFLICT]
    assert driver.visible() == []


def test_commit_after_discard_still_delivered():
    """Discarded for too many unanswered checks: here a decision like any other, if the operator wants it at all."""
    driver = LedgerDriver(Rules(check_max=1, exhausted_rollback=True))
    session, raw, _ = one_half(driver)
    driver.advance(6)
    driver.ask()
    driver.advance(30)
    driver.tick()
    assert driver.end(session, (raw, COMMIT)) == [Code.CONFLICT]
    assert driver.visible() == []


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_decided_transactions_were_asked_again_after_a_restart(from_snapshot):
    driver = LedgerDriver()
    session = driver.session()
    receipts = driver.prepare(session, *[{}] * 6)
    driver.end(session, *((r["transaction"], COMMIT) for r in receipts[:3]))
    driver.end(session, *((r["transaction"], ROLLBACK) for r in receipts[3:5]))
    driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot()) if from_snapshot else driver.replay()
    driver.advance(3600)
    assert driver.ask().transactions.tolist() == [receipts[5]["position"]]


def test_decided_transactions_were_asked_again_because_the_done_note_sat_in_memory():
    """The decision is in the log before it is answered, and nothing is asked that it names, from that moment on."""
    driver = LedgerDriver()
    session, raw, _ = one_half(driver)
    driver.advance(6)
    driver.end(session, (raw, COMMIT))
    assert driver.ask().transactions.tolist() == []
    shard = BugShard()
    session = shard.session()
    member = shard.engine.listeners.join("g", session)
    [answer] = shard.prepare(session, {})
    shard.pass_time(6)
    assert member.waiting == 1
    shard.end(session, COMMIT, answer["transaction"])
    assert list(member.batches_of(member.take())) == [], "asked already, decided before it left"


@pytest.mark.parametrize("immunity", [8 * 60, 3600])
def test_immunity_longer_than_seven_and_a_half_minutes_spent_all_checks_without_one_being_sent(immunity):
    driver = LedgerDriver(strict=False)
    _, _, position = one_half(driver, immunity_us=immunity * SECOND)
    for _ in range(immunity // 30 - 1):
        driver.advance(30)
        driver.tick()
        assert driver.ask().transactions.tolist() == []
    [row] = transactions(driver.ledger)
    assert (row["checks"], row["state"]) == (0, "open")
    driver.advance(30)
    asked = driver.ask()
    assert (asked.transactions.tolist(), asked.attempts.tolist()) == ([position], [1])


def test_checks_were_counted_when_nobody_was_connected():
    shard = BugShard()
    session = shard.session()
    shard.prepare(session, {})
    for _ in range(40):
        shard.pass_time(60)
    [row] = transactions(shard.engine.shard.ledger)
    assert (row["checks"], row["state"]) == (0, "open")


def test_one_exception_in_a_check_round_left_its_offsets_in_place_the_same_batch_for_ever(monkeypatch):
    shard = BugShard()
    session = shard.session()
    member = shard.engine.listeners.join("g", session)
    answers = shard.prepare(session, *({"body": bytes([n])} for n in range(5)))
    bad, read = answers[1]["position"], shard.engine.log.read

    def reading(positions):
        if bad in positions:
            raise error(Code.DAMAGED)
        return read(positions)

    monkeypatch.setattr(member, "_read", reading)
    for attempt in range(1, 4):
        shard.pass_time(30)
        got = [row for batch in member.batches_of(member.take()) for row in batch.to_pylist()]
        assert [row["body"][0] for row in got] == [0, 2, 3, 4]
        assert {row["attempt"] for row in got} == {attempt}, "the round goes on for the others"


def test_a_full_executor_rewrote_half_messages_until_the_disk_was_full():
    """A producer that never answers: its questions are written as numbers, at most check_max times, and then no
    more."""
    shard = BugShard(check_max=5, checks_in_flight=10)
    session = shard.session()
    shard.engine.listeners.join("g", session)
    shard.prepare(session, *[{"body": b"x" * 2000}] * 50)
    before = shard.engine.log.bytes_written
    for _ in range(300):
        shard.pass_time(30)
    asked = shard.engine.shard.ledger.counters["checks_asked_total"]
    assert asked <= 5 * 50
    assert shard.engine.log.bytes_written - before <= 64 * asked + 64 * 50 + 4096
    silent = shard.engine.log.bytes_written
    for _ in range(50):
        shard.pass_time(30)
    assert shard.engine.log.bytes_written == silent


@pytest.mark.parametrize("skew_us", [-10 * 86400 * SECOND, -7 * SECOND, 0, 3600 * SECOND])
def test_age_was_the_brokers_clock_minus_the_producers(skew_us):
    """A producer whose clock is off: checks neither early nor never."""
    driver = LedgerDriver()
    _, _, position = one_half(driver, born_us=driver.now_us + skew_us)
    driver.now_us += 6 * SECOND - 1
    assert driver.ask().transactions.tolist() == []
    driver.now_us += 1
    assert driver.ask().transactions.tolist() == [position]


def test_a_clients_resend_made_two_half_messages_with_one_id_and_both_were_committed():
    driver = LedgerDriver()
    session = driver.session()
    [first] = driver.prepare(session, {"message_id": "order-17"})
    [again] = driver.prepare(session, {"message_id": "order-17"})
    assert again == first
    codes = driver.end(session, (first["transaction"], COMMIT), (again["transaction"], COMMIT))
    assert codes == [Code.COMMITTED, Code.ALREADY_COMMITTED]
    assert driver.visible() == [first["position"]]


@pytest.mark.parametrize("commit_first", [False, True])
def test_delay_and_transaction_lost_or_looped_the_half_message(commit_first):
    driver = LedgerDriver()
    session, raw, position = one_half(driver, delay_us=5 * SECOND, immunity_us=60 * SECOND)
    acts = [lambda: driver.end(session, (raw, COMMIT)), lambda: driver.advance(5)]
    for act in acts if commit_first else acts[::-1]:
        assert driver.visible() == []
        act()
        driver.tick()
    assert driver.visible() == [position]
    for _ in range(10):
        driver.advance(60)
        driver.tick()
        assert driver.ask().transactions.tolist() == []
    assert driver.visible() == [position]
    assert driver.ledger.stats(driver.now_us)["delayed_waiting"] == 0


def test_the_end_was_one_way_and_its_refusal_unseen():
    """Every end has its own definite answer, the refused ones first of all."""
    driver = LedgerDriver()
    session, raw, position = one_half(driver)
    stranger = driver.session("other")
    wrong = bytes(TransactionId(driver.ledger.shard, session, position + 1))
    assert driver.end(stranger, (raw, COMMIT)) == [Code.WRONG_GROUP]
    answers = driver.end(session, (wrong, COMMIT), (raw, UNKNOWN), (raw, ROLLBACK), (raw, COMMIT))
    assert answers == [Code.UNKNOWN_TRANSACTION, Code.NOTED, Code.ROLLED_BACK, Code.CONFLICT]
