"""Delayed messages (I21): never early by the broker's clock, whatever they are, through replay and snapshots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Tick
from escrowmq.ledger.ledger import Ledger
from escrowmq.model import COMMIT, ROLLBACK
from escrowmq.testing.ledgers import LedgerDriver, wake_us

SECOND = 1_000_000


@pytest.mark.invariant("I21")
def test_i21_not_before_its_time_and_then_at_the_next_tick(driver):
    [r] = driver.send({"delay_us": 5 * SECOND})
    assert r["offset"] == -1
    driver.now_us += 5 * SECOND - 1
    driver.tick()
    assert driver.visible() == []
    assert wake_us(driver.ledger, driver.now_us) == driver.now_us + 1
    driver.now_us += 1
    driver.tick()
    assert driver.visible() == [r["position"]]
    assert wake_us(driver.ledger, driver.now_us) == NEVER_US


def test_a_microsecond_is_a_delay_too(driver):
    driver.send({"delay_us": 1})
    driver.tick()
    assert driver.visible() == []


def test_equal_times_keep_their_order_and_differing_ones_come_by_time(driver):
    answers = driver.send(*({"delay_us": delay, "queue": 0} for delay in (5, 3, 5, 1, 3)))
    driver.now_us += 10
    driver.tick()
    by_time = [answers[n]["position"] for n in (3, 1, 4, 0, 2)]
    assert driver.queue() == by_time


@pytest.mark.invariant("I21")
def test_delay_and_transaction_commit_first(driver):
    session = driver.session()
    [r] = driver.prepare(session, {"delay_us": 60 * SECOND})
    driver.advance(1)
    driver.end(session, (r["transaction"], COMMIT))
    assert driver.visible() == []
    driver.now_us += 59 * SECOND - 1
    driver.tick()
    assert driver.visible() == []
    driver.now_us += 1
    driver.tick()
    assert driver.visible() == [r["position"]]


def test_delay_and_transaction_time_first(driver):
    session = driver.session()
    [r] = driver.prepare(session, {"delay_us": 2 * SECOND})
    driver.advance(3)
    driver.tick()
    assert driver.visible() == []
    driver.end(session, (r["transaction"], COMMIT))
    assert driver.visible() == [r["position"]]


def test_delay_and_rollback(driver):
    session = driver.session()
    [r] = driver.prepare(session, {"delay_us": 2 * SECOND})
    driver.end(session, (r["transaction"], ROLLBACK))
    driver.advance(10)
    driver.tick()
    assert driver.visible() == []
    assert wake_us(driver.ledger, driver.now_us) == NEVER_US


def test_a_transaction_of_messages_with_different_delays(driver):
    session = driver.session()
    [begun] = driver.prepare(session, {"queue": 0})
    rows = [{"transaction": begun["transaction"], "queue": 0, "delay_us": d * SECOND} for d in (10, 0, 5)]
    joined = driver.prepare(session, *rows)
    driver.end(session, (begun["transaction"], COMMIT))
    expected = [begun["position"], joined[1]["position"]]
    assert driver.queue() == expected
    for pause, one in ((5, joined[2]), (5, joined[0])):
        driver.advance(pause)
        driver.tick()
        expected.append(one["position"])
        assert driver.queue() == expected


def test_a_tick_releases_at_most_its_limit(driver):
    answers = driver.send(*({"delay_us": 1, "queue": 0} for _ in range(5)))
    driver.advance(1)
    for size in (2, 4, 5):
        driver.do(Tick(limit=2))
        assert driver.queue() == [a["position"] for a in answers[:size]]


@pytest.mark.invariant("I18", "I21")
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=25), st.data())
def test_i21_against_a_list(steps, data):
    """Sends with delays between pauses; at each moment the queue holds what was due at a tick, in order of release."""
    driver = LedgerDriver(strict=False)
    waiting: list[tuple[int, int]] = []
    queue: list[int] = []
    for delay, pause in steps:
        [answer] = driver.send({"delay_us": delay, "queue": 0})
        if delay:
            waiting.append((driver.now_us + delay, answer["position"]))
        else:
            queue.append(answer["position"])
        driver.now_us += pause
        if data.draw(st.booleans(), "restart"):
            driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
        driver.tick()
        queue += [position for due, position in sorted(waiting) if due <= driver.now_us]
        waiting = [entry for entry in waiting if entry[0] > driver.now_us]
        assert driver.queue() == queue
        assert driver.ledger.delays.waiting == len(waiting)
        assert wake_us(driver.ledger, driver.now_us) == min((due for due, _ in waiting), default=NEVER_US)
