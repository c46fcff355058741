"""Everything to await: sessions, transactions, checkers, over the asynchronous drivers of the three databases."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from barrier_race import AsyncLater, Later, orders
from outbox_world import patience, to_await
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine

import escrowmq as mq
from escrowmq import outbox
from escrowmq.model import Check, TransactionId
from escrowmq.outbox import AsyncBarrier, aio

QUICK = {"transaction_timeout": 0.2, "check_interval": 0.2, "check_max": 1_000_000}


def txn(number):
    return TransactionId(5, 5, number)


@pytest.fixture
async def async_shop(shop):
    engine = create_async_engine(to_await(shop.url.render_as_string(hide_password=False)), **patience(shop.url))
    yield engine
    await engine.dispose()


@pytest.fixture
async def async_bus(tmp_path):
    async with await mq.aconnect(f"file:{tmp_path / 'broker'}", **QUICK) as bus:
        yield bus


async def until(condition):
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.005)


async def state(bus, bound):
    return (await bus.admin.transaction(bound.id))["state"]


async def test_sessions_and_connections_bind_and_the_barrier_answers(async_shop):
    async with AsyncSession(async_shop) as session, session.begin():
        await outbox.aio.bind_tx(session, txn(1))
    registry = async_scoped_session(async_sessionmaker(async_shop), asyncio.current_task)
    await aio.bind_tx(registry, txn(2))
    await registry.rollback()
    await registry.remove()
    async with async_shop.begin() as connection:
        await aio.bind_batch_tx(connection, [txn(3), txn(4)])
    barrier = AsyncBarrier(async_shop, wait=0.05)
    async with async_shop.connect() as connection:
        await aio.bind_tx(connection, txn(5))
        assert await barrier.decide(txn(5)) is mq.UNKNOWN
        await connection.rollback()
    assert (await barrier.decide_ids([txn(number) for number in range(1, 6)])).tolist() == [1, 2, 1, 1, 2]
    assert await barrier(Check(txn(1), 1, ())) is mq.COMMIT
    with pytest.raises(mq.Fenced):
        async with async_shop.begin() as connection:
            await aio.bind_tx(connection, txn(5))
    with pytest.raises(mq.Misuse, match="not an asynchronous session"):
        await aio.bind_tx(async_shop, txn(1))
    with pytest.raises(mq.Misuse, match=r"NO_TRANSACTION.*async with"):
        await aio.bind_tx(async_shop.connect(), txn(1))
    assert await barrier.purge(7 * 86400.0) == 0


def test_what_is_no_asynchronous_engine_is_no_asynchronous_barrier(engine):
    with pytest.raises(mq.Misuse, match="asynchronous producers too"):
        AsyncBarrier(engine)


async def test_three_lines_and_the_check_back(async_shop, async_bus):
    checker = AsyncLater(async_shop, wait=0.05)
    producer = async_bus.producer("p", checker=checker)
    async with producer.transaction() as done, AsyncSession(async_shop) as session, session.begin():
        await done.send("t", b"done")
        await session.execute(orders.insert(), {"id": 1})
        await aio.bind_tx(session, done)
    assert await state(async_bus, done) == "committed"

    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with producer.transaction() as failed, AsyncSession(async_shop) as session, session.begin():
            await failed.send("t", b"failed")
            await aio.bind_tx(session, failed)
            1 / 0
    assert await state(async_bus, failed) == "rolled_back"

    async with producer.transaction() as left:
        await left.send("t", b"left")
        async with async_shop.begin() as connection:
            await aio.bind_tx(connection, left)
        left.leave_undecided()
    checker.may_answer.set()
    await until(lambda: is_now(async_bus, left, "committed"))


async def is_now(bus, bound, wanted):
    return await state(bus, bound) == wanted


async def test_an_asynchronous_producer_over_a_blocking_database(shop, async_bus):
    checker = Later(shop, wait=0.05)
    producer = async_bus.producer("p", checker=checker)
    async with producer.transaction() as bound:
        await bound.send("t", b"x")
        with shop.begin() as connection:
            outbox.bind_tx(connection, bound)
    assert await state(async_bus, bound) == "committed"
    async with producer.transaction() as left:
        await left.send("t", b"y")
        left.leave_undecided()
    checker.may_answer.set()
    await until(lambda: is_now(async_bus, left, "rolled_back"))


async def test_a_blocking_transaction_cannot_wait_for_an_asynchronous_database(async_shop, tmp_path):
    def attempt(connection):
        with mq.connect(f"file:{tmp_path / 'blocking'}") as bus:
            producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
            with producer.transaction() as bound:
                bound.send("t", b"x")
                outbox.bind_tx(connection, bound)

    with pytest.raises(mq.Misuse, match="cannot await"):
        async with async_shop.connect() as connection:
            await connection.run_sync(attempt)


async def test_a_commit_whose_answer_is_lost(async_shop, async_bus, monkeypatch):
    producer = async_bus.producer("p", checker=AsyncLater(async_shop))
    real = async_shop.dialect.do_commit

    def lost(connection):
        real(connection)
        monkeypatch.setattr(async_shop.dialect, "do_commit", real)
        raise sa.exc.OperationalError("COMMIT", {}, Exception("server closed the connection unexpectedly"))

    with pytest.raises(sa.exc.OperationalError) as raised:  # noqa: PT012
        async with producer.transaction() as bound, AsyncSession(async_shop) as session, session.begin():
            await bound.send("t", b"x")
            await aio.bind_tx(session, bound)
            monkeypatch.setattr(async_shop.dialect, "do_commit", lost)
    assert await state(async_bus, bound) == "committed"
    assert any("the database had committed" in note for note in raised.value.__notes__)
