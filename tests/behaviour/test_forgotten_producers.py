"""Producers that the broker has forgotten go on by themselves, on the embedded and the served broker. By hand it is
quick.
"""

import pytest

import escrowmq as mq


def unknown(check):
    return mq.UNKNOWN


def test_it_goes_on_and_its_writer_begins_anew(bus, t, g, drain):
    producer = bus.producer(g, checker=unknown)
    assert producer.commit_batch(g, 4, [producer.prepare(t, b"1").transaction_id]).status is mq.Code.COMMITTED
    [line] = [writer for writer in bus.admin.writers() if writer["group"] == g]
    assert (line["batch"], line["open"], line["parked"]) == (4, 0, 0)
    assert line["used_us"] >= line["decided_us"]
    [told] = bus.admin.forget_writer(line["writer"])
    assert (told["group"], told["sessions"]) == (g, 1)
    assert g not in [writer["group"] for writer in bus.admin.writers()]
    with pytest.raises(mq.Rejected, match="NOT_FOUND"):
        bus.admin.forget_writer(g)

    with producer.transaction() as txn:
        txn.send(t, b"2")
    assert producer.commit_batch(g, 4, [producer.prepare(t, b"3").transaction_id]).status is mq.Code.COMMITTED
    bus.admin.forget_writer(g)
    assert producer.commit_batch(g, 0, []).status is mq.Code.COMMITTED, "the commit itself is what finds out"
    assert producer.last_batch(g) == 0
    consumer = bus.consumer(g, [t])
    assert sorted(m.body for m in drain(consumer, 3)) == [b"1", b"2", b"3"]


def test_not_while_anything_is_undecided(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    producer.commit_batch(g, 0, [])
    transaction = producer.prepare(t, b"1").transaction_id
    with pytest.raises(mq.Rejected, match="has 1 undecided") as refused:
        bus.admin.forget_writer(g)
    assert refused.value.code is mq.Code.CONFLICT
    assert producer.commit(transaction) is mq.Code.COMMITTED
    bus.admin.forget_writer(g)


def test_its_answers_to_questions_count(bus, t, g, eventually):
    """The first thing that the broker hears of the forgotten one is an answer."""
    asked, other = bus.producer(g, checker=lambda check: mq.COMMIT), bus.producer(g, checker=unknown)
    for producer in (asked, other):
        assert producer.wait_until_listening(60)
        producer.commit_batch(g, 1, [])
    bus.admin.forget_writer(g)
    transaction = other.prepare(t, b"1").transaction_id
    other.close()
    eventually(lambda: bus.admin.transaction(transaction)["state"] == "committed")


@pytest.mark.invariant("I7")
def test_a_newer_process_of_its_name_keeps_it_out(bus, t, g):
    """I7"""
    old = bus.producer(g, instance="me", checker=unknown)
    old.commit_batch(g, 0, [])
    bus.admin.forget_writer(g)
    new = bus.producer(g, instance="me", checker=unknown)
    transaction = new.prepare(t, b"new").transaction_id
    for _ in range(2):
        with pytest.raises(mq.Fenced):
            old.prepare(t, b"old")
    with pytest.raises(mq.Fenced):
        old.commit_batch(g, 0, [])
    assert new.commit(transaction) is mq.Code.COMMITTED


def test_it_listens_again_when_the_broker_was_restarted_meanwhile(make_broker, served_kind, eventually):
    broker = make_broker(served_kind)
    with broker.connect() as bus:
        asked = bus.producer("w", checker=lambda check: mq.COMMIT)
        asked.commit_batch("q", 1, [])
        assert asked.wait_until_listening(60)
        bus.admin.forget_writer("q")
        broker.restart()
        eventually(lambda: [line["members"] for line in bus.admin.producers()] == [1])
        transaction = asked.prepare("t", b"1").transaction_id
        eventually(lambda: bus.admin.transaction(transaction)["state"] == "committed")


@pytest.mark.invariant("I7")
def test_a_fenced_producer_is_not_asked_any_more_and_says_so_once(bus, t, g, eventually, caplog):
    """I7. It stops, instead of asking to be asked for ever."""
    asked = []
    old = bus.producer(g, instance="me", checker=asked.append)
    assert old.wait_until_listening(60)
    [loop] = old._production._loops
    new = bus.producer(g, instance="me", checker=lambda check: mq.COMMIT)
    assert new.wait_until_listening(60)
    transactions = [new.prepare(t, b"1").transaction_id for _ in range(10)]
    eventually(lambda: all(bus.admin.transaction(one)["state"] == "committed" for one in transactions))
    assert not asked
    loop._thread.join(60)
    assert not loop._thread.is_alive(), "it listens on"
    with pytest.raises(mq.Fenced):
        old.wait_until_listening()
    with pytest.raises(mq.Fenced):
        old.prepare(t, b"old")
    said = [record for record in caplog.records if "no longer asked" in record.getMessage()]
    assert len(said) == 1
