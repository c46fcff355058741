"""What only one face of the client could do once, on the other."""

from __future__ import annotations

import pyarrow as pa
import pytest

import escrowmq as mq


async def test_numbered_batches_to_await(broker, t, g):
    async with await broker.aconnect() as bus:
        producer, writer = bus.producer(g, unasked=True), f"{g}-writer"
        assert await producer.last_batch(writer) is None
        receipts = (await producer.prepare_batch([mq.Message(t, b"1"), mq.Message(t, b"2")])).check()
        done = await producer.commit_batch(writer, 7, (receipt.transaction_id for receipt in receipts))
        assert done.status is mq.Code.COMMITTED
        repeated = (await producer.prepare_batch([mq.Message(t, b"1"), mq.Message(t, b"2")])).check()
        again = await producer.commit_batch(writer, 7, (receipt.transaction_id for receipt in repeated))
        assert (again.status, again.rolled_back) == (mq.Code.ALREADY_COMMITTED, 2)
        assert await producer.last_batch(writer) == 7
        consumer = await bus.consumer(g, t)
        assert {message.body for message in await consumer.receive(10, wait=60)} == {b"1", b"2"}
        assert await consumer.receive(10, wait=0.1) == []


async def test_batches_to_a_shard_to_await(broker, t, g):
    async with await broker.aconnect() as bus:
        producer = bus.producer(g)
        (shard,) = set((await producer.place(pa.array(["key", None]))).tolist())
        assert (await producer.send_batch([mq.Message(t, b"x")], shard=shard)).ok
        with pytest.raises(mq.Rejected, match="WRONG_SHARD"):
            await producer.send_batch([mq.Message(t, b"y")], shard=shard + 1)
        transactional = bus.producer(f"{g}-half", unasked=True)
        receipts = await transactional.prepare_batch([mq.Message(t, b"z")], shard=shard)
        assert receipts[0].transaction_id.shard == shard
        assert (await transactional.end_batch(receipts.transactions, mq.COMMIT)).ok


async def test_a_local_transaction_to_await_may_be_a_plain_function(broker, t, g):
    async with await broker.aconnect() as bus:
        producer = bus.producer(g, unasked=True)

        async def coroutine(message, arg):
            return arg

        for local_transaction in (coroutine, lambda message, arg: arg):
            result = await producer.send_in_transaction(mq.Message(t, b"x"), local_transaction, mq.COMMIT)
            assert (result.outcome, result.status, result.error) == (mq.COMMIT, mq.Code.COMMITTED, None)


def test_transactions_that_are_never_asked_about(bus, t, g):
    with pytest.raises(mq.Misuse, match="NO_CHECKER"):
        bus.producer(f"{g}-asked").transaction()
    with bus.producer(g, unasked=True).transaction() as txn:
        txn.send(t, b"by id")
        txn.leave_undecided()
    assert bus.producer(g, unasked=True).commit(txn.id) is mq.Code.COMMITTED
    assert [message.body for message in bus.consumer(g, t).receive(10, wait=60)] == [b"by id"]


def test_a_producer_that_does_not_attend_is_not_asked(bus, t, g, eventually):
    asked = []

    def decide(check):
        asked.append(check.transaction_id)
        return mq.COMMIT

    producer = bus.producer(g, checker=decide)
    consumer = bus.consumer(g, t)
    assert producer.wait_until_listening(60)
    producer.attend(False)
    eventually(lambda: not [one for one in bus.admin.producers() if one["group"] == g and one["members"]])
    identity = producer.prepare(t, b"x").transaction_id
    assert consumer.receive(1, wait=1.0) == []  # five times what it takes until a check is due
    assert asked == []
    producer.attend(True)
    assert [message.body for message in consumer.receive(1, wait=60)] == [b"x"]
    assert set(asked) == {identity}
