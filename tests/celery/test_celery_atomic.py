"""``atomic``: what is in the outbox after the transaction, and what is sent at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, chain, group
from kombu.exceptions import OperationalError
from placing_orders import Order, make_tables
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import escrowmq as mq
from escrowmq import outbox
from escrowmq.celery import atomic
from escrowmq.errors import Code, Misuse
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq_lab.servers.process import free_port


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 60.0})
    make_tables(engine)
    yield engine
    engine.dispose()


def application(url: str, queue: str = "celery") -> tuple[Celery, Any]:
    app = Celery("shop", broker_url=url, broker_connection_timeout=60.0)
    app.conf.update(task_default_queue=queue, task_publish_retry=False)

    @app.task(name="ship", ignore_result=True)
    def ship(order: str) -> None:
        raise AssertionError("nobody works here")

    return app, ship


@pytest.fixture
def ship() -> Iterator[Any]:
    """The task of an application whose broker is away: all that is sent at once fails."""
    app, task = application(f"escrow://127.0.0.1:{free_port()}")
    app.conf.broker_connection_timeout = 0.1
    yield task
    app.close()


def stored(engine: sa.Engine) -> list[str]:
    """The orders that the tasks in the outbox are about."""
    with engine.connect() as connection:
        bodies = connection.scalars(sa.select(outbox.tables.trans_message.c.body)).all()
    return sorted(order_of(body) for body in bodies)


def order_of(body: bytes) -> str:
    return str(json.loads(json.loads(body)["body"])[0][0])


def orders(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.scalars(sa.select(Order.id)))


def test_a_task_stands_and_falls_with_the_transaction(engine: sa.Engine, ship: Any) -> None:
    with Session(engine) as session:
        for name, commits in (("a", True), ("b", False), ("c", True)):
            session.add(Order(id=name))
            with atomic(session):
                ship.delay(name)
            (session.commit if commits else session.rollback)()
        session.add(Order(id="d"))
        inner = session.begin_nested()
        session.add(Order(id="e"))
        with atomic(session):
            ship.delay("e")
        inner.rollback()
        with atomic(session):
            ship.apply_async(("d",))
        session.commit()
    assert stored(engine) == orders(engine) == ["a", "c", "d"]


@pytest.mark.parametrize("kind", ["connection", "scoped session"])
def test_connections_and_scoped_sessions_are_sessions(engine: sa.Engine, ship: Any, kind: str) -> None:
    if kind == "connection":
        with engine.begin() as connection, atomic(connection):
            ship.delay("a")
    else:
        session = scoped_session(sessionmaker(engine))
        with atomic(session):
            ship.delay("a")
        session.commit()
        session.remove()
    assert stored(engine) == ["a"]


def test_groups_and_signatures_are_stored_and_of_a_chain_the_first(engine: sa.Engine, ship: Any) -> None:
    with Session(engine) as session, session.begin(), atomic(session):
        group(ship.si("a"), ship.si("b")).apply_async()
        chain(ship.si("c"), ship.si("d")).apply_async()
        ship.s("e").delay()
    assert stored(engine) == ["a", "b", "c", "e"]


def test_a_countdown_is_the_delay_of_the_message(engine: sa.Engine, ship: Any) -> None:
    with Session(engine) as session, session.begin(), atomic(session):
        ship.apply_async(("a",), countdown=3600)
        ship.apply_async(("b",), countdown=10**9)
    with engine.connect() as connection:
        table = outbox.tables.trans_message
        soon, latest = sorted(connection.scalars(sa.select(table.c.delay_us)))
    assert 3000e6 < soon <= 3600e6
    assert latest == 40 * 86400e6, "the worker holds it for the rest of the time"


def test_the_inner_session_counts(engine: sa.Engine, tmp_path: Path, ship: Any) -> None:
    other = sa.create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    make_tables(other)
    with Session(engine) as session, session.begin(), atomic(session):
        ship.delay("a")
        with Session(other) as inner, inner.begin(), atomic(inner):
            ship.delay("b")
        ship.delay("c")
    assert (stored(engine), stored(other)) == (["a", "c"], ["b"])
    other.dispose()


def test_other_threads_and_tasks_have_their_own_sessions(engine: sa.Engine, ship: Any) -> None:
    problems: list[BaseException] = []

    def send() -> None:
        try:
            ship.delay("x")
        except OperationalError as problem:
            problems.append(problem)

    with Session(engine) as session, session.begin(), atomic(session):
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        ship.delay("a")
    assert len(problems) == 1, "it was sent at once, and its broker is away"
    assert stored(engine) == ["a"]

    async def place(name: str, both: asyncio.Barrier, commits: bool) -> None:
        async with AsyncSession(to_await) as session, session.begin() as transaction:
            session.add(Order(id=name))
            await both.wait()

            def write(inside: Session) -> None:
                with atomic(inside):
                    ship.delay(name)

            await session.run_sync(write)
            if not commits:
                await transaction.rollback()

    async def main() -> None:
        both = asyncio.Barrier(2)
        await asyncio.gather(place("b", both, True), place("c", both, False))
        await to_await.dispose()

    to_await = create_async_engine(f"sqlite+aiosqlite:///{engine.url.database}", connect_args={"timeout": 60.0})
    asyncio.run(main())
    assert stored(engine) == ["a", "b"]


def test_wrong_uses_are_told(engine: sa.Engine, ship: Any) -> None:
    with pytest.raises(Misuse, match="AsyncSession is not a session"), atomic(AsyncSession()):  # type: ignore[arg-type]
        ship.delay("a")
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(Misuse) as refused, atomic(connection):
        ship.delay("a")
    assert refused.value.code is Code.NO_TRANSACTION
    app, elsewhere = application("memory://")
    with Session(engine) as session, session.begin() as transaction:
        with pytest.raises(Misuse, match="ship was sent at once"), atomic(session):
            elsewhere.delay("a")
        transaction.rollback()
    app.close()
    assert stored(engine) == []


def test_after_the_block_tasks_are_sent_at_once_and_the_relay_sends_the_others(
    engine: sa.Engine, shared_broker: str, t: str
) -> None:
    app, ship = application(shared_broker, t)
    with Session(engine) as session:
        with atomic(session):
            ship.delay("by the relay")
        ship.delay("at once")
        session.commit()
    with Relay(engine, target := EscrowTarget(shared_broker)) as relay:
        relay.stop()
        assert relay.drain()
    target.close()
    with mq.connect(shared_broker) as bus:
        rows = bus.admin.read(t).read_all().to_pylist()
    assert sorted(order_of(row["body"]) for row in rows) == ["at once", "by the relay"]
    first, second = (json.loads(row["body"]) for row in rows)
    assert first.keys() == second.keys()
    assert {name: first["headers"][name] for name in ("lang", "task")} == {"lang": "py", "task": "ship"}
    assert all(dict(row["properties"])["id"] == json.loads(row["body"])["headers"]["id"] for row in rows)
    app.close()
