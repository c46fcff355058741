"""Servers of their own for the conformance suite, each with a way to read what it holds."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import aio_pika
import confluent_kafka
import redis

import escrowmq as mq
from escrowmq.outbox.targets.kafka import KafkaTarget
from escrowmq.outbox.targets.opening import open_target
from escrowmq.outbox.targets.rabbitmq import RabbitMqTarget
from escrowmq.outbox.targets.redis import BODY_FIELD, RedisTarget
from escrowmq.outbox.targets.seam import KEY_HEADER, MESSAGE_ID_HEADER, TAG_HEADER, Target
from escrowmq.testing.target_conformance import PATIENT, Stored, eventually, new_name
from escrowmq_lab.servers.process import Server

DELIVERY_COUNT = "x-delivery-count"
"""A header that quorum queues add themselves."""


def stored(headers: list[tuple[str, str]], body: bytes, key: str | None = None) -> Stored:
    """From the headers of a message."""
    ours = dict(headers)
    properties = tuple((name, value) for name, value in headers if not name.startswith("escrowmq-"))
    return Stored(
        bytes.fromhex(ours[MESSAGE_ID_HEADER]), ours.get(KEY_HEADER, key), ours.get(TAG_HEADER), properties, body
    )


class ServerSite:
    """What all have in common."""

    oversize = 200_001

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pause, self.resume, self.kill, self.start = server.pause, server.resume, server.kill, server.start

    @property
    def url(self) -> str:
        return self.server.url

    def new_topic(self) -> str:
        return new_name()


class RedisSite(ServerSite):
    def open(self, timeout: float = PATIENT) -> Target:
        return RedisTarget(self.url, timeout=timeout, max_body_bytes=200_000)

    def drain(self, topic: str) -> list[Stored]:
        with redis.Redis.from_url(self.url) as client:
            entries: Any = client.xrange(topic)
        found = []
        for _, fields in entries:
            body = fields.pop(BODY_FIELD.encode())
            found.append(stored([(name.decode(), value.decode()) for name, value in fields.items()], body))
        return found


class KafkaSite(ServerSite):
    oversize = 1_100_000  # over the broker's own message.max.bytes

    def open(self, timeout: float = PATIENT) -> Target:
        return KafkaTarget(self.url, timeout=timeout)

    def drain(self, topic: str) -> list[Stored]:
        settings = {"bootstrap.servers": self.url.removeprefix("kafka://"), "group.id": "drain", "log_level": 2}
        consumer = confluent_kafka.Consumer(settings)
        try:
            ends: dict[int, int] = {}
            eventually(lambda: self._look_up(consumer, topic, ends), "Kafka does not tell where its partitions end")
            consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in ends])
            found = []
            while any(ends.values()):
                message = consumer.poll(60)
                assert message is not None
                assert message.error() is None, message.error()
                headers = [(name, value.decode()) for name, value in message.headers()]
                key = message.key()
                found.append(stored(headers, message.value(), None if key is None else key.decode()))
                if message.offset() + 1 >= ends[message.partition()]:
                    ends[message.partition()] = 0
            return found
        finally:
            consumer.close()

    def _look_up(self, consumer: confluent_kafka.Consumer, topic: str, ends: dict[int, int]) -> bool:
        try:
            for partition in consumer.list_topics(topic, timeout=60).topics[topic].partitions:
                place = confluent_kafka.TopicPartition(topic, partition)
                ends[partition] = consumer.get_watermark_offsets(place, timeout=60)[1]
        except confluent_kafka.KafkaException:  # a new topic has no leader yet
            return False
        return True


class RabbitSite(ServerSite):
    """New queues are declared before the target sees them: it would leave them alone for some seconds."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.seen: dict[str, list[Stored]] = defaultdict(list)
        self.kill = self._kill

    def _kill(self) -> None:
        # What the target waits for by the clock: the directory of quorum queues is written and closed (bytes 8 to 11 of
        # the file).
        [directory] = self.server.log.parent.glob("rabbitmq/data/*/quorum/*/names.dets")
        eventually(lambda: directory.read_bytes()[8:12] == b"\0\0\0\1", "RabbitMQ does not write its directory")
        self.server.kill()

    def new_topic(self) -> str:
        name = new_name()
        asyncio.run(self.declare(name))
        return name

    async def declare(self, name: str, **arguments: Any) -> None:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum", **arguments})

    def open(self, timeout: float = PATIENT) -> Target:
        return RabbitMqTarget(self.url, timeout=timeout, max_body_bytes=200_000)

    def drain(self, topic: str) -> list[Stored]:
        asyncio.run(self._take(topic))
        return list(self.seen[topic])

    async def _take(self, topic: str) -> None:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            queue = await channel.get_queue(topic)
            waiting = queue.declaration_result.message_count or 0
            if not waiting:
                return
            async with queue.iterator(no_ack=True) as messages:
                async for message in messages:
                    headers = [(name, str(value)) for name, value in message.headers.items() if name != DELIVERY_COUNT]
                    self.seen[topic].append(stored(headers, message.body))
                    waiting -= 1
                    if not waiting:
                        break


class EscrowSite(ServerSite):
    oversize = (4 << 20) + 1

    def open(self, timeout: float = PATIENT) -> Target:
        return open_target(self.url, timeout=timeout)

    def drain(self, topic: str) -> list[Stored]:
        with mq.connect(self.url) as bus:
            rows = [row for part in bus.admin.read(topic) for row in part.to_pylist()]
        return [
            Stored(row["message_id"], row["key"], row["tag"], tuple(row["properties"] or ()), row["body"])
            for row in rows
        ]
