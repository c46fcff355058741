"""One message id, one message of a topic (I9): the same id in another topic is another message, another content is
refused.
"""

from __future__ import annotations

import pytest

import escrowmq as mq
from escrowmq import Code


def unknown(check):
    return mq.UNKNOWN


def bodies(bus, topic):
    return bus.admin.read(topic).read_all()["body"].to_pylist()


@pytest.mark.invariant("I9")
def test_one_id_in_two_topics_is_two_messages(bus, t, g):
    producer = bus.producer(g, qos=2)
    orders, points = (producer.send(topic, body, message_id=t) for topic, body in ((t, b"a"), (f"{t}-2", b"b")))
    assert orders.queue >= 0
    assert points.queue >= 0
    assert (bodies(bus, t), bodies(bus, f"{t}-2")) == ([b"a"], [b"b"])
    assert producer.send(f"{t}-2", b"b", message_id=t) == points
    assert bus.producer(f"{g}-2", qos=2).send(t, b"a", message_id=t) == orders, "the same message, whoever sends it"
    assert (bodies(bus, t), bodies(bus, f"{t}-2")) == ([b"a"], [b"b"])


@pytest.mark.invariant("I9")
def test_two_messages_of_one_transaction_with_one_id_both_come_out(bus, t, g):
    with bus.producer(g, checker=unknown).transaction() as txn:
        receipts = [txn.send(topic, topic.encode(), message_id=t) for topic in (t, f"{t}-2")]
    assert receipts[0].position != receipts[1].position
    assert (bodies(bus, t), bodies(bus, f"{t}-2")) == ([t.encode()], [f"{t}-2".encode()])


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("other", [{"body": b"b"}, {"key": "b"}, {"tag": "b"}, {"properties": {"b": "b"}}], ids=str)
def test_another_content_under_a_taken_id_is_refused(bus, t, g, other):
    producer = bus.producer(g, qos=2)
    first = producer.send(t, b"a", message_id=t)
    with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        producer.send(t, **({"body": b"a"} | other), message_id=t)
    assert producer.send(t, b"a", message_id=t) == first
    assert bodies(bus, t) == [b"a"]


def test_a_half_message_of_another_content_group_or_transaction_is_refused(bus, t, g):
    producer, stranger = (bus.producer(name, checker=unknown) for name in (g, f"{g}-2"))
    with producer.transaction() as txn:
        txn.send(t, b"a", message_id=t)
        with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
            txn.send(t, b"b", message_id=t)
        for another in (producer, stranger):
            with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"), another.transaction() as later:  # noqa: PT012
                later.send(t, b"seen by nobody", message_id=f"{t}-x")
                later.send(t, b"a", message_id=t)
    with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        bus.producer(f"{g}-3").send(t, b"a", message_id=t)
    assert bodies(bus, t) == [b"a"]


@pytest.mark.invariant("I9")
def test_a_batch_answers_each_of_its_repeats_for_itself(bus, t, g):
    producer = bus.producer(g, qos=2)
    names = [f"{t}-{n}" for n in range(2000)]
    batch = [mq.Message(t, name.encode(), message_id=name) for name in names]
    first = producer.send_batch(batch)
    assert not first.codes.any()
    again = producer.send_batch(batch)
    assert again.positions.tolist() == first.positions.tolist()
    batch[7] = mq.Message(t, b"another", message_id=names[7])
    mixed = producer.send_batch([*batch, mq.Message(f"{t}-2", b"", message_id=names[0])])
    assert [n for n, code in enumerate(mixed.codes.tolist()) if code] == [7]
    assert mixed.codes[7] == Code.MESSAGE_ID_TAKEN
    assert (len(bodies(bus, t)), len(bodies(bus, f"{t}-2"))) == (2000, 1)


@pytest.mark.invariant("I9")
def test_ids_and_contents_are_known_after_a_restart(own, t, g):
    broker = own()
    with broker.connect() as bus:
        producer = bus.producer(g, qos=2)
        first = [producer.send(topic, b"a", message_id=t) for topic in (t, f"{t}-2")]
    for kill in (False, True):
        broker.restart(kill=kill)
        with broker.connect() as bus:
            producer = bus.producer(g, qos=2)
            assert [producer.send(topic, b"a", message_id=t) for topic in (t, f"{t}-2")] == first
            with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
                producer.send(t, b"b", message_id=t)
            assert producer.send(f"{t}-{kill}", b"a", message_id=t).offset == 0


def test_the_last_prepare_of_an_id_counts_where_that_was_chosen(bus, t, g):
    """systems.md 4.3: prepare a, prepare b under the same id; a commit brings b, and a is never seen."""
    producer = bus.producer(g, checker=unknown, replaces=True)
    a, b = (producer.prepare(t, body, message_id=t) for body in (b"a", b"b"))
    assert a.transaction_id != b.transaction_id
    assert producer.prepare(t, b"b", message_id=t) == b, "the same content is a repeat"
    assert bus.admin.transaction(a.transaction_id)["state"] == "rolled_back"
    assert bus.admin.transaction(a.transaction_id)["decided_by"] == "replaced"
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        producer.commit(a.transaction_id)
    assert producer.commit(b.transaction_id) is Code.COMMITTED
    assert producer.commit(b.transaction_id) is Code.ALREADY_COMMITTED
    assert producer.prepare(t, b"b", message_id=t) == b
    with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        producer.prepare(t, b"a", message_id=t)
    assert bodies(bus, t) == [b"b"]


def test_nothing_is_replaced_where_it_was_not_chosen(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    a = producer.prepare(t, b"a", message_id=t)
    with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        producer.prepare(t, b"b", message_id=t)
    assert producer.commit(a.transaction_id) is Code.COMMITTED
    assert bodies(bus, t) == [b"a"]


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("kills", [(True, False), (False, True), (True, True)])
def test_a_replacement_survives_kills_in_both_orders(own, t, g, kills):
    broker = own(transaction_timeout=60.0)
    with broker.connect() as bus:
        a = bus.producer(g, instance="i", checker=unknown, replaces=True).prepare(t, b"a", message_id=t)
    broker.restart(kill=kills[0])
    with broker.connect() as bus:
        b = bus.producer(g, instance="i", checker=unknown, replaces=True).prepare(t, b"b", message_id=t)
    broker.restart(kill=kills[1])
    with broker.connect() as bus:
        producer = bus.producer(g, instance="i", checker=unknown, replaces=True)
        assert producer.prepare(t, b"b", message_id=t) == b
        assert producer.commit(b.transaction_id) is Code.COMMITTED
        with pytest.raises(mq.Rejected, match="CONFLICT"):
            producer.commit(a.transaction_id)
        assert bodies(bus, t) == [b"b"]
