"""The three failures of an ordinary message queue (row 3.6), each shown to happen, and shown not to happen here.

``ordinary`` is the textbook code: the database and the queue one after the other, without a table between them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from outbox_world import Order, orders, unsettled
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import escrowmq as mq
from escrowmq.outbox import claim_tx, send_tx
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target


class Queue:
    """A broker that can be away, and the relay to it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file:{folder}"
        self.away = False

    def send(self, number: int) -> None:
        """What a producer without a table does."""
        if self.away:
            raise mq.Unknown(mq.Code.DISCONNECTED)
        with mq.connect(self.url) as bus:
            bus.producer("ordinary").send("orders", b"placed", key=str(number))

    def relay(self, shop: sa.Engine) -> None:
        """What a relay does whenever it can."""
        if not self.away:
            target = open_target(self.url, timeout=60)
            assert Relay(shop, target).drain(60)
            target.close()

    def received(self, group: str = "cart") -> list[str]:
        with mq.connect(self.url) as bus, bus.consumer(group, ["orders"]) as consumer:
            keys = []
            while unsettled(bus, group):
                for message in consumer.messages(idle_timeout=0.3):
                    keys.append(message.key)
                    message.ack()
            return sorted(keys)


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path / "data")


def placed(shop: sa.Engine) -> list[str]:
    with shop.connect() as connection:
        return sorted(str(number) for number in connection.scalars(sa.select(orders.c.id)))


# 1. The database is fine, the send fails


@pytest.mark.invariant("I37")
def test_database_ok_and_send_fails(sqlite_shop: sa.Engine, queue: Queue) -> None:
    """The queue is away for a while. Ordinary: an order of which nobody ever hears. Here: they hear later."""
    queue.away = True
    with Session(sqlite_shop) as session:
        session.add(Order(id=1))
        session.commit()
    with pytest.raises(mq.Unknown):
        queue.send(1)
    with Session(sqlite_shop) as session:
        session.add(Order(id=2))
        send_tx(session, "orders", b"placed", key="2")
        session.commit()
    queue.relay(sqlite_shop)
    queue.away = False
    queue.relay(sqlite_shop)
    assert placed(sqlite_shop) == ["1", "2"]
    assert queue.received() == ["2"]


# 2. The database fails


@pytest.mark.invariant("I37")
def test_database_fails(sqlite_shop: sa.Engine, queue: Queue) -> None:
    """The commit is refused. Ordinary, sending first: a message about an order that does not exist. Here: neither."""
    with Session(sqlite_shop) as session:
        session.add(Order(id=0, number=7))
        session.commit()
    with Session(sqlite_shop) as session:
        session.add(Order(id=1, number=7))
        queue.send(1)
        with pytest.raises(IntegrityError):
            session.commit()
    with Session(sqlite_shop) as session:
        session.add(Order(id=2, number=7))
        send_tx(session, "orders", b"placed", key="2")
        with pytest.raises(IntegrityError):
            session.commit()
    queue.relay(sqlite_shop)
    assert placed(sqlite_shop) == ["0"]
    assert queue.received() == ["1"]


# 3. The consumer fails


class Died(Exception):
    """The consumer's process, at this place."""


def deliveries(queue: Queue, group: str) -> Iterator[Any]:
    """One message after the other, each until it is acknowledged; dying is forgotten at the next delivery."""
    with mq.connect(queue.url) as bus, bus.consumer(group, ["orders"], retry_backoff=0.01) as consumer:
        while unsettled(bus, group):
            yield from consumer.messages(idle_timeout=0.3)
            consumer.flush()


@pytest.mark.invariant("I24")
@pytest.mark.parametrize("dies", ["before the effect", "after the effect"])
def test_consumer_fails(sqlite_shop: sa.Engine, queue: Queue, dies: str) -> None:
    """It dies once, before or after its commit. Ordinary: acknowledged first, the effect is lost; last, it happens
    twice. Here: once."""
    queue.send(1)
    effects: dict[str, int] = {}

    def effect(connection: sa.Connection, name: str) -> None:
        connection.execute(sa.text("INSERT INTO effects VALUES (:name)"), {"name": name})

    with sqlite_shop.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effects (name TEXT)")

    def acknowledged_first(message: Any, dying: bool) -> None:
        message.ack()
        if dying and dies == "before the effect":
            raise Died
        with sqlite_shop.begin() as connection:
            effect(connection, "first")

    def acknowledged_last(message: Any, dying: bool) -> None:
        with sqlite_shop.begin() as connection:
            effect(connection, "last")
        if dying and dies == "after the effect":
            raise Died
        message.ack()

    def claimed(message: Any, dying: bool) -> None:
        with sqlite_shop.begin() as connection:
            if claim_tx(connection, message, group="claimed"):
                effect(connection, "claimed")
            if dying and dies == "before the effect":
                raise Died
        if dying:
            raise Died
        message.ack()

    for way in (acknowledged_first, acknowledged_last, claimed):
        dying = True
        for message in deliveries(queue, way.__name__):
            try:
                way(message, dying)
            except Died:
                dying = False
                message.nack(delay=0)
    with sqlite_shop.connect() as connection:
        for name in connection.scalars(sa.text("SELECT name FROM effects")):
            effects[name] = effects.get(name, 0) + 1
    assert effects.get("claimed") == 1
    if dies == "before the effect":
        assert "first" not in effects
    else:
        assert effects["last"] == 2
