"""``crash_everywhere`` finds mistakes that are planted in a user's program, and accepts correct programs."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox import aio, inbox
from escrowmq.outbox.relay.relay import Relay
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq.testing import Survived, World, crash_everywhere

metadata = sa.MetaData()
orders = sa.Table("orders", metadata, sa.Column("id", sa.String(10), primary_key=True), sa.Column("todo", sa.Boolean))
points = sa.Table("points", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("buyer", sa.String(10)))


def tables(world: World) -> None:
    for name in ("shop", "club"):
        metadata.create_all(world.engine(name))
        outbox.migrate(world.engine(name))


def ids(name: str, column: sa.Column[Any]) -> Callable[[World], list[str]]:
    def read(world: World) -> list[str]:
        with world.engine(name).connect() as connection:
            return list(connection.scalars(sa.select(column)))

    return read


SIDES: dict[str, Any] = {
    "setup": tables,
    "committed": ids("shop", orders.c.id),
    "sent": "orders",
    "effects": ids("club", points.c.buyer),
}


def check(shop: Callable[[World], object], club: Callable[[World], object]) -> Survived:
    return crash_everywhere(shop, club, **SIDES)


def producer_of(world: World, checker: Any = None) -> mq.Producer:
    return world.bus().producer("shop", checker=checker or outbox.Barrier(world.engine("shop")))


def is_new(world: World, order: str = "o-1") -> bool:
    """A customer who got no answer orders again under the same number, and the shop knows the orders it has."""
    return order not in ids("shop", orders.c.id)(world)


def add(connection: sa.Connection, order: str = "o-1", **more: Any) -> None:
    connection.execute(orders.insert(), {"id": order, **more})


def received(world: World) -> Any:
    return world.bus().consumer("club", "orders").messages(idle_timeout=0)


def give(connection: Any, message: mq.Received) -> None:
    connection.execute(points.insert(), {"buyer": message.key})


# Correct programs


def shop_with_barrier(world: World) -> None:
    producer = producer_of(world)
    for order in ("o-1", "o-2"):
        if is_new(world, order):
            with producer.transaction() as txn:
                txn.send("orders", b"one book", key=order)
                with world.engine("shop").begin() as connection:
                    add(connection, order)
                    outbox.bind_tx(connection, txn)


def shop_that_gives_up(world: World) -> None:
    """Nobody orders again: what was interrupted is left to the check-back."""
    if not world.restarted:
        shop_with_barrier(world)
    else:
        producer_of(world)


def shop_with_outbox(world: World) -> None:
    engine = world.engine("shop")
    if is_new(world):
        with engine.begin() as connection:
            add(connection)
            outbox.send_tx(connection, "orders", b"one book", key="o-1")
    relay = Relay(engine, EscrowTarget.over([world.bus()]), lease=0.2)
    relay.drain()


def shop_with_a_table_of_its_own(world: World) -> None:
    """Sends again after a crash, under the same message id."""
    engine, producer = world.engine("shop"), world.bus().producer("shop", qos=2)
    if is_new(world):
        with engine.begin() as connection:
            add(connection, todo=True)
    with engine.connect() as connection:
        left = list(connection.scalars(sa.select(orders.c.id).where(orders.c.todo)))
    for order in left:
        producer.send("orders", b"one book", key=order, message_id=order)
        with engine.begin() as connection:
            connection.execute(sa.update(orders).where(orders.c.id == order).values(todo=False))


def club_with_inbox(world: World) -> None:
    inbox.consume(world.bus().consumer("club", "orders"), world.engine("club"), give, idle_timeout=0)


def club_with_claim(world: World) -> None:
    for message in received(world):
        with world.engine("club").begin() as connection:
            if outbox.claim_tx(connection, message, group="club"):
                give(connection, message)
        message.ack()


async def shop_of_asyncio(world: World) -> None:
    engine = world.async_engine("shop")
    producer = (await world.abus()).producer("shop", checker=outbox.AsyncBarrier(engine))
    if is_new(world):
        async with producer.transaction() as txn:
            await txn.send("orders", b"one book", key="o-1")
            async with engine.begin() as connection:
                await connection.execute(orders.insert(), {"id": "o-1"})
                await aio.bind_tx(connection, txn)


async def club_of_asyncio(world: World) -> None:
    async def handle(connection: Any, message: mq.Received) -> None:
        await connection.execute(points.insert(), {"buyer": message.key})

    consumer = await (await world.abus()).consumer("club", "orders")
    await aio.consume(consumer, world.async_engine("club"), handle, idle_timeout=0)


@pytest.mark.parametrize(
    ("shop", "club"),
    [
        (shop_with_barrier, club_with_inbox),
        (shop_that_gives_up, club_with_claim),
        (shop_with_outbox, club_with_claim),
        (shop_with_a_table_of_its_own, club_with_claim),
        (shop_of_asyncio, club_of_asyncio),
    ],
)
def test_a_correct_program_survives_everywhere(
    shop: Callable[[World], object], club: Callable[[World], object]
) -> None:
    survived = check(shop, club)
    # On a slow machine a relay renews its lease, and so has more steps in one run than in another.
    assert min(survived.crashes, len(survived.steps)) > 8
    assert {step.process for step in survived.steps} == {shop.__name__, club.__name__}


# Mistakes


def shop_that_sends_first(world: World) -> None:
    if is_new(world):
        world.bus().producer("shop").send("orders", b"one book", key="o-1")
        with world.engine("shop").begin() as connection:
            add(connection)


def shop_that_sends_last(world: World) -> None:
    if is_new(world):
        with world.engine("shop").begin() as connection:
            add(connection)
        world.bus().producer("shop").send("orders", b"one book", key="o-1")


def guessing(outcome: mq.Outcome) -> Callable[[World], None]:
    def shop_that_guesses(world: World) -> None:
        producer = producer_of(world, lambda check: outcome)
        if is_new(world):
            with producer.transaction() as txn:
                txn.send("orders", b"one book", key="o-1")
                with world.engine("shop").begin() as connection:
                    add(connection)

    return shop_that_guesses


def shop_that_binds_apart(world: World) -> None:
    producer, engine = producer_of(world), world.engine("shop")
    if is_new(world):
        with producer.transaction() as txn:
            txn.send("orders", b"one book", key="o-1")
            with engine.begin() as connection:
                add(connection)
            with engine.begin() as connection:
                outbox.bind_tx(connection, txn)


def shop_that_commits_the_message_first(world: World) -> None:
    producer = producer_of(world)
    if is_new(world):
        with world.engine("shop").begin() as connection:
            with producer.transaction() as txn:
                txn.send("orders", b"one book", key="o-1")
            add(connection)


def shop_without_a_stable_id(world: World) -> None:
    engine, producer = world.engine("shop"), world.bus().producer("shop")
    if is_new(world):
        with engine.begin() as connection:
            add(connection, todo=True)
    with engine.connect() as connection:
        left = list(connection.scalars(sa.select(orders.c.id).where(orders.c.todo)))
    for order in left:
        producer.send("orders", b"one book", key=order)
        with engine.begin() as connection:
            connection.execute(sa.update(orders).where(orders.c.id == order).values(todo=False))


def shop_that_catches_everything(world: World) -> None:
    """No handler of the program survives a crash, as none survives SIGKILL."""
    with suppress(Exception):
        shop_that_sends_last(world)


def club_that_acknowledges_first(world: World) -> None:
    for message in received(world):
        message.ack()
        with world.engine("club").begin() as connection:
            give(connection, message)


def club_without_a_record(world: World) -> None:
    for message in received(world):
        with world.engine("club").begin() as connection:
            give(connection, message)
        message.ack()


def club_with_two_transactions(world: World) -> None:
    engine = world.engine("club")
    for message in received(world):
        with engine.begin() as connection:
            is_first = outbox.claim_tx(connection, message, group="club")
        if is_first:
            with engine.begin() as connection:
                give(connection, message)
        message.ack()


async def club_of_asyncio_without_a_record(world: World) -> None:
    consumer = await (await world.abus()).consumer("club", "orders")
    async for message in consumer.messages(idle_timeout=0):
        async with world.async_engine("club").begin() as connection:
            await connection.execute(points.insert(), {"buyer": message.key})
        await message.ack()


@pytest.mark.parametrize(
    ("shop", "club", "found", "wrong"),
    [
        (
            shop_that_sends_first,
            club_with_claim,
            "after send to orders (o-1) and before INSERT INTO orders",
            "o-1: committed once, sent twice, effects twice",
        ),
        (
            shop_that_sends_last,
            club_with_claim,
            "after COMMIT of INSERT INTO orders and before send to orders (o-1)",
            "o-1: committed once, sent never, effects never",
        ),
        (
            guessing(mq.COMMIT),
            club_with_claim,
            "after prepare to orders (o-1) and before INSERT INTO orders",
            "o-1: committed once, sent twice, effects twice",
        ),
        (
            guessing(mq.ROLLBACK),
            club_with_claim,
            "after COMMIT of INSERT INTO orders and before COMMIT to the broker",
            "o-1: committed once, sent never, effects never",
        ),
        (
            shop_that_binds_apart,
            club_with_claim,
            "after COMMIT of INSERT INTO orders and before INSERT INTO trans_barrier",
            "o-1: committed once, sent never, effects never",
        ),
        (
            shop_that_commits_the_message_first,
            club_with_claim,
            "after COMMIT to the broker and before INSERT INTO orders",
            "o-1: committed once, sent twice, effects twice",
        ),
        (
            shop_without_a_stable_id,
            club_with_claim,
            "after send to orders (o-1) and before UPDATE orders",
            "o-1: committed once, sent twice, effects twice",
        ),
        (
            shop_that_catches_everything,
            club_with_claim,
            "after COMMIT of INSERT INTO orders and before send to orders (o-1)",
            "o-1: committed once, sent never, effects never",
        ),
        (
            shop_with_barrier,
            club_that_acknowledges_first,
            "after ack of 1 message and before INSERT INTO points",
            "o-1: committed once, sent once, effects never",
        ),
        (
            shop_with_barrier,
            club_without_a_record,
            "after COMMIT of INSERT INTO points and before ack of 1 message",
            "o-1: committed once, sent once, effects twice",
        ),
        (
            shop_with_barrier,
            club_with_two_transactions,
            "after COMMIT of INSERT INTO trans_recv_log and before INSERT INTO points",
            "o-1: committed once, sent once, effects never",
        ),
        (
            shop_of_asyncio,
            club_of_asyncio_without_a_record,
            "after COMMIT of INSERT INTO points and before ack of 1 message",
            "o-1: committed once, sent once, effects twice",
        ),
    ],
)
def test_a_mistake_is_found(
    shop: Callable[[World], object], club: Callable[[World], object], found: str, wrong: str
) -> None:
    with pytest.raises(AssertionError) as failed:
        check(shop, club)
    report = str(failed.value)
    assert f"was killed {found}" in report, report
    assert wrong in report, report


@pytest.mark.parametrize("record", [True, False])
def test_a_database_of_your_own_is_watched(database_url: str, record: bool) -> None:
    """One engine of the whole program, as many have it, on any database."""
    engine = sa.create_engine(database_url)

    def clear(world: World) -> None:
        metadata.create_all(engine)
        outbox.migrate(engine)
        with engine.begin() as connection:
            for name in ("orders", "points", "trans_barrier", "trans_recv_log"):
                connection.execute(sa.text(f"DELETE FROM {name}"))

    def shop(world: World) -> None:
        world.watch(engine)
        producer = world.bus().producer("shop", checker=outbox.Barrier(engine))
        if not world.restarted:
            with producer.transaction() as txn:
                txn.send("orders", b"one book", key="o-1")
                with engine.begin() as connection:
                    add(connection)
                    outbox.bind_tx(connection, txn)

    def club(world: World) -> None:
        world.watch(engine)
        for message in received(world):
            with engine.begin() as connection:
                if not record or outbox.claim_tx(connection, message, group="club"):
                    give(connection, message)
            message.ack()

    def ids_of(column: sa.Column[Any]) -> Callable[[World], list[str]]:
        def read(world: World) -> list[str]:
            with engine.connect() as connection:
                return list(connection.scalars(sa.select(column)))

        return read

    sides: dict[str, Any] = {"committed": ids_of(orders.c.id), "sent": "orders", "effects": ids_of(points.c.buyer)}
    try:
        if record:
            assert crash_everywhere(shop, club, setup=clear, **sides).crashes > 8
        else:
            with pytest.raises(AssertionError, match="o-1: committed once, sent once, effects twice"):
                crash_everywhere(shop, club, setup=clear, **sides)
    finally:
        engine.dispose()
