"""Delayed messages that their producer recalls by their ids."""

from __future__ import annotations

import uuid

import pytest

import escrowmq as mq


def delayed(bus):
    """The messages that wait for their time at the broker."""
    return bus.admin.stats()[0]["delayed_waiting"]


def test_a_recalled_message_waits_no_more(own, t, g, drain):
    broker = own()
    with broker.connect() as bus:
        producer = bus.producer(g, qos=2)
        producer.send(t, b"recalled", delay=3600.0, message_id="order-1")
        assert delayed(bus) == 1
        assert producer.recall(t, "order-1") is True
        assert delayed(bus) == 0
    broker.restart(kill=broker.is_served)
    with broker.connect() as bus:
        producer = bus.producer(g, qos=2)
        assert producer.recall(t, "order-1") is False
        producer.send(t, b"recalled", delay=3600.0, message_id="order-1")  # a repeat: it stays recalled
        assert delayed(bus) == 0
        kept = producer.send(t, b"kept", delay=0.2)
        (got,) = drain(bus.consumer(g, t), 1)
        assert (got.body, got.message_id) == (b"kept", kept.message_id)
        with pytest.raises(mq.Rejected, match=r"NOT_FOUND.*became visible"):
            producer.recall(t, kept.message_id)


def test_what_cannot_be_recalled(bus, t, g):
    producer = bus.producer(g, checker=lambda _: mq.UNKNOWN)
    half = producer.prepare(t, b"half", delay=3600.0, message_id="half")
    for identity in ("half", uuid.uuid4()):
        with pytest.raises(mq.Rejected, match="NOT_FOUND"):
            producer.recall(t, identity)
    assert half.transaction_id is not None
    producer.commit(half.transaction_id)  # a commit is final
    with pytest.raises(mq.Rejected, match="NOT_FOUND"):
        producer.recall(t, "half")
    with pytest.raises(mq.Rejected, match="UNKNOWN_TOPIC"):
        producer.recall(f"{t}-none", "half")
    plain = bus.producer(f"plain-{g}").send(t, b"plain", delay=3600.0)
    bus.admin.create_topic(f"{t}-other")
    with pytest.raises(mq.Rejected, match="NOT_FOUND"):
        producer.recall(f"{t}-other", plain.message_id)
    assert producer.recall(t, plain.message_id) is True


def test_the_broker_that_has_it_is_found(make_broker, t, g):
    brokers = [make_broker("served") for _ in range(2)]
    with mq.connect(f"escrow://{','.join(one.address for one in brokers)}") as bus:
        producer = bus.producer(g)
        for receipt in [producer.send(t, b"x", key=str(number), delay=3600.0) for number in range(8)]:
            assert producer.recall(t, receipt.message_id) is True
            assert producer.recall(t, receipt.message_id) is False
        with pytest.raises(mq.Rejected, match="NOT_FOUND"):
            producer.recall(t, uuid.uuid4())
        brokers[0].stop()
        with pytest.raises(mq.errors.EscrowError, match="BROKER_AWAY"):
            producer.recall(t, uuid.uuid4())
