"""Handlers in a program that is killed everywhere: with ``once=`` it survives, without it the mistake is found."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

import escrowmq as mq
from escrowmq import outbox
from escrowmq.handlers import App
from escrowmq.testing import World, crash_everywhere

metadata = sa.MetaData()
points = sa.Table("points", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("buyer", sa.String(10)))


def tables(world: World) -> None:
    metadata.create_all(world.engine())
    outbox.migrate(world.engine())


def shop(world: World) -> None:
    producer = world.bus().producer("shop", qos=2)
    producer.send("orders", b"one book", key="o-1", message_id="o-1")


def club(world: World) -> None:
    app = App()

    @app.handler("orders", group="club", once=world.engine())
    def give(body: bytes, message: mq.Received, connection: sa.Connection) -> None:
        connection.execute(points.insert(), {"buyer": message.key})

    app.run_available(world.bus())


def club_without_once(world: World) -> None:
    app, engine = App(), world.engine()

    @app.handler("orders", group="club")
    def give(body: bytes, message: mq.Received) -> None:
        with engine.begin() as connection:
            connection.execute(points.insert(), {"buyer": message.key})

    app.run_available(world.bus())


async def club_of_asyncio(world: World) -> None:
    app = App()

    @app.handler("orders", group="club", once=world.async_engine())
    async def give(body: bytes, message: mq.Received, connection: AsyncConnection) -> None:
        await connection.execute(points.insert(), {"buyer": message.key})

    await app.arun_available(await world.abus())


SIDES: dict[str, Any] = {"setup": tables, "sent": "orders", "effects": "SELECT buyer FROM points"}


@pytest.mark.parametrize("consumer", [club, club_of_asyncio])
def test_once_survives_everywhere(consumer: Callable[[World], object]) -> None:
    assert "COMMIT of INSERT INTO trans_recv_log, INSERT INTO points" in {
        step.text for step in crash_everywhere(shop, consumer, **SIDES).steps
    }


def test_a_handler_without_once_is_found() -> None:
    with pytest.raises(AssertionError, match="o-1: sent once, effects twice"):
        crash_everywhere(shop, club_without_once, **SIDES)
