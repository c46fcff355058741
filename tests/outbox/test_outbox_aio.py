"""The same names to await, on real asynchronous drivers of all three databases."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from outbox_world import Order, agree, patience, to_await
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox import State, aio, attention
from escrowmq.outbox.tables import SCHEMA_VERSION, trans_message


@pytest.fixture
async def waiting_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(to_await(database_url), **patience(sa.make_url(database_url)))
    yield engine
    await engine.dispose()


async def place(session: AsyncSession, number: int) -> None:
    session.add(Order(id=number))
    await aio.send_tx(session, "orders", b"placed", key=str(number))


async def test_everything_from_migrate_to_retry(engine: sa.Engine, waiting_engine: AsyncEngine) -> None:
    async with waiting_engine.connect() as connection:
        with pytest.raises(mq.Misuse, match="NO_TABLES"):
            await aio.check_schema(connection)
        with pytest.raises(mq.Misuse, match="NO_TABLES"):
            await aio.send_tx(connection, "orders", b"x")
    assert await aio.migrate(waiting_engine) == 0
    async with waiting_engine.begin() as connection:
        assert await aio.migrate(connection) == SCHEMA_VERSION
        await aio.check_schema(connection)
        identity = await aio.send_tx(connection, mq.Message("orders", b"1", message_id="o-1"))
        ids = await aio.send_batch_tx(connection, pa.table({"topic": ["orders"] * 3, "body": [b"2"] * 3}))
        await aio.confirm_tx(connection, identity)
        await aio.confirm_batch_tx(connection, ids, "orders.done")
    async with waiting_engine.begin() as connection:
        message = SimpleNamespace(message_id=identity)
        assert await aio.claim_tx(connection, message, group="cart")
        assert not await aio.claim_tx(connection, message_id=identity, group="cart")
        assert await aio.claim_batch_tx(connection, [identity, *ids], "cart") == [False, True, True, True]
    assert await aio.mark_done(waiting_engine, [identity]) == 1
    (done,) = await aio.list_messages(waiting_engine, state=State.DONE)
    assert done == attention.list_messages(engine, state=State.DONE)[0]
    assert (await aio.show(waiting_engine, identity)).body == b"1"
    assert [d.code.name for d in await aio.discard(waiting_engine, ids[:1], by="ada")] == ["OK"]
    assert [d.code.name for d in await aio.retry(waiting_engine, ids[:2], by="ada")] == ["OK", "CONFLICT"]
    assert await aio.purge_seen(waiting_engine, 0) == 4


@pytest.mark.invariant("I37")
async def test_i37_to_await(shop: sa.Engine, waiting_engine: AsyncEngine) -> None:
    made = async_sessionmaker(waiting_engine)
    async with made() as session, session.begin():
        await place(session, 1)
        async with session.begin_nested():
            await place(session, 2)
        inner = await session.begin_nested()
        await place(session, 3)
        await inner.rollback()
    async with made() as session:
        await place(session, 4)
        await session.rollback()
        await place(session, 5)
        await session.commit()
        await place(session, 6)
    async with made() as session:
        await place(session, 7)
        await place(session, 1)
        with pytest.raises(IntegrityError):
            await session.commit()
    registry = async_scoped_session(made, asyncio.current_task)
    registry.add(Order(id=8))
    await aio.send_tx(registry, "orders", b"placed", key="8")
    await registry.commit()
    await registry.remove()
    assert agree(shop) == {"1", "2", "5", "8"}


@pytest.mark.invariant("I37")
async def test_i37_a_task_cancelled_in_the_middle(shop: sa.Engine, waiting_engine: AsyncEngine) -> None:
    placed = asyncio.Event()

    async def work() -> None:
        async with AsyncSession(waiting_engine) as session, session.begin():
            await place(session, 1)
            placed.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await placed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with AsyncSession(waiting_engine) as session, session.begin():
        await place(session, 2)
    assert agree(shop) == {"2"}


@pytest.mark.invariant("I24")
async def test_many_claims_at_once_are_true_once(shop: sa.Engine, waiting_engine: AsyncEngine) -> None:
    async def claim() -> bool:
        async with AsyncSession(waiting_engine) as session, session.begin():
            return await aio.claim_tx(session, message_id="o-1", group="cart")

    assert sorted(await asyncio.gather(*(claim() for _ in range(5)))) == [False] * 4 + [True]


async def test_sessions_that_cannot_hold_a_message(shop: sa.Engine, waiting_engine: AsyncEngine) -> None:
    loose = waiting_engine.execution_options(isolation_level="AUTOCOMMIT")
    async with loose.connect() as connection, AsyncSession(loose) as session:
        for refused in (connection, session):
            with pytest.raises(mq.Misuse, match="NO_TRANSACTION"):
                await aio.send_tx(refused, "orders", b"x")
            with pytest.raises(mq.Misuse, match="NO_TRANSACTION"):
                await aio.claim_tx(refused, message_id="x", group="cart")
    with pytest.raises(mq.Misuse, match=r"NO_TRANSACTION.*async with"):
        await aio.send_tx(waiting_engine.connect(), "orders", b"x")
    async with waiting_engine.connect() as connection:
        pass
    with pytest.raises(mq.Misuse, match="NO_TRANSACTION"):
        await aio.send_tx(connection, "orders", b"x")
    with Session(shop) as blocking, pytest.raises(mq.Misuse, match=r"blocking ones are in escrowmq\.outbox"):
        await aio.send_tx(blocking, "orders", b"x")  # type: ignore[arg-type]
    with pytest.raises(mq.Misuse, match="AsyncEngine"):
        await aio.migrate(shop)  # type: ignore[arg-type]
    with shop.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(trans_message)) == 0


def test_the_two_faces_have_the_same_names_parameters_and_documentation() -> None:
    """Whatever takes a session, a connection or an engine can be awaited; only that first argument differs."""
    public = {name: getattr(outbox, name) for name in outbox.__all__}
    for module in (outbox.attention, outbox.handled, outbox.inbox):
        public |= {n: a for n, a in vars(module).items() if getattr(a, "__module__", "") == module.__name__}
    public |= {act.__name__: act for act in (outbox.acts.list_acts, outbox.acts.verify_acts)}
    functions = {n: a for n, a in public.items() if inspect.isfunction(a) and not n.startswith("_")}
    taking = {n: a for n, a in functions.items() if [*inspect.signature(a).parameters, ""][0] in FIRST}
    awaited = {
        name: act for name, act in vars(aio).items() if inspect.iscoroutinefunction(act) and act is not aio.consume
    }
    assert awaited.keys() == taking.keys()
    for name, act in awaited.items():
        same_parameters(act, taking[name])
    methods = [n for n, a in vars(outbox.Barrier).items() if callable(a) and (n == "__call__" or not n.startswith("_"))]
    assert methods == [n for n, a in vars(outbox.AsyncBarrier).items() if inspect.iscoroutinefunction(a)]
    for name in methods:
        same_parameters(getattr(outbox.AsyncBarrier, name), getattr(outbox.Barrier, name))


FIRST = ("session", "engine", "connection")


def same_parameters(awaited: Any, act: Any) -> None:
    (own, *rest), (other, *others) = (list(inspect.signature(each).parameters.values()) for each in (awaited, act))
    assert (own.name, rest) == (other.name, others), act
    assert own.annotation != other.annotation or own.name == "self", act
    assert awaited.__doc__ == act.__doc__


async def test_the_session_may_be_named(shop: sa.Engine, waiting_engine: AsyncEngine) -> None:
    async with waiting_engine.begin() as connection:
        await aio.send_tx(session=connection, topic="orders", body=b"x")  # type: ignore[call-arg]
    assert len(await aio.list_messages(waiting_engine, state=None)) == 1


async def test_a_blocking_call_names_the_asynchronous_one(waiting_engine: AsyncEngine) -> None:
    from escrowmq.outbox import migrate, send_tx

    thing: Any = AsyncSession(waiting_engine)
    with pytest.raises(mq.Misuse, match=r"outbox\.aio"):
        send_tx(thing, "orders", b"x")
    with pytest.raises(mq.Misuse, match=r"outbox\.aio"):
        migrate(waiting_engine)  # type: ignore[arg-type]


async def test_consume_is_awaited_and_stops_between_messages(
    engine: sa.Engine, waiting_engine: AsyncEngine, tmp_path: Any
) -> None:
    await aio.migrate(waiting_engine)
    Order.metadata.create_all(engine)
    done: list[bytes] = []
    async with await mq.aconnect(f"file:{tmp_path / 'broker'}") as bus:
        for number in range(6):
            await bus.producer("shop").send("orders", b"%d" % number, queue=0)
        consumer = await bus.consumer("cart", ["orders"])

        async def place(session: AsyncSession, message: Any) -> None:
            session.add(Order(id=int(message.body)))
            done.append(message.body)

        database = async_sessionmaker(waiting_engine)
        assert await aio.consume(consumer, database, place, stop=lambda: len(done) >= 2) == 2
        rest = 0
        while len(done) < 6:
            rest += await aio.consume(consumer, database, place, idle_timeout=0.5)
        assert rest == 4
        await consumer.flush()
    async with AsyncSession(waiting_engine) as session:
        assert sorted(await session.scalars(sa.select(Order.id))) == list(range(6))
    assert len(done) == 6
