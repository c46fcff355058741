"""Delayed messages (I21): never early by the broker's clock, whatever they are, through replay and snapshots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import Code, Rejected
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Recall, Tick
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


def recall(driver, *positions, topic="orders"):
    return driver.do(Recall(topic, np.array(positions, np.int64)))


def test_a_recalled_message_never_becomes_visible(driver):
    first, second, third = driver.send(*({"delay_us": SECOND, "queue": 0} for _ in range(3)))
    assert recall(driver, second["position"]) == 1
    assert recall(driver, second["position"]) == 0
    assert driver.ledger.delays.waiting == 2
    driver.advance(1)
    driver.tick()
    assert driver.queue() == [first["position"], third["position"]]
    assert recall(driver, first["position"]) == 0
    assert wake_us(driver.ledger, driver.now_us) == NEVER_US


def test_a_message_is_recalled_in_its_own_topic_only(driver):
    [there] = driver.send({"topic": "elsewhere", "delay_us": SECOND})
    driver.send({})
    assert recall(driver, there["position"]) == 0
    with pytest.raises(Rejected, match="UNKNOWN_TOPIC"):
        recall(driver, there["position"], topic="nowhere")
    driver.advance(1)
    driver.tick()
    assert driver.visible("elsewhere") == [there["position"]]


def test_a_recalled_message_that_is_sent_again_is_a_repeat(driver):
    row = {"delay_us": SECOND, "message_id": b"m" * 16}
    [first] = driver.send(row)
    recall(driver, first["position"])
    [again] = driver.send(row)
    assert (again["code"], again["position"]) == (Code.OK, first["position"])
    driver.advance(2)
    driver.tick()
    assert driver.visible() == []


@given(st.lists(st.tuples(st.sampled_from(["send", "recall", "pause", "restart"]), st.integers(0, 5)), max_size=30))
def test_recalls_against_a_list(steps):
    """What was recalled in time is never visible, everything else at its time; also after a restart."""
    driver = LedgerDriver(strict=False)
    waiting: list[tuple[int, int]] = []
    queue: list[int] = []
    sent: list[int] = []
    for step, number in steps:
        if step == "send":
            [answer] = driver.send({"delay_us": number + 1, "queue": 0})
            waiting.append((driver.now_us + number + 1, answer["position"]))
            sent.append(answer["position"])
        elif step == "recall" and sent:
            position = sent[number % len(sent)]
            left = [one for one in waiting if one[1] != position]
            assert recall(driver, position) == len(waiting) - len(left)
            waiting = left
        elif step == "pause":
            driver.now_us += number
        else:
            driver.ledger = Ledger.restore(driver.ledger.shard, driver.ledger.snapshot())
        driver.tick()
        queue += [position for due, position in sorted(waiting) if due <= driver.now_us]
        waiting = [one for one in waiting if one[0] > driver.now_us]
        assert (driver.queue() if sent else []) == queue
        assert driver.ledger.delays.waiting == len(waiting)
