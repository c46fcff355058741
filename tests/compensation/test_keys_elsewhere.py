"""The key topic on Kafka, Redis Streams and RabbitMQ: announced with the change, sent by a relay, and read back as ids
and times, by real servers.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aio_pika
import confluent_kafka
import pytest
import redis
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox
from escrowmq.compensation import Announcing, elsewhere
from escrowmq.errors import Code, Overloaded
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target

COUNT = 30


class Halves:
    """A half set that is suspended at first, and fails once after that."""

    def __init__(self) -> None:
        self.recorded: dict[bytes, int] = {}
        self.calls: list[str] = []
        self.after: Callable[[], None] = lambda: None

    def ready(self) -> bool:
        self.calls.append("ready")
        return len(self.calls) > 1

    def add(self, ids: Sequence[bytes], stored_us: Sequence[int]) -> None:
        self.calls.append("add")
        if self.calls.count("add") == 1:
            raise Overloaded(Code.QUEUE_FULL)
        self.recorded.update(zip(ids, stored_us, strict=True))
        self.after()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    outbox.migrate(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (id TEXT)"))
    yield engine
    engine.dispose()


@pytest.fixture
def announce(tmp_path: Path, shop: sa.Engine, t: str) -> Callable[[str, str], set[bytes]]:
    """Places orders whose ends all get lost, and has their keys sent to ``topic`` by the relay's target of that URL;
    their ids."""

    def place(url: str, topic: str) -> set[bytes]:
        with mq.connect(f"file:{tmp_path / 'data'}") as bus:
            way = Announcing(bus.producer("shop", unasked=True), topic, database=shop)
            way.commit = lambda prepared: (Code.SENT,) * len(prepared.ids)  # type: ignore[method-assign]  # the confirms are lost

            def order(session: Any) -> None:
                session.execute(sa.text("INSERT INTO orders VALUES ('o')"))

            sent = way.send([mq.Message(t, b"book", key=f"o-{number}") for number in range(COUNT)], order).check()
        target = open_target(url, timeout=120.0)  # else what is only late is sent twice
        try:
            assert Relay(shop, target).drain(60.0)
        finally:
            target.close()
        return set(sent.ids)

    return place


def about_now(times: Sequence[int]) -> bool:
    return all(abs(time.time() - one / 1e6) < 3600 for one in times)


@pytest.mark.invariant("I48")
def test_of_kafka(kafka_url: str, announce: Any) -> None:
    topic = f"keys-{uuid.uuid4().hex}"
    ids = announce(kafka_url, topic)
    config = {"bootstrap.servers": kafka_url.removeprefix("kafka://"), "auto.offset.reset": "earliest"}
    config |= {"group.id": topic, "enable.auto.commit": False, "log_level": 2}
    config |= {"session.timeout.ms": 200_000}  # however slow the machine is, it stays in its group
    halves, stop = Halves(), threading.Event()
    halves.after = lambda: stop.set() if len(halves.recorded) == COUNT else None
    consumer = confluent_kafka.Consumer(config)
    consumer.subscribe([topic])
    assert elsewhere.read_kafka(consumer, halves, stop=stop, most=7) == COUNT
    places = consumer.committed([confluent_kafka.TopicPartition(topic, one.partition) for one in consumer.assignment()])
    assert sum(max(place.offset, 0) for place in places) == COUNT, "all of them are acknowledged"
    consumer.close()
    assert set(halves.recorded) == ids
    assert about_now([*halves.recorded.values()])
    again = dict(
        pair
        for keys in elsewhere.kafka_again(config, topic)(min(halves.recorded.values()))
        for pair in zip(*keys, strict=True)
    )
    assert set(again) == ids
    assert [keys for keys in elsewhere.kafka_again(config, topic)(time.time_ns() // 1000 + 10**9) if keys[0]] == []


@pytest.mark.invariant("I48")
def test_of_redis_streams(redis_url: str, announce: Any) -> None:
    stream = f"keys-{uuid.uuid4().hex}"
    ids = announce(redis_url, stream)
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(stream, {"no": "key"})
        client.xgroup_create(stream, "halves", id="0")
        client.xreadgroup("halves", "dead", {stream: ">"}, count=10)  # taken by one that died
        client.xreadgroup("halves", "me", {stream: ">"}, count=10)  # by this one, before it died
        time.sleep(0.002)  # not a wait: what is taken over must be older than a millisecond
        halves, read = Halves(), 0
        while set(halves.recorded) != ids or client.xpending(stream, "halves")["pending"]:
            read += elsewhere.read_redis(
                client, stream, halves, group="halves", name="me", idle_timeout=0.5, most=7, claim_after=0.001
            )
        assert read >= COUNT
        assert client.xpending(stream, "halves")["pending"] == 0
        assert about_now([*halves.recorded.values()])
        once_more = Halves()
        assert elsewhere.read_redis(client, stream, once_more, group="halves", name="me", idle_timeout=0.01) == 0
        again = elsewhere.redis_again(client, stream)
        assert {identity for found, _ in again(min(halves.recorded.values())) for identity in found} == ids
        assert list(again(time.time_ns() // 1000 + 10**9)) == []
        assert list(elsewhere.redis_again(client, f"{stream}-no")(0)) == []


@pytest.mark.invariant("I48")
async def test_of_rabbitmq(rabbitmq_url: str, announce: Any) -> None:
    name = f"keys-{uuid.uuid4().hex}"
    async with await aio_pika.connect(rabbitmq_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        ids = await asyncio.to_thread(announce, rabbitmq_url, name)
        halves, read = Halves(), 0
        while set(halves.recorded) != ids:
            read += await elsewhere.read_rabbitmq(queue, halves, idle_timeout=0.5, most=7)
        assert read == COUNT
        assert about_now([*halves.recorded.values()])
        assert await queue.get(fail=False) is None


def test_stopped_while_it_is_suspended_nothing_is_acknowledged(redis_url: str, announce: Any) -> None:
    stream = f"keys-{uuid.uuid4().hex}"
    announce(redis_url, stream)
    stop = threading.Event()

    class Suspended(Halves):
        def ready(self) -> bool:
            stop.set()
            return False

    with redis.Redis.from_url(redis_url) as client:
        assert elsewhere.read_redis(client, stream, Suspended(), group="halves", name="me", stop=stop) == 0
        assert client.xpending(stream, "halves")["pending"] == COUNT
