"""Producers over the twin: transactions, checkers, ends, validation, quality of service, routing."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.client.links.router import broker_of
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange


@pytest.fixture
def producer(bus):
    return bus.producer("orders", checker=lambda check: mq.UNKNOWN)


def bodies(twin, topic="t"):
    return [row["body"] for row in twin.topics[topic]]


@pytest.mark.invariant("I4")
def test_leaving_commits_all_messages_of_all_topics(twin, producer):
    with producer.transaction() as txn:
        first = txn.send("t", b"1")
        txn.send("u", b"2")
        assert twin.topics["t"] == []
        assert first.offset is None
        assert txn.id == first.transaction_id
    assert (bodies(twin, "t"), bodies(twin, "u")) == ([b"1"], [b"2"])
    assert len(twin.transactions) == 1


def test_an_exception_rolls_back_and_goes_on(twin, producer):
    with pytest.raises(ZeroDivisionError), producer.transaction() as txn:  # noqa: PT012
        txn.send("t", b"1")
        1 / 0
    assert twin.topics["t"] == []
    assert twin.transactions[bytes(txn.id)].outcome is mq.ROLLBACK


def test_a_failing_rollback_does_not_hide_the_exception(twin, producer):
    with pytest.raises(ZeroDivisionError) as raised, producer.transaction() as txn:  # noqa: PT012
        txn.send("t", b"1")
        twin.refuse(Exchange.END, mq.Overloaded(mq.Code.QUEUE_FULL))
        1 / 0
    assert "QUEUE_FULL" in raised.value.__notes__[0]


def test_unknown_at_commit_is_told(twin, bus, hurried):
    producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
    with ExitStack() as soon, pytest.raises(mq.Unknown, match="TIMED_OUT"), producer.transaction() as txn:  # noqa: PT012
        txn.send("t", b"1")
        twin.hold(Exchange.END)
        soon.enter_context(hurried(producer))
    twin.release(Exchange.END)
    assert producer.commit(txn.id) in (mq.Code.COMMITTED, mq.Code.ALREADY_COMMITTED)


def test_an_end_that_was_applied_and_lost_counts_as_success(twin, producer):
    with producer.transaction() as txn:
        txn.send("t", b"1")
        twin.lose(Exchange.END, applied=True, times=2)
        assert txn.commit() is mq.Code.COMMITTED
    assert bodies(twin) == [b"1"]
    assert producer.commit(txn.id) is mq.Code.ALREADY_COMMITTED
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        producer.rollback(txn.id)


def test_an_ended_transaction_takes_no_more(producer):
    with producer.transaction() as txn:
        txn.send("t", b"1")
        txn.rollback()
        with pytest.raises(mq.Misuse):
            txn.send("t", b"2")
    with pytest.raises(mq.Misuse):
        txn.commit()


def test_a_transaction_can_be_left_to_the_check_back(twin, producer):
    with producer.transaction() as txn:
        txn.send("t", b"1")
        txn.leave_undecided()
    assert twin.transactions[bytes(txn.id)].outcome is None


def test_transactions_need_a_checker(bus):
    producer = bus.producer("p")
    calls = (
        producer.transaction,
        lambda: producer.prepare_batch([]),
        lambda: producer.send_in_transaction(mq.Message("t", b""), lambda m, a: mq.COMMIT),
    )
    for call in calls:
        with pytest.raises(mq.Misuse, match="NO_CHECKER"):
            call()


@pytest.mark.parametrize(
    ("local", "outcome", "status"),
    [
        (lambda m, a: mq.COMMIT, mq.COMMIT, mq.Code.COMMITTED),
        (lambda m, a: mq.ROLLBACK, mq.ROLLBACK, mq.Code.ROLLED_BACK),
        (lambda m, a: mq.UNKNOWN, mq.UNKNOWN, mq.Code.NOTED),
        (lambda m, a: {}["missing"], mq.UNKNOWN, mq.Code.NOTED),
    ],
)
def test_send_in_transaction(producer, local, outcome, status):
    result = producer.send_in_transaction(mq.Message("t", b"x"), local, 1)
    assert (result.outcome, result.status) == (outcome, status)
    assert isinstance(result.error, KeyError if status is mq.Code.NOTED and result.error else type(None))
    assert result.transaction_id == result.receipt.transaction_id


def test_batches_of_transactions_give_one_typed_result_a_row(twin, producer):
    receipts = producer.prepare_batch([mq.Message("t", str(i).encode()) for i in range(4)])
    assert len(twin.transactions) == 4
    results = producer.end_batch(receipts.transactions, np.array([1, 2, 1, 0], np.uint8))
    assert list(results) == [mq.Code.COMMITTED, mq.Code.ROLLED_BACK, mq.Code.COMMITTED, mq.Code.NOTED]
    again = producer.end_batch([r.transaction_id for r in receipts], mq.ROLLBACK)
    codes = [mq.Code.CONFLICT, mq.Code.ALREADY_ROLLED_BACK, mq.Code.CONFLICT, mq.Code.ROLLED_BACK]
    assert again.codes.tolist() == codes
    assert not again.ok
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        again.check()
    assert bodies(twin) == [b"0", b"2"]


def test_ids_without_a_prepare_are_told_row_by_row(producer):
    receipts = producer.prepare_batch([mq.Message("t", b"x")])
    ids = pa.array([None, receipts.transactions[0].as_py()], pa.binary(16))
    assert producer.end_batch(ids, mq.COMMIT).codes.tolist() == [mq.Code.UNKNOWN_TRANSACTION, mq.Code.COMMITTED]


def test_an_end_for_a_shard_nobody_has_is_told(producer):
    with pytest.raises(mq.Rejected, match="WRONG_SHARD"):
        producer.commit(mq.TransactionId(99, 1, 1))
    with pytest.raises(mq.Rejected, match="UNKNOWN_TRANSACTION"):
        producer.commit(str(mq.TransactionId(1, 1, 1)))


@pytest.mark.parametrize("answer", [mq.COMMIT, mq.ROLLBACK, mq.UNKNOWN, ValueError])
def test_the_checker_answers_questions(twin, bus, answer, eventually):
    asked = []
    producer = bus.producer("p")

    @producer.checker
    def decide(check):
        asked.append(check)
        if answer is ValueError:
            raise ValueError("no")
        return answer

    assert producer.wait_until_listening(60)
    with producer.transaction() as txn:
        txn.send("t", b"1", key="k", properties={"a": "b"})
        txn.send("t", b"2")
        txn.leave_undecided()
    twin.ask(producer._production.sessions[0].number)
    eventually(lambda: twin.seen(Exchange.END))
    (check,) = asked
    assert (check.transaction_id, check.attempt) == (txn.id, 1)
    assert [(m.topic, m.body, m.key, m.properties) for m in check.messages] == [
        ("t", b"1", "k", {"a": "b"}),
        ("t", b"2", None, {}),
    ]
    expected = answer if isinstance(answer, mq.Outcome) else mq.UNKNOWN
    (ending,) = twin.seen(Exchange.END)
    assert ending.to_pylist() == [{"transaction": bytes(txn.id), "outcome": int(expected)}]
    (request,) = [request for request in twin.requests if request.kind is Exchange.END]
    assert request.options["by"] == 1


def test_a_broken_subscription_is_opened_anew(twin, producer, eventually):
    assert producer.wait_until_listening(60)
    (number,) = twin.streams
    first = twin.streams[number]
    first.broken = True
    eventually(lambda: twin.streams[number] is not first)
    assert first.closed


BAD = [
    ({"topic": "t", "body": "text"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": None}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"x" * 1001}, mq.Rejected, "BODY_TOO_LARGE"),
    ({"topic": "", "body": b""}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": "%half", "body": b""}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": "a b", "body": b""}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": "x" * 128, "body": b""}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": 7, "body": b""}, mq.Misuse, "BAD_TOPIC_NAME"),
    ({"topic": ["t"], "body": b""}, mq.Misuse, "BAD_TOPIC_NAME"),
    ({"topic": "t", "body": b"", "key": 7}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "key": "k" * 1025}, mq.Rejected, "KEY_TOO_LARGE"),
    ({"topic": "t", "body": b"", "key": "ü" * 513}, mq.Rejected, "KEY_TOO_LARGE"),
    ({"topic": "t", "body": b"", "key": "\ud800"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "tag": "t" * 129}, mq.Rejected, "TAG_TOO_LARGE"),
    ({"topic": "t", "body": b"", "properties": {"a": 1}}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "properties": [1]}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "properties": {"a": "x" * 40_000}}, mq.Rejected, "PROPERTIES_TOO_LARGE"),
    ({"topic": "t", "body": b"", "delay": -1}, mq.Rejected, "BAD_DELAY"),
    ({"topic": "t", "body": b"", "delay": "soon"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "delay": float("nan")}, mq.Rejected, "BAD_DELAY"),
    ({"topic": "t", "body": b"", "queue": -2}, mq.Rejected, "BAD_QUEUE"),
    ({"topic": "t", "body": b"", "queue": "1"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "message_id": 5}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": "t", "body": b"", "message_id": "\ud800"}, mq.Misuse, "BAD_ARGUMENT"),
]


@pytest.mark.invariant("I46")
@pytest.mark.parametrize(("given", "kind", "code"), BAD, ids=[f"{i}-{b[2]}" for i, b in enumerate(BAD)])
def test_bad_messages_never_leave(twin, bus, given, kind, code):
    twin.limits = {"max_body_bytes": 1000}
    with pytest.raises(kind) as raised:
        bus.producer("p").send(**given)
    assert raised.value.code.name == code
    assert twin.seen(Exchange.SEND) == []


@pytest.mark.invariant("I47")
@pytest.mark.parametrize("group", ["", "%x", "a/b", 7, "g" * 128])
def test_bad_group_names(bus, group):
    with pytest.raises(mq.EscrowError) as raised:
        bus.producer(group)
    assert raised.value.code is mq.Code.BAD_GROUP_NAME


def test_bad_columns_are_named(bus):
    producer = bus.producer("p")
    for table, what in (
        ({"topic": ["t"]}, "body"),
        ({"topic": ["t"], "body": [b""], "colour": ["red"]}, "colour"),
        ({"topic": [None], "body": [b""]}, "topic"),
        ({"topic": ["t"], "body": [b""], "delay_us": ["soon"]}, "delay_us"),
    ):
        with pytest.raises(mq.Rejected, match="BAD_BATCH") as raised:
            producer.send_batch(pa.table(table))
        assert what in raised.value.message


@pytest.mark.invariant("I35")
def test_qos_0_waits_for_nothing_and_drops_what_does_not_fit(twin, bus, monkeypatch):
    monkeypatch.setattr("escrowmq.client.producing.production.QOS_0_WAITING", 5)
    producer = bus.producer("p", qos=0)
    twin.hold(Exchange.SEND)
    for i in range(10):
        receipt = producer.send("t", str(i).encode())
        assert receipt.position == -1
    assert producer.dropped == 4
    twin.release(Exchange.SEND)
    assert producer.flush()
    assert bodies(twin) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert all(request.options["flush"] == "async" for request in twin.requests)


@pytest.mark.invariant("I9")
def test_qos_2_repeats_under_one_id_make_one_message(twin, bus):
    producer = bus.producer("p", qos=2)
    receipts = [producer.send("t", b"x", message_id="order-1") for _ in range(3)]
    assert len(set(receipts)) == 1
    assert bodies(twin) == [b"x"]


def test_several_brokers_by_key_by_turns_and_pinned(patient):
    twins = [TwinLink(shard, f"twin:{shard}") for shard in (11, 12, 13)]
    with Bus(twins) as bus:
        producer = bus.producer("p", checker=lambda check: None)
        for i in range(30):
            producer.send("t", str(i).encode(), key=f"k{i}")
        for number, twin in enumerate(twins):
            assert {row["key"] for row in twin.topics["t"]} == {
                f"k{i}" for i in range(30) if broker_of(f"k{i}", 3) == number
            }
        for _ in range(6):
            producer.send("u", b"")
        assert [len(twin.topics["u"]) for twin in twins] == [2, 2, 2]
        receipts = producer.send_batch([mq.Message("v", b"", key=f"k{i}" if i % 2 else None) for i in range(40)])
        assert receipts.ok
        without = [sum(row["key"] is None for row in twin.topics["v"]) for twin in twins]
        assert sorted(without) == [0, 0, 20]
        for _ in range(3):
            with producer.transaction() as txn:
                for i in range(10):
                    txn.send("w", b"", key=f"k{i}")
        assert [len(twin.transactions) for twin in twins].count(0) < 3
        assert all(len(t.rows) == 10 for twin in twins for t in twin.transactions.values())
        receipts = producer.prepare_batch([mq.Message("x", b"", key=f"k{i}") for i in range(30)])
        assert producer.end_batch(receipts.transactions, mq.COMMIT).ok
        assert {receipt.transaction_id.shard for receipt in receipts} == {11, 12, 13}


def test_what_was_lost_is_never_sent_to_another_broker(patient):
    twins = [TwinLink(shard) for shard in (11, 12)]
    with Bus(twins) as bus:
        producer = bus.producer("p", timeout=60)
        producer.send("t", b"0")
        producer.send("t", b"1")
        for twin in twins:
            twin.lose(Exchange.SEND, applied=True, times=2)
        producer.send("t", b"2")
        assert sorted(len(twin.topics["t"]) for twin in twins) == [1, 2]


def test_many_threads_get_their_own_receipts(twin, producer):
    found = {}

    def work(i):
        for j in range(20):
            body = f"{i}-{j}".encode()
            with producer.transaction() as txn:
                receipt = txn.send("t", body)
            found[body] = receipt.message_id

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row["body"]: row["message_id"] for row in twin.topics["t"]} == found
    assert len(found) == 320


async def test_async_callers_share_batches_and_get_their_own_receipts(twin):
    async with AsyncBus([twin]) as bus:
        producer = bus.producer("p", checker=lambda check: None)

        async def one(i):
            async with producer.transaction() as txn:
                receipt = await txn.send("t", str(i).encode())
            return receipt.message_id

        ids = await asyncio.gather(*(one(i) for i in range(500)))
        stored = {row["message_id"]: row["body"] for row in twin.topics["t"]}
        assert [stored[identity] for identity in ids] == [str(i).encode() for i in range(500)]
        assert len(twin.seen(Exchange.PREPARE)) < 100
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with producer.transaction() as txn:
                await txn.send("t", b"no")
                1 / 0
        assert twin.transactions[bytes(txn.id)].outcome is mq.ROLLBACK
        receipts = await producer.prepare_batch([mq.Message("t", b"b")] * 3)
        assert (await producer.end_batch(receipts.transactions, mq.COMMIT)).ok


async def test_async_deadlines_lost_batches_and_coroutine_checkers(twin, hurried):
    async with AsyncBus([twin]) as bus:
        producer = bus.producer("p")

        @producer.checker
        async def decide(check):
            await asyncio.sleep(0)
            return mq.COMMIT

        twin.lose(Exchange.SEND, applied=True)
        await producer.send("t", b"1")
        assert bodies(twin) == [b"1"]
        twin.hold(Exchange.SEND)
        with hurried(producer), pytest.raises(mq.Unknown, match="TIMED_OUT"):
            await producer.send("t", b"2")
        twin.release(Exchange.SEND)
        assert await producer.wait_until_listening(60)
        receipt = await producer.prepare("t", b"3")
        twin.ask(producer._production.sessions[0].number)
        while twin.transactions[bytes(receipt.transaction_id)].outcome is None:
            await asyncio.sleep(0.002)
        assert twin.transactions[bytes(receipt.transaction_id)].outcome is mq.COMMIT
