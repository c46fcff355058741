"""``once=``: the effect and the mark of the message in one transaction."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from handler_world import effects
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import escrowmq as mq
from escrowmq import outbox
from escrowmq.handlers import App, Discard
from escrowmq.outbox.engines import open_locking

Ids = Callable[[], list[str]]


def write(session: Any, body: str) -> None:
    session.execute(sa.insert(effects).values(id=body))


def repeat(bus: mq.Bus, group: str = "g") -> None:
    """Deliver all messages of the group again."""
    bus.admin.reset_group(group, "earliest")


@pytest.mark.parametrize("kind", ["engine", "sessionmaker", "connection"])
def test_a_repeat_has_no_effect(app: App, bus: mq.Bus, engine: sa.Engine, ids: Ids, kind: str) -> None:
    calls = []
    once = sessionmaker(engine) if kind == "sessionmaker" else engine
    if kind == "connection":

        @app.handler("orders", group="g", once=once)
        def by_core(body: str, connection: sa.Connection) -> None:
            calls.append(body)
            write(connection, body)
    else:

        @app.handler("orders", group="g", once=once)
        def by_orm(body: str, message: mq.Received, session: Session) -> None:
            calls.append(body)
            write(session, body)

    for body in (b"a", b"b"):
        bus.producer("p").send("orders", body)
    assert [one.outcome for one in app.run_available(bus)] == ["acked"] * 2
    repeat(bus)
    assert [one.outcome for one in app.run_available(bus)] == ["acked"] * 2
    assert ids() == sorted(calls) == ["a", "b"]


def test_a_failed_handler_leaves_neither_effect_nor_mark(app: App, bus: mq.Bus, engine: sa.Engine, ids: Ids) -> None:
    @app.handler("orders", group="g", once=engine)
    def handle(body: str, message: mq.Received, session: Session) -> None:
        write(session, body)
        if body == "never":
            raise Discard("no")
        if message.attempt == 1:
            raise ValueError("the first time")

    for body in (b"a", b"never"):
        bus.producer("p").send("orders", body)
    done: list[str] = []
    while len(done) < 3:
        done += [one.outcome for one in app.run_available(bus)]
    assert sorted(done) == ["acked", "dead", "retried"]
    assert ids() == ["a"]
    bus.admin.retry_dead_letters("g")
    assert [one.outcome for one in app.run_available(bus)] == ["dead"], "its mark was rolled back with its effect"


def test_batches_get_what_is_new(app: App, bus: mq.Bus, engine: sa.Engine, ids: Ids) -> None:
    sizes = []

    @app.handler("orders", group="g", once=engine, batch=10)
    def handle(batch: mq.ReceivedBatch, session: Session) -> None:
        sizes.append(len(batch))
        for message in batch:
            write(session, message.body.decode())

    producer = bus.producer("p")
    for body in (b"a", b"b"):
        producer.send("orders", body, queue=0)
    app.run_available(bus)
    repeat(bus)
    producer.send("orders", b"c", queue=0)
    assert [one.outcome for one in app.run_available(bus)] == ["acked"] * 3
    assert sizes == [2, 1]
    repeat(bus)
    app.run_available(bus)
    assert ids() == ["a", "b", "c"]
    assert sizes == [2, 1], "a batch of repeats does not reach the function"


@pytest.mark.parametrize("kind", ["session", "connection", "sessionmaker"])
async def test_the_same_to_await(app: App, tmp_path: Path, engine: sa.Engine, ids: Ids, kind: str) -> None:
    later = create_async_engine(f"sqlite+aiosqlite:///{engine.url.database}", connect_args={"timeout": 60.0})
    if kind == "connection":

        @app.handler("orders", group="g", once=later)
        async def by_core(body: str, connection: AsyncConnection) -> None:
            await connection.execute(sa.insert(effects).values(id=body))
    else:

        @app.handler("orders", group="g", once=later if kind == "session" else async_sessionmaker(later))
        async def by_orm(body: str, session: AsyncSession) -> None:
            await session.execute(sa.insert(effects).values(id=body))

    async with await mq.aconnect(f"file:{tmp_path / 'broker'}") as bus:
        await bus.producer("p").send("orders", b"a")
        assert [one.outcome for one in await app.arun_available(bus)] == ["acked"]
        await bus.admin.reset_group("g", "earliest")
        assert [one.outcome for one in await app.arun_available(bus)] == ["acked"]
    assert await asyncio.to_thread(ids) == ["a"]
    await later.dispose()


def test_a_database_that_is_away_costs_no_attempt(app: App, bus: mq.Bus, tmp_path: Path) -> None:
    """The message goes back, and is handled when the database is there: here, when its tables are."""
    engine = open_locking(f"sqlite:///{tmp_path / 'late.db'}")

    @app.handler("orders", group="g", once=engine)
    def handle(body: str, message: mq.Received, session: Session) -> None:
        attempts.append(message.attempt)
        write(session, body)

    attempts: list[int] = []
    outcomes: list[str] = []
    bus.producer("p").send("orders", b"a")
    with app.running(bus, on_handled=lambda handled: outcomes.append(handled.outcome)):
        while outcomes.count("released") < 5:  # more often than it has attempts
            asyncio.run(asyncio.sleep(0.01))
        effects.metadata.create_all(engine)
        outbox.migrate(engine)
        while "acked" not in outcomes:
            asyncio.run(asyncio.sleep(0.01))
    assert attempts == [1]
    engine.dispose()
