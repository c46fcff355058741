"""Batches of a numbered writer, on the embedded and the served broker."""

import pytest

import escrowmq as mq


def test_a_batch_counts_once_whoever_repeats_it(bus, t, g, drain):
    first, second = (bus.producer(g, instance=name, checker=lambda check: mq.UNKNOWN) for name in "ab")
    mine = [first.prepare(t, b"1").transaction_id, first.prepare(t, b"2").transaction_id]
    assert first.last_batch(g) is None
    assert first.commit_batch(g, 0, mine).status is mq.Code.COMMITTED
    theirs = [second.prepare(t, b"1").transaction_id, second.prepare(t, b"2").transaction_id]
    repeat = second.commit_batch(g, 0, theirs)
    assert (repeat.status, repeat.rolled_back) == (mq.Code.ALREADY_COMMITTED, 2)
    assert second.last_batch(g) == 0
    assert {op["state"] for op in bus.admin.transactions(group=g)} == {"committed", "rolled_back"}
    with bus.consumer(g, [t]) as consumer:
        assert sorted(m.body for m in drain(consumer, 2)) == [b"1", b"2"]


def test_a_batch_that_cannot_be_committed_changes_nothing(bus, t, g):
    producer = bus.producer(g, checker=lambda check: mq.UNKNOWN)
    # however slow the machine is: nobody asks about them
    good, bad = (producer.prepare(t, body, check_immunity=600).transaction_id for body in (b"1", b"2"))
    producer.rollback(bad)
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        producer.commit_batch(g, 0, [good, bad])
    assert producer.last_batch(g) is None
    assert producer.commit_batch(g, 0, [good]).status is mq.Code.COMMITTED
    shown = bus.admin.transaction(good)
    assert [event["event"] for event in shown["timeline"]] == ["prepared", "committed"]
