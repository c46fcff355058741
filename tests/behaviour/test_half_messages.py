"""systems.md 1.1 to 1.5, 1.9 to 1.12: half messages, decisions, views, wrong ends, restarts."""

from __future__ import annotations

import pytest

import escrowmq as mq


def unknown(check):
    return mq.UNKNOWN


@pytest.mark.invariant("I3")
def test_a_half_message_is_stored_and_not_consumable(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    consumer = bus.consumer(g, [t])
    with producer.transaction() as txn:
        receipt = txn.send(t, b"x", key="k")
        assert receipt.position >= 0
        assert receipt.offset is None
        assert consumer.receive(10) == []
        assert [row["state"] for row in bus.admin.lookup(message_id=receipt.message_id)] == ["open"]
        assert bus.admin.read(t).read_all().num_rows == 0
        txn.rollback()


def test_commit_brings_it_to_its_topic_with_all_it_had(bus, t, g, drain):
    producer = bus.producer(g, checker=unknown)
    with producer.transaction() as txn:
        receipt = txn.send(t, bytes(range(256)), key="schlüssel", tag="paid", properties={"a": "1", "ü": ""}, queue=2)
    (message,) = drain(bus.consumer(g, [t]), 1)
    assert (message.topic, message.body, message.key, message.tag) == (t, bytes(range(256)), "schlüssel", "paid")
    assert message.properties == {"a": "1", "ü": ""}
    assert (message.queue, message.offset, message.attempt) == (2, 0, 1)
    assert message.message_id == receipt.message_id
    assert message.transaction_id == txn.id == receipt.transaction_id
    assert message.born <= message.stored


@pytest.mark.invariant("I3")
def test_rollback_never_appears(bus, t, g, drain):
    producer = bus.producer(g, checker=unknown)
    with pytest.raises(ZeroDivisionError), producer.transaction() as txn:  # noqa: PT012
        txn.send(t, b"no")
        1 / 0
    with producer.transaction() as other:
        other.send(t, b"yes")
    assert [message.body for message in drain(bus.consumer(g, [t]), 1)] == [b"yes"]
    assert bus.admin.transaction(txn.id)["state"] == "rolled_back"


@pytest.mark.invariant("I4")
def test_messages_of_one_transaction_appear_together_as_one_run(bus, t, g, drain):
    producer = bus.producer(g, checker=unknown)
    plain = bus.producer(f"{g}-plain")
    with producer.transaction() as txn:
        for i in range(5):
            txn.send(t, f"txn {i}".encode(), queue=0)
            plain.send(t, b"other", queue=0)
        txn.send(f"{t}-points", b"points")
        assert bus.admin.read(f"{t}-points").read_all().num_rows == 0
    bodies = [message.body for message in drain(bus.consumer(g, [t]), 10)]
    at = bodies.index(b"txn 0")
    assert bodies[at : at + 5] == [f"txn {i}".encode() for i in range(5)]
    assert len(drain(bus.consumer(f"{g}-points", [f"{t}-points"]), 1)) == 1


def test_batches_with_mixed_outcomes(bus, t, g, drain):
    producer = bus.producer(g, checker=unknown)
    receipts = producer.prepare_batch([mq.Message(t, str(i).encode()) for i in range(300)])
    outcomes = [(mq.COMMIT, mq.ROLLBACK, mq.UNKNOWN)[i % 3] for i in range(300)]
    results = producer.end_batch(receipts.transactions, outcomes)
    assert [results[i] for i in range(3)] == [mq.Code.COMMITTED, mq.Code.ROLLED_BACK, mq.Code.NOTED]
    found = drain(bus.consumer(g, [t]), 100)
    assert {message.body for message in found} == {str(i).encode() for i in range(0, 300, 3)}


@pytest.mark.invariant("I5")
@pytest.mark.parametrize("outcome", [mq.COMMIT, mq.ROLLBACK])
def test_the_first_decision_is_final(bus, t, g, outcome, drain):
    producer = bus.producer(g, checker=unknown)
    receipt = producer.prepare(t, b"x")
    same, opposite = (
        (producer.commit, producer.rollback) if outcome is mq.COMMIT else (producer.rollback, producer.commit)
    )
    first = same(receipt.transaction_id)
    assert first in (mq.Code.COMMITTED, mq.Code.ROLLED_BACK)
    assert same(receipt.transaction_id).name == f"ALREADY_{first.name}"
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        opposite(receipt.transaction_id)
    with pytest.raises(mq.Rejected, match="TRANSACTION_DECIDED"):
        producer.prepare(t, b"y", transaction_id=receipt.transaction_id)
    drain(bus.consumer(g, [t]), 1 if outcome is mq.COMMIT else 0)


def test_wrong_ends_are_clear_errors_and_change_nothing(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    other = bus.producer(f"{g}-other", checker=unknown)
    receipt = producer.prepare(t, b"x")
    identity = receipt.transaction_id
    with pytest.raises(mq.Rejected, match="WRONG_GROUP"):
        other.commit(identity)
    for wrong in (
        mq.TransactionId(identity.shard, identity.epoch, identity.position + 1_000_000),
        mq.TransactionId(identity.shard, identity.epoch + 1, identity.position),
    ):
        with pytest.raises(mq.EscrowError) as raised:
            producer.commit(wrong)
        assert raised.value.code in (mq.Code.UNKNOWN_TRANSACTION, mq.Code.WRONG_GROUP, mq.Code.FENCED)
    with pytest.raises(mq.Rejected, match="WRONG_SHARD"):
        producer.commit(mq.TransactionId(identity.shard ^ 1, identity.epoch, identity.position))
    assert bus.admin.transaction(identity)["state"] == "open"
    assert producer.rollback(identity) is mq.Code.ROLLED_BACK


def test_any_process_of_the_group_can_end_it(broker, bus, t, g):
    receipt = bus.producer(g, checker=unknown).prepare(t, b"x")
    with broker.connect() as elsewhere:
        assert elsewhere.producer(g).commit(str(receipt.transaction_id)) is mq.Code.COMMITTED


def test_the_half_and_op_views(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    a, b, c = (producer.prepare(t, body, key=g) for body in (b"a", b"b", b"c"))
    producer.commit(a.transaction_id)
    producer.rollback(b.transaction_id)
    half = [row for row in bus.admin.read("%half").read_all().to_pylist() if row["key"] == g]
    assert [(row["body"], row["topic"]) for row in half] == [(b"a", t), (b"b", t), (b"c", t)]
    states = [mq.TransactionState(row["state"]) for row in half]
    assert states == [mq.TransactionState.COMMITTED, mq.TransactionState.ROLLED_BACK, mq.TransactionState.OPEN]
    op = {row["half_position"] for row in bus.admin.read("%op").read_all().to_pylist()}
    assert {row["position"] for row in half} - op == {c.position}
    producer.rollback(c.transaction_id)


def test_a_group_serves_one_kind_of_message(bus, t, g):
    bus.producer(g, checker=unknown).prepare_batch([])
    with pytest.raises(mq.Rejected, match="GROUP_KIND"):
        bus.producer(g).send(t, b"x")


def test_a_mistaken_prepare_is_refused_and_the_plain_senders_go_on(bus, t, g):
    plain = bus.producer(g)
    plain.send(t, b"x")
    with pytest.raises(mq.Rejected, match=f"alter-producers {g} --kind transactional"):
        bus.producer(g, checker=unknown).prepare(t, b"x")
    with pytest.raises(mq.Rejected, match="GROUP_KIND"):
        bus.producer(g, unasked=True).prepare(t, b"x")
    plain.send(t, b"y")
    bus.producer(g).send(t, b"z")


def test_a_person_says_the_kind_of_a_group(bus, t, g):
    mistaken = bus.producer(g, checker=unknown)
    transaction = mistaken.prepare(t, b"x").transaction_id
    bus.admin.alter_producers(g, kind="plain")
    bus.producer(g).send(t, b"y")
    with pytest.raises(mq.Rejected, match="GROUP_KIND"):
        mistaken.prepare(t, b"x")
    assert mistaken.rollback(transaction) is mq.Code.ROLLED_BACK
    (listed,) = (group for group in bus.admin.producers() if group["group"] == g)
    assert (listed["kind"], listed["own"]) == ("plain", ["kind"])


def test_1_14_a_group_is_made_with_a_check_policy(bus, t, g):
    policy = mq.CheckPolicy(transaction_timeout=60, check_interval=60, check_max=3, checks_exhausted="rollback")
    bus.producer(g, checker=unknown, check_policy=policy).prepare(t, b"x")
    bus.producer(g, checker=unknown).prepare(t, b"x")
    with pytest.raises(mq.Rejected, match=r"GROUP_RULES.*check_max 3, not 5"):
        bus.producer(g, checker=unknown, check_policy=mq.CheckPolicy(check_max=5)).prepare(t, b"x")
    (listed,) = (group for group in bus.admin.producers() if group["group"] == g)
    assert {name: listed[name] for name in listed["own"]} == {
        "transaction_timeout": 60.0,
        "check_interval": 60.0,
        "check_max": 3,
        "checks_exhausted": "rollback",
    }
    for row in bus.admin.read("%half").read_all().to_pylist():
        if row["topic"] == t:
            assert row["due_us"] - row["stored_us"] == 60_000_000
    (altered,) = bus.admin.alter_producers(g, check_max=5, reset=["checks_exhausted"])
    assert (altered["check_max"], "checks_exhausted" in altered) == (5, False)


@pytest.mark.invariant("I11")
def test_1_14_a_groups_policy_outlives_the_broker(own, t, g, eventually):
    """Asked twice by its own interval, then rolled back, while the broker's settings would ask in an hour and park."""
    broker = own(transaction_timeout=3600, check_interval=3600)
    quick = {"transaction_timeout": 0.1, "check_interval": 0.1, "check_max": 2, "checks_exhausted": "rollback"}
    with broker.connect() as bus:
        bus.admin.alter_producers(g, **quick)
    broker.restart()
    asked: list[int] = []
    with broker.connect() as bus:
        producer = bus.producer(g, checker=lambda check: asked.append(check.attempt) or mq.UNKNOWN)
        transaction = producer.prepare(t, b"x").transaction_id
        eventually(lambda: bus.admin.transaction(transaction)["state"] == "rolled_back")
        told = bus.admin.transaction(transaction)
        assert (told["decided_by"], told["checks"]) == ("exhausted", 2)
    assert asked in ([1, 2], [1], [2], []), "a producer that is late does not hear a question that is over"


def test_a_broker_can_refuse_transactions(own, t, g):
    broker = own(reject_transactional=True)
    with broker.connect() as bus:
        with pytest.raises(mq.Rejected, match="NO_PERMISSION"):
            bus.producer(g, checker=unknown).prepare(t, b"x")
        assert bus.producer(f"{g}-plain").send(t, b"x").offset == 0


def test_mixed_groups_can_be_allowed(own, t, g, drain):
    broker = own(mixed_groups=True)
    with broker.connect() as bus:
        producer = bus.producer(g)
        producer.send(t, b"plain")
        producer.checker(unknown)
        with producer.transaction() as txn:
            txn.send(t, b"half")
        producer.send(t, b"plain too")
        drain(bus.consumer(g, [t]), 3)


def test_everything_survives_a_restart(own, t, g, drain):
    broker = own(transaction_timeout=3600)
    with broker.connect() as bus:
        producer = bus.producer(g, checker=unknown)
        plain = bus.producer(f"{g}-plain").send(t, b"plain")
        receipts = producer.prepare_batch([mq.Message(t, str(i).encode()) for i in range(9)])
        ids = [receipt.transaction_id for receipt in receipts]
        producer.end_batch(ids[:6], [mq.COMMIT] * 3 + [mq.ROLLBACK] * 3)
        consumer = bus.consumer(g, [t])
        drain(consumer, 4)
    broker.restart(kill=True)
    with broker.connect() as bus:
        states = [bus.admin.transaction(identity)["state"] for identity in ids]
        assert states == ["committed"] * 3 + ["rolled_back"] * 3 + ["open"] * 3
        producer = bus.producer(g, checker=unknown)
        assert producer.commit(ids[0]) is mq.Code.ALREADY_COMMITTED
        assert producer.end_batch(ids[6:], mq.COMMIT).codes.tolist() == [mq.Code.COMMITTED] * 3
        assert {message.body for message in drain(bus.consumer(g, [t]), 3)} == {b"6", b"7", b"8"}
        (found,) = bus.admin.lookup(message_id=plain.message_id)
        assert (found["body"], found["offset"]) == (b"plain", plain.offset)


def test_a_newer_instance_fences_the_older(bus, t, g):
    old = bus.producer(g, instance="one", checker=unknown)
    receipt = old.prepare(t, b"x")
    new = bus.producer(g, instance="one", checker=unknown)
    new.prepare(t, b"y")
    with pytest.raises(mq.Fenced):
        old.prepare(t, b"z")
    with pytest.raises(mq.Fenced):
        old.commit(receipt.transaction_id)
    assert new.commit(receipt.transaction_id) is mq.Code.COMMITTED
    other = bus.producer(g, instance="two", checker=unknown)
    other.prepare(t, b"z")
    assert new.prepare(t, b"still").position >= 0


async def test_the_same_to_await(broker, t, g):
    async with await broker.aconnect() as bus:
        producer = bus.producer(g, checker=unknown)
        consumer = await bus.consumer(g, [t])
        async with producer.transaction() as txn:
            await txn.send(t, b"1")
            await txn.send(t, b"2")
            assert await consumer.receive(10) == []
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with producer.transaction() as txn:
                await txn.send(t, b"no")
                1 / 0
        result = await producer.send_in_transaction(mq.Message(t, b"3"), commit)
        assert result.status is mq.Code.COMMITTED
        with pytest.raises(mq.Rejected, match="CONFLICT"):
            await producer.rollback(result.transaction_id)
        receipts = await producer.prepare_batch([mq.Message(t, b"4"), mq.Message(t, b"5")])
        assert (await producer.end_batch(receipts.transactions, [mq.COMMIT, mq.ROLLBACK])).ok
        bodies = set()
        while len(bodies) < 4:
            for message in await consumer.receive(10, wait=60.0):
                bodies.add(message.body)
                await message.ack()
        assert bodies == {b"1", b"2", b"3", b"4"}
        assert await consumer.flush() == 0
        assert (await bus.admin.transaction(txn.id))["state"] == "rolled_back"


async def commit(message, arg):
    return mq.COMMIT
