"""Ends that nobody waits for, on real brokers: they come to pass, their refusals are counted, and a lost one is asked
back.
"""

from __future__ import annotations

import pytest

import escrowmq as mq


def state(bus, identity):
    return bus.admin.transaction(identity)["state"]


def test_an_end_that_is_not_waited_for_comes_to_pass(bus, t, g):
    producer, consumer = bus.producer(g, unasked=True, confirm="oneway"), bus.consumer(g, t)
    with producer.transaction() as txn:
        txn.send(t, b"kept")
    with pytest.raises(ZeroDivisionError), producer.transaction() as dropped:  # noqa: PT012
        dropped.send(t, b"dropped")
        1 / 0
    (message,) = consumer.receive(10, wait=60)
    assert (message.body, message.transaction_id) == (b"kept", txn.id)
    message.ack()
    assert producer.flush()
    assert state(bus, dropped.id) == "rolled_back"
    assert (producer.refused_ends, producer.unknown_ends) == (0, 0)


@pytest.mark.invariant("I5")
def test_nobody_is_told_that_an_end_was_refused_but_it_is_counted(bus, t, g):
    producer = bus.producer(g, unasked=True, confirm="oneway")
    identity = producer.prepare(t, b"x").transaction_id
    assert bus.producer(g).rollback(identity) is mq.Code.ROLLED_BACK
    assert producer.commit(identity) is mq.Code.SENT
    other = bus.producer(f"{g}-other", confirm="oneway")
    assert other.commit(identity) is mq.Code.SENT
    for one in (producer, other):
        assert one.flush()
        assert (one.refused_ends, one.unknown_ends) == (1, 0)
    assert state(bus, identity) == "rolled_back"


async def test_the_same_to_await(broker, t, g):
    async with await broker.aconnect() as bus:
        producer = bus.producer(g, unasked=True, confirm="oneway")
        async with producer.transaction() as txn:
            await txn.send(t, b"kept")
        (message,) = await (await bus.consumer(g, t)).receive(10, wait=60)
        assert (message.body, message.transaction_id) == (b"kept", txn.id)
        message.ack()
        assert await producer.rollback(txn.id) is mq.Code.SENT
        assert await producer.flush()
        assert producer.refused_ends == 1


WHOLE = {"key": "o-1", "tag": "paid", "properties": {"shop": "north"}}


def content(message):
    named = (message.key, message.tag, message.properties)
    return message.message_id, message.body, dict(zip(WHOLE, named, strict=True))


def found_by_an_operator(admin, topic, receipt, state):
    """By id and by key, in the list of transactions, and in its own story."""
    (found,) = admin.lookup(message_id=receipt.message_id)
    body = None if state == "rolled_back" else b"book"
    assert (found["state"], found["key"], found["body"]) == (state, "o-1", body)
    assert receipt.message_id.hex() in {one["message_id"] for one in admin.lookup(key="o-1", topic=topic)}
    told = admin.transaction(receipt.transaction_id, bodies=True)
    assert (told["state"], told["messages"][0]["body"]) == (state, b"book")


@pytest.mark.invariant("I48")
def test_the_committed_copy_is_the_prepared_message_and_a_rolled_back_one_is_an_operator_s(bus, t, g):
    producer, consumer = bus.producer(g, unasked=True, confirm="oneway"), bus.consumer(g, t)
    kept, dropped = (producer.prepare(t, b"book", **WHOLE) for _ in range(2))
    found_by_an_operator(bus.admin, t, kept, "open")
    for receipt in (kept, dropped):  # prepared: found, with its body
        viewed = bus.view_message(t, receipt.message_id)
        assert (viewed.state, viewed.key, viewed.body) == ("open", "o-1", b"book")
    assert (producer.rollback(dropped.transaction_id), producer.commit(kept.transaction_id)) == (mq.Code.SENT,) * 2
    (message,) = consumer.receive(10, wait=60)
    assert content(message) == (kept.message_id, b"book", WHOLE)
    assert message.transaction_id == kept.transaction_id
    message.ack()
    assert producer.flush()
    assert bus.admin.read(t).read_all()["message_id"].to_pylist() == [kept.message_id]
    with bus.reader(t, key="o-1") as reader:
        assert [one.message_id for batch in reader.batches(10, idle_timeout=0.0) for one in batch] == [kept.message_id]
    assert bus.view_message(t, "o-1").message_id == kept.message_id, "by key: the one that stands"
    assert bus.view_message(t, dropped.message_id) is None
    for receipt, state_ in ((kept, "committed"), (dropped, "rolled_back")):
        found_by_an_operator(bus.admin, t, receipt, state_)


async def test_the_same_copy_to_await(broker, t, g):
    async with await broker.aconnect() as bus:
        producer = bus.producer(g, unasked=True, confirm="oneway")
        kept, dropped = [await producer.prepare(t, b"book", **WHOLE) for _ in range(2)]
        assert await producer.rollback(dropped.transaction_id) is mq.Code.SENT
        assert await producer.commit(kept.transaction_id) is mq.Code.SENT
        (message,) = await (await bus.consumer(g, t)).receive(10, wait=60)
        assert content(message) == (kept.message_id, b"book", WHOLE)
        message.ack()
        assert await producer.flush()
        assert (await bus.view_message(t, kept.message_id)).state == "committed"
        assert await bus.view_message(t, dropped.message_id) is None
        assert (await bus.admin.transaction(dropped.transaction_id))["state"] == "rolled_back"


def test_without_a_checker_an_end_that_never_came_leaves_it_open_until_somebody_ends_it(bus, t, g, eventually):
    """Nobody is asked, so nobody fails to answer: it is not parked by unanswered questions, and an end of any process
    counts."""
    producer = bus.producer(g, unasked=True, confirm="oneway")
    lost, other = (producer.prepare(t, b"book", key="o-1", check_immunity=0.001) for _ in range(2))
    with bus.producer(f"{g}-asked", checker=lambda check: mq.ROLLBACK) as asked:
        due = asked.prepare(t, b"asked", check_immunity=0.001)  # by then the others were due as well
        eventually(lambda: state(bus, due.transaction_id) == "rolled_back")
    for receipt in (lost, other):
        told = bus.admin.transaction(receipt.transaction_id)
        assert (told["state"], told["checks"]) == ("open", 0)
    assert bus.admin.commit(lost.transaction_id) is mq.Code.COMMITTED
    assert bus.producer(g, unasked=True).rollback(other.transaction_id) is mq.Code.ROLLED_BACK
    assert bus.admin.read(t).read_all()["message_id"].to_pylist() == [lost.message_id]


def test_closing_sends_what_is_on_its_way(broker, t, g, drain):
    with broker.connect() as bus:
        producer = bus.producer(g, unasked=True, confirm="oneway")
        ids = [receipt.transaction_id for receipt in producer.prepare_batch([mq.Message(t, b"x")] * 200).check()]
        for identity in ids:
            producer.commit(identity)
    assert (producer.refused_ends, producer.unknown_ends) == (0, 0)
    with broker.connect() as bus:
        drain(bus.consumer(g, t), 200)


def prepared(producer, topic, message_id):
    """A transaction; None if the broker did not answer in the producer's short time."""
    try:
        return producer.prepare(topic, b"asked back", message_id=message_id).transaction_id
    except mq.Unknown:
        return None


@pytest.mark.invariant("I14")
def test_a_broker_that_is_killed_after_an_end_was_taken(make_broker, served_kind, t, g, eventually):
    """The client sends the end again; where it has died too, the check-back decides."""
    broker = make_broker(served_kind)
    with broker.connect() as bus:
        producer = bus.producer(g, unasked=True, confirm="oneway")
        again = producer.prepare(t, b"sent again").transaction_id
        with broker.connect() as dying:
            dead = dying.producer(f"{g}-dead", checker=lambda check: mq.UNKNOWN, confirm="oneway", timeout=3.0)
            while (lost := prepared(dead, t, f"{g}-lost")) is None:
                pass
            broker.stop(kill=True)
            assert (producer.commit(again), dead.commit(lost)) == (mq.Code.SENT, mq.Code.SENT)
        assert (dead.refused_ends, dead.unknown_ends) == (0, 1)
        broker.start()
        assert producer.flush()
        assert state(bus, again) == "committed"
        assert state(bus, lost) == "open"
        asked = []
        bus.producer(f"{g}-dead", checker=lambda check: asked.append(check.transaction_id) or mq.COMMIT)
        eventually(lambda: state(bus, lost) == "committed")
        assert set(asked) == {lost}
