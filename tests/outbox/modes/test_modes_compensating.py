"""Compensation: stored with the business change, sent once, deleted on ack; what is left is sent again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from modes_roles import identity, note, noted

import escrowmq as mq
from escrowmq.errors import Code, Misuse
from escrowmq.outbox.modes import Compensating
from escrowmq.outbox.tables import trans_driven


@pytest.fixture
def local(make_database: Callable[[str], str]) -> Any:
    engine = sa.create_engine(make_database("local"))
    yield engine
    engine.dispose()


class Flaky:
    """A way out that is away for a number of calls."""

    def __init__(self, sender: Any, away: int) -> None:
        self._sender, self.away, self.tries = sender, away, 0

    def place(self, keys: Any) -> Any:
        return self._sender.place(keys)

    def send(self, batch: Any, shards: Any) -> Any:
        self.tries += 1
        if self.tries <= self.away:
            return np.full(batch.num_rows, Code.DISCONNECTED, np.uint8)
        return self._sender.send(batch, shards)


def left(engine: sa.Engine) -> int:
    with engine.begin() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(trans_driven)).scalar_one())


def test_stored_sent_and_deleted(bus: mq.Bus, database: sa.Engine, t: str) -> None:
    way = Compensating(bus.producer("plain"), database, "shop")
    message = mq.Message(t, b"book", key="k", message_id=identity(t, 1))
    assert way.send(message, lambda session: note(session, "produced", [b"a" * 16])).tolist() == [Code.OK]
    assert noted(database, "produced") == [b"a" * 16]
    assert left(database) == 0
    assert bus.admin.read(t).read_all().column("message_id").to_pylist() == [identity(t, 1)]


def test_a_failed_business_change_stores_and_sends_nothing(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    way = Compensating(bus.producer("plain"), local, "shop")
    with pytest.raises(ZeroDivisionError):
        way.send(mq.Message(t, b"book"), lambda session: 1 // 0)
    assert left(local) == 0
    assert bus.admin.topics() == []


def test_one_try_then_it_waits_to_be_sent_again(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    from escrowmq.outbox.modes.senders import ProducerSender

    flaky = Flaky(ProducerSender(bus.producer("plain")), away=2)
    way = Compensating(flaky, local, "shop")
    assert way.send(mq.Message(t, b"book"), lambda session: None).tolist() == [Code.DISCONNECTED]
    assert flaky.tries == 1
    assert way.resend(older_than=3600.0) == 0
    assert flaky.tries == 1
    assert way.resend() == 1
    assert way.resend() == 0
    assert (flaky.tries, left(local)) == (3, 0)
    assert len(bus.admin.read(t).read_all()) == 1


def test_a_loop_sends_what_is_left(bus: mq.Bus, local: sa.Engine, t: str) -> None:
    way = Compensating(bus.producer("plain"), local, "shop")
    with local.begin() as connection:
        ids = way.store_tx(connection, [mq.Message(t, b"%d" % n) for n in range(1500)])
    stop = threading.Event()
    loop = threading.Thread(target=way.keep_resending, args=(0.01, stop))
    loop.start()
    consumer = bus.consumer("cart", t)
    found = []
    for message in consumer.messages(idle_timeout=60.0):
        found.append(message.message_id)
        message.ack()
        if len(found) == 1500:
            break
    stop.set()
    loop.join()
    assert set(found) == set(ids)
    assert way.resend() == 0


def test_what_is_no_way_out_is_refused(local: sa.Engine) -> None:
    way: Any = "kafka"
    with pytest.raises(Misuse):
        Compensating(way, local, "shop")
