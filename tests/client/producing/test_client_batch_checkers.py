"""Checkers that take whole batches, and transactions whose end is somebody else's to say."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq import schemas
from escrowmq.client.aio import AsyncBus
from escrowmq.client.bus import Bus
from escrowmq.model import DecidedBy
from escrowmq.testing.link import TwinLink
from escrowmq.wire import Exchange


@pytest.fixture
def twin():
    return TwinLink()


def left(producer, count, topic="t"):
    """Undecided transactions of two messages each."""
    ids = []
    for number in range(count):
        with producer.transaction() as txn:
            txn.send(topic, b"%d" % number)
            txn.send(topic, b"more")
            txn.leave_undecided()
        ids.append(bytes(txn.id))
    return ids


def answers(twin):
    """The END batches by CHECK, as lists of (id, outcome)."""
    found = [r for r in twin.requests if r.kind is Exchange.END and r.options.get("by") == DecidedBy.CHECK]
    return [list(zip(*(c.to_pylist() for c in r.batch.columns), strict=True)) for r in found]


def asked_by(twin, eventually):
    eventually(lambda: twin.streams)
    (session,) = twin.streams
    twin.ask(session)


class ById:
    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def decide_ids(self, ids):
        self.calls.append(ids)
        return self.answer(ids)


class AsyncById(ById):
    async def decide_ids(self, ids):
        await asyncio.sleep(0)
        return ById.decide_ids(self, ids)


class ByBatch:
    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def decide_batch(self, checks):
        self.calls.append(list(checks))
        return self.answer(checks)


def alternately(ids):
    return np.arange(len(ids), dtype=np.uint8) % 3


@pytest.mark.parametrize(("kind", "face"), [(ById, "sync"), (ById, "async"), (AsyncById, "async")])
async def test_ids_come_as_columns_and_are_answered_in_one_request(twin, eventually, kind, face):
    checker = kind(alternately)

    def at_work():
        with Bus([twin]) as bus:
            ids = left(bus.producer("p", checker=lambda check: mq.UNKNOWN), 9)
            twin.streams.clear()
            return ids

    ids = await asyncio.to_thread(at_work)
    bus = AsyncBus([twin]) if face == "async" else Bus([twin])
    bus.producer("p", checker=checker)
    await asyncio.to_thread(asked_by, twin, eventually)
    while not answers(twin):
        await asyncio.sleep(0.001)
    await bus.close() if face == "async" else bus.close()
    ((answered,), (call,)) = answers(twin), checker.calls
    assert call.type == schemas.ID
    assert call.to_pylist() == ids
    assert answered == [(identity, row % 3) for row, identity in enumerate(ids)]


def test_a_whole_batch_is_answered_by_one_call(twin, eventually):
    checker = ByBatch(lambda checks: [mq.COMMIT, mq.UNKNOWN, mq.ROLLBACK, mq.UNKNOWN])
    with Bus([twin]) as bus:
        producer = bus.producer("p")
        assert producer.checker(checker) is checker
        ids = left(producer, 4)
        asked_by(twin, eventually)
        eventually(lambda: answers(twin))
    (checks,) = checker.calls
    assert [len(check.messages) for check in checks] == [2, 2, 2, 2]
    assert [bytes(check.transaction_id) for check in checks] == ids
    assert answers(twin) == [list(zip(ids, [1, 0, 2, 0], strict=True))]


def test_ids_are_preferred_to_objects(twin, eventually):
    class Both(ById, ByBatch):
        pass

    with Bus([twin]) as bus:
        checker = Both(alternately)
        left(bus.producer("p", checker=checker), 2)
        asked_by(twin, eventually)
        eventually(lambda: answers(twin))
    assert all(isinstance(call, pa.FixedSizeBinaryArray) for call in checker.calls)


@pytest.mark.parametrize(
    "bad",
    [
        lambda ids: 1 / 0,
        lambda ids: np.ones(len(ids) + 1, np.uint8),
        lambda ids: np.full(len(ids), 7, np.uint8),
        lambda ids: np.full(len(ids), 1.0),
        lambda ids: None,
        lambda ids: [mq.COMMIT],
    ],
)
@pytest.mark.parametrize("kind", [ById, ByBatch])
def test_what_fails_or_makes_no_sense_is_unknown_for_all(twin, eventually, kind, bad, caplog):
    with Bus([twin]) as bus:
        ids = left(bus.producer("p", checker=kind(bad)), 3)
        asked_by(twin, eventually)
        eventually(lambda: answers(twin))
    (answered,) = answers(twin)
    assert answered == [(identity, 0) for identity in ids]
    assert "3 questions open" in caplog.text or caplog.text.count("1 questions open") == 1


def test_a_broker_with_small_batches_is_answered_in_several(twin, eventually):
    twin.limits = {"max_batch_rows": 2}
    with Bus([twin]) as bus:
        ids = left(bus.producer("p", checker=ById(lambda ids: np.ones(len(ids), np.uint8))), 5)
        asked_by(twin, eventually)
        eventually(lambda: sum(map(len, answers(twin))) == 5)
    assert [len(part) for part in answers(twin)] == [2, 2, 1]
    assert [identity for part in answers(twin) for identity, _ in part] == ids


def test_no_checker_at_all_is_refused(twin):
    with Bus([twin]) as bus, pytest.raises(mq.Misuse, match="decide_ids"):
        bus.producer("p", checker=3)


# Bound transactions


@pytest.fixture
def producer(twin):
    with Bus([twin]) as bus:
        yield bus.producer("p", checker=lambda check: mq.UNKNOWN)


def outcome(twin, txn):
    return twin.transactions[bytes(txn.id)].outcome


def test_a_bound_transaction_that_raised_ends_as_the_database_says(twin, producer):
    with pytest.raises(ZeroDivisionError) as raised, producer.transaction() as txn:  # noqa: PT012
        txn.send("t", b"x")
        txn.settle_by(lambda identity: mq.COMMIT)
        1 / 0
    assert outcome(twin, txn) is mq.COMMIT
    assert "the database had committed" in raised.value.__notes__[0]


def test_a_bound_transaction_that_did_not_commit_is_rolled_back_and_told(twin, producer):
    with pytest.raises(mq.Rejected, match="did not commit"), producer.transaction() as txn:  # noqa: PT012
        txn.send("t", b"x")
        txn.settle_by(lambda identity: mq.ROLLBACK)
    assert outcome(twin, txn) is mq.ROLLBACK


@pytest.mark.parametrize("told", [[mq.UNKNOWN], [mq.COMMIT, mq.ROLLBACK], [mq.COMMIT, ValueError("away")]])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_is_not_known_is_left_to_the_check_back(twin, producer, told, end, caplog):
    def ask(answer):
        def asked(identity):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return asked

    with pytest.raises(mq.Unknown, match="check-back"), producer.transaction() as txn:  # noqa: PT012
        txn.send("t", b"x")
        for answer in told:
            txn.settle_by(ask(answer))
        getattr(txn, end)()
    assert outcome(twin, txn) is None
    assert "left to the check-back" in repr(txn)


@pytest.mark.parametrize("told", [mq.COMMIT, mq.ROLLBACK, mq.UNKNOWN])
@pytest.mark.parametrize("raising", [False, True])
async def test_a_bound_transaction_to_await(twin, told, raising):
    async def ask(identity):
        assert identity == txn.id
        return told

    bus = AsyncBus([twin])
    wrong = {mq.COMMIT: None, mq.ROLLBACK: mq.Rejected, mq.UNKNOWN: mq.Unknown}[told]
    expected = ZeroDivisionError if raising else wrong
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        async with bus.producer("p", checker=lambda check: mq.UNKNOWN).transaction() as txn:
            await txn.send("t", b"x")
            txn.settle_by(ask)
            if raising:
                1 / 0
    assert outcome(twin, txn) == (told if told is not mq.UNKNOWN else None)
    await bus.close()
