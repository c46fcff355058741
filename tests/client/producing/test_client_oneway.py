"""Ends that are not waited for, over the twin, on both faces: what the call says, what is counted, what is sent
again."""

from __future__ import annotations

import logging
import threading

import pytest

import escrowmq as mq
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.client.lanes.coalescer import Lane
from escrowmq.client.links import presence
from escrowmq.client.producing import oneway
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange


@pytest.fixture
def producer(bus):
    return bus.producer("orders", unasked=True, confirm="oneway")


def outcome(twin, txn):
    return twin.transactions[bytes(txn.id)].outcome


def test_the_default_is_an_answered_end(bus):
    assert bus.producer("p").confirm == "answered"
    with pytest.raises(mq.Misuse, match=r"confirm = 'later'"):
        bus.producer("p", confirm="later")
    with pytest.raises(mq.Misuse, match=r"confirm = True"):
        bus.producer("p", unasked=True).end(mq.TransactionId(1, 1, 1), mq.COMMIT, confirm=True)


def test_no_end_waits_for_its_answer_and_none_claims_a_decision(twin, bus, producer):
    twin.hold(Exchange.END)
    with producer.transaction() as left:
        left.send("t", b"1")
    with producer.transaction() as called:
        called.send("t", b"2")
        assert called.rollback() is mq.Code.SENT
    third, fourth = producer.prepare("t", b"3"), producer.prepare("t", b"4")
    assert producer.commit(third.transaction_id) is mq.Code.SENT
    assert producer.end(fourth.transaction_id, mq.UNKNOWN) is mq.Code.SENT
    done = producer.send_in_transaction(mq.Message("t", b"5"), lambda message, arg: mq.COMMIT)
    assert (done.outcome, done.status) == (mq.COMMIT, mq.Code.SENT)
    assert {transaction.outcome for transaction in twin.transactions.values()} == {None}
    assert not producer.flush(0.01)
    twin.release(Exchange.END)
    assert producer.flush()
    outcomes = [transaction.outcome for transaction in twin.transactions.values()]
    assert outcomes == [mq.COMMIT, mq.ROLLBACK, mq.COMMIT, None, mq.COMMIT]
    assert (producer.refused_ends, producer.unknown_ends) == (0, 0)


def test_one_end_of_a_producer_that_waits_for_its_others(twin, bus):
    producer = bus.producer("orders", unasked=True)
    twin.hold(Exchange.END)
    receipt = producer.prepare("t", b"1")
    assert producer.end(receipt.transaction_id, mq.COMMIT, confirm="oneway") is mq.Code.SENT
    twin.release(Exchange.END)
    assert producer.commit(receipt.transaction_id) is mq.Code.ALREADY_COMMITTED


def test_one_end_may_be_answered_where_the_others_are_not(producer):
    receipt = producer.prepare("t", b"1")
    assert producer.end(receipt.transaction_id, mq.COMMIT, confirm="answered") is mq.Code.COMMITTED


def test_a_batch_of_ends_is_answered_after_the_ends_before_it(producer):
    receipts = producer.prepare_batch([mq.Message("t", b"1"), mq.Message("t", b"2")]).check()
    first, second = (receipt.transaction_id for receipt in receipts)
    producer.commit(first)
    codes = producer.end_batch([first, second], mq.ROLLBACK).codes.tolist()
    assert codes == [mq.Code.CONFLICT, mq.Code.ROLLED_BACK]


def test_a_transaction_without_messages_has_nothing_to_send(producer):
    assert producer.transaction().commit() is mq.Code.OK


def test_a_refused_end_is_counted_and_raises_nothing(twin, producer, caplog):
    with producer.transaction() as txn:
        txn.send("t", b"1")
        assert producer.end_batch([txn.id], mq.ROLLBACK).ok
    assert producer.flush()
    assert (producer.refused_ends, producer.unknown_ends) == (1, 0)
    (line,) = [record.getMessage() for record in caplog.records if record.name == oneway.__name__]
    assert "1 ends of orders" in line
    assert f"COMMIT of {txn.id}: CONFLICT" in line


def test_a_request_that_fails_as_a_whole_counts_each_of_its_ends(twin, producer):
    receipts = list(producer.prepare_batch([mq.Message("t", b"x")] * 3).check())
    twin.hold(Exchange.END)
    producer.commit(receipts[0].transaction_id)  # is under way; the others share the next request
    for receipt in receipts[1:]:
        producer.commit(receipt.transaction_id)
    twin.refuse(Exchange.END, mq.Rejected(mq.Code.BAD_BATCH))
    twin.refuse(Exchange.END, mq.Fenced(mq.Code.FENCED))
    twin.release(Exchange.END)
    assert producer.flush()
    assert (producer.refused_ends, producer.unknown_ends) == (3, 0)


def test_an_end_without_an_answer_is_unknown_at_its_deadline(twin, producer, hurried):
    receipt = producer.prepare("t", b"1")
    twin.hold(Exchange.END)
    with hurried(producer):
        producer.commit(receipt.transaction_id)
        assert producer.flush(60.0)
    assert (producer.refused_ends, producer.unknown_ends) == (0, 1)


def test_an_end_that_the_connection_lost_is_sent_again(twin, producer):
    with producer.transaction() as txn:
        txn.send("t", b"1")
        twin.lose(Exchange.END, applied=False)
        twin.lose(Exchange.END, applied=True)
    assert producer.flush()
    assert outcome(twin, txn) is mq.COMMIT
    assert (len(twin.seen(Exchange.END)), producer.refused_ends, producer.unknown_ends) == (3, 0, 0)


def test_a_full_lane_is_told_at_once(twin, bus, monkeypatch):
    monkeypatch.setitem(Lane.__init__.__kwdefaults__, "max_waiting", 2)
    producer = bus.producer("orders", unasked=True, confirm="oneway")
    receipt = producer.prepare("t", b"1")
    twin.hold(Exchange.END)
    for _ in range(3):  # one is under way, two wait
        assert producer.commit(receipt.transaction_id) is mq.Code.SENT
    with pytest.raises(mq.Overloaded, match="QUEUE_FULL"):
        producer.commit(receipt.transaction_id)
    twin.release(Exchange.END)


def test_closing_waits_for_the_ends_under_way(twin, producer):
    receipt = producer.prepare("t", b"1")
    twin.hold(Exchange.END)
    producer.commit(receipt.transaction_id)
    closing = threading.Thread(target=producer.close)
    closing.start()
    twin.release(Exchange.END)
    closing.join()
    assert outcome_of(twin, receipt) is mq.COMMIT
    assert (producer.refused_ends, producer.unknown_ends) == (0, 0)
    with pytest.raises(mq.Unknown, match="CLOSED"):
        producer.commit(receipt.transaction_id)


def test_closing_gives_up_at_the_timeout_and_counts(twin, producer, hurried):
    receipt = producer.prepare("t", b"1")
    twin.hold(Exchange.END)
    with hurried(producer):
        producer.commit(receipt.transaction_id)
        producer.close()
    assert producer.unknown_ends == 1


@pytest.mark.parametrize("absent", ["fail", "wait"])
def test_of_several_brokers_one_that_is_away_holds_nobody_up(absent, monkeypatch, eventually, patient):
    links = [TwinLink(shard=1, address="twin:1"), TwinLink(shard=2, address="twin:2")]
    with Bus(links) as bus:
        producer = bus.producer("orders", unasked=True, confirm="oneway", absent=absent)
        receipts = [producer.prepare("t", b"x") for _ in range(2)]
        twins = {receipt.transaction_id.shard: receipt for receipt in receipts}
        assert producer.commit(twins[1].transaction_id) is mq.Code.SENT
        assert producer.commit(twins[2].transaction_id) is mq.Code.SENT
        assert producer.flush()
        monkeypatch.setattr(presence, "AWAY_SECONDS", 0.0)
        links[1].away = True
        bus.router.presence.suspect(1)
        eventually(lambda: bus.router.presence.away(1))
        if absent == "fail":
            with pytest.raises(mq.Overloaded, match="BROKER_AWAY"):
                producer.commit(twins[2].transaction_id)
        else:
            assert producer.commit(twins[2].transaction_id) is mq.Code.SENT
        assert producer.commit(twins[1].transaction_id) is mq.Code.SENT
        links[1].away = False


def test_a_burst_of_refusals_is_one_line_and_the_next_counts_the_rest(caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(oneway.time, "monotonic", lambda: clock[0])
    tally = oneway.Tally("orders")
    row = (bytes(mq.TransactionId(1, 2, 3)), int(mq.ROLLBACK))
    clock[0] = 100.0
    with caplog.at_level(logging.DEBUG):
        for _ in range(1000):
            tally.on_result(row, mq.Code.ALREADY_COMMITTED)
        assert len(caplog.records) == 1
        clock[0] += oneway.LOG_SECONDS
        tally.on_result(row, mq.Unknown(mq.Code.TIMED_OUT))
    assert [record.args[0] for record in caplog.records] == [1, 1000]
    assert (tally.refused, tally.unknown) == (1000, 1)


def outcome_of(twin, receipt):
    return twin.transactions[bytes(receipt.transaction_id)].outcome


async def test_no_task_waits_either(twin):
    async with AsyncBus([twin]) as bus:
        producer = bus.producer("orders", unasked=True, confirm="oneway")
        async with producer.transaction() as kept:
            await kept.send("t", b"0")
        assert await producer.flush()
        twin.hold(Exchange.END)
        async with producer.transaction() as txn:
            await txn.send("t", b"1")
        receipt = await producer.prepare("t", b"2")
        assert await producer.rollback(receipt.transaction_id) is mq.Code.SENT
        assert await producer.rollback(kept.id) is mq.Code.SENT
        assert outcome(twin, txn) is None
        twin.release(Exchange.END)
        assert await producer.flush()
        assert (outcome(twin, txn), outcome_of(twin, receipt)) == (mq.COMMIT, mq.ROLLBACK)
        assert (producer.refused_ends, producer.unknown_ends) == (1, 0)


async def test_closing_the_bus_of_a_loop_sends_what_waits(twin):
    bus = AsyncBus([twin])
    producer = bus.producer("orders", unasked=True, confirm="oneway")
    receipts = [await producer.prepare("t", b"1") for _ in range(3)]
    for receipt in receipts:
        await producer.commit(receipt.transaction_id)
    await bus.close()
    assert {outcome_of(twin, receipt) for receipt in receipts} == {mq.COMMIT}
    assert (producer.refused_ends, producer.unknown_ends) == (0, 0)
