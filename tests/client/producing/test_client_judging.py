"""Answers of checkers and local transactions that are no outcome: never taken for one, never silent, asked about
again."""

from __future__ import annotations

import asyncio
import enum
import logging

import pytest

import escrowmq as mq
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.client.producing.judging import MOST_CAUSES, Judge
from escrowmq.wire import Exchange


class Other(enum.IntEnum):
    COMMIT = 1


async def coroutine(*_):
    return mq.COMMIT


NO_OUTCOMES = ["COMMIT", True, None, 1, Other.COMMIT, ValueError("returned"), [mq.COMMIT]]


@pytest.fixture
def left(twin):
    """Transactions that are left undecided, and the session that is asked about them."""

    def leave(count):
        with Bus([twin]) as bus:
            making = bus.producer("p", checker=lambda check: mq.UNKNOWN)
            assert making.wait_until_listening(60)
            ids = [bytes(making.prepare("t", b"x").transaction_id) for _ in range(count)]
        twin.streams.clear()
        return ids

    return leave


def answers(twin):
    return [(row["transaction"], row["outcome"]) for batch in twin.seen(Exchange.END) for row in batch.to_pylist()]


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("given", NO_OUTCOMES, ids=repr)
@pytest.mark.parametrize("face", [Bus, AsyncBus])
async def test_what_is_no_outcome_decides_nothing_and_is_said_once(twin, left, eventually, caplog, face, given):
    ids = await asyncio.to_thread(left, 3)

    def decide(check):
        return given

    bus = face([twin])
    producer = bus.producer("p", checker=decide)
    await asyncio.to_thread(eventually, lambda: twin.streams)
    for _ in range(2):
        await asyncio.to_thread(twin.ask, next(iter(twin.streams)))
    await asyncio.to_thread(eventually, lambda: producer.unanswered == 6)
    await bus.close() if face is AsyncBus else bus.close()
    assert set(answers(twin)) == {(identity, 0) for identity in ids}
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "decide" in said[0].getMessage()
    assert "NO_OUTCOME" in said[0].getMessage()
    assert all(transaction.outcome is None for transaction in twin.transactions.values())


def test_in_a_batch_it_spoils_no_other(twin, left, eventually, caplog):
    class Checker:
        def decide_batch(self, checks):
            return [mq.COMMIT, "COMMIT", mq.ROLLBACK]

    ids = left(3)
    with Bus([twin]) as bus:
        producer = bus.producer("p", checker=Checker())
        eventually(lambda: twin.streams)
        twin.ask(next(iter(twin.streams)))
        eventually(lambda: answers(twin))
    assert answers(twin) == list(zip(ids, [1, 0, 2], strict=True))
    assert producer.unanswered == 1
    assert "Checker" in caplog.text


async def test_a_plain_function_that_returns_a_coroutine_is_awaited(twin, left, eventually):
    (identity,) = await asyncio.to_thread(left, 1)
    bus = AsyncBus([twin])
    producer = bus.producer("p", checker=lambda check: coroutine())
    await asyncio.to_thread(eventually, lambda: twin.streams)
    await asyncio.to_thread(twin.ask, next(iter(twin.streams)))
    await asyncio.to_thread(eventually, lambda: answers(twin))
    await bus.close()
    assert answers(twin) == [(identity, 1)]
    assert producer.unanswered == 0


def test_where_nothing_awaits_a_coroutine_function_is_refused(twin, left, eventually, caplog):
    class Batches:
        async def decide_batch(self, checks):
            return [mq.COMMIT for _ in checks]

    class Called:
        async def __call__(self, check):
            return mq.COMMIT

    left(1)
    with Bus([twin]) as bus:
        for checker in (coroutine, Batches(), Called()):
            with pytest.raises(mq.Misuse, match="aconnect"):
                bus.producer("p", checker=checker)
        producer = bus.producer("p", checker=lambda check: coroutine())
        eventually(lambda: twin.streams)
        twin.ask(next(iter(twin.streams)))
        eventually(lambda: producer.unanswered)
        eventually(lambda: "nothing awaits" in caplog.text)  # it is counted before it is logged


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("given", NO_OUTCOMES, ids=repr)
@pytest.mark.parametrize("face", [Bus, AsyncBus])
async def test_a_local_transaction_without_an_outcome_is_misuse_and_left_undecided(twin, face, given):
    bus = face([twin])
    producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)

    async def call():
        await producer.send_in_transaction(mq.Message("t", b"x"), lambda message, arg: given)

    with pytest.raises(mq.Misuse, match=r"NO_OUTCOME.*local transaction of 00000001-1-"):
        await call()
    await bus.close() if face is AsyncBus else bus.close()
    (transaction,) = twin.transactions.values()
    assert transaction.outcome is None
    assert not twin.seen(Exchange.END)


def test_a_local_transaction_to_await_is_misuse_where_nothing_awaits(twin):
    with Bus([twin]) as bus:
        producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
        with pytest.raises(mq.Misuse, match="nothing awaits"):
            producer.send_in_transaction(mq.Message("t", b"x"), coroutine)


@pytest.mark.parametrize("given", NO_OUTCOMES, ids=repr)
def test_a_database_without_an_outcome_ends_no_transaction(twin, given):
    with Bus([twin]) as bus:
        producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
        txn = producer.transaction()
        txn.send("t", b"x")
        txn.settle_by(lambda identity: given)
        with pytest.raises(mq.Misuse, match="NO_OUTCOME"):
            txn.commit()
        assert "left to the check-back" in repr(txn)
    assert twin.transactions[bytes(txn.id)].outcome is None


@pytest.mark.parametrize("outcomes", [True, Other.COMMIT, [True], [Other.COMMIT], ["COMMIT"], "COMMIT", None, [None]])
def test_a_batch_of_decisions_takes_outcomes_only(twin, outcomes):
    with Bus([twin]) as bus:
        producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
        receipt = producer.prepare("t", b"x")
        with pytest.raises(mq.Misuse, match="COMMIT, ROLLBACK or UNKNOWN"):
            producer.end_batch([receipt.transaction_id], outcomes)
        assert producer.end_batch([receipt.transaction_id], mq.COMMIT).ok


def test_a_cause_that_is_never_the_same_twice_fills_neither_log_nor_memory(caplog):
    judge = Judge(coroutine, logging.getLogger("here"))
    for number in range(10 * MOST_CAUSES):
        assert judge.one(number) is mq.UNKNOWN
    assert len(caplog.records) == MOST_CAUSES
    assert judge.unanswered == 10 * MOST_CAUSES
