"""Keys from another broker (Kafka, Redis Streams, RabbitMQ): small loops that read them into the half set with *your*
client.

Each loop receives a batch, records it, and acknowledges it when ``HalfSet.add`` has returned; while the compensation is
suspended it keeps its batch and receives no more. A repeated key is one entry. A message without an id in its header or
key is logged, acknowledged and skipped.

If the store can lose its entries, keys must be readable again: ``kafka_again`` and ``redis_again`` are arguments for
``GivenKeys(read_again=...)``. A RabbitMQ queue cannot be read again, so metadata the sets belong into a SQL database.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from escrowmq.compensation.halves import HalfSet, is_idle
from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.outbox.inbox import header_id
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.clock import now_us

logger = logging.getLogger(__name__)

PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Shortest and longest pause (s) between two checks whether the half set accepts keys again."""
STEP = 0.5
"""Time (s) to wait for a broker before the stop event is checked."""
READ_ROWS = 5_000
SILENCE = 30.0
"""Seconds without a message or an end marker after which reading again fails."""

Keys = tuple[list[bytes], list[int]]
"""Ids, and the time at which the broker stored each key (microseconds since 1970)."""


# Decoding the messages of each broker


def of_kafka(messages: Iterable[Any]) -> Keys:
    """Return keys of ``confluent_kafka`` messages, with Kafka's timestamps: the relay's clock, or better the broker's
    if the topic has ``message.timestamp.type=LogAppendTime``. Raises Unknown(DISCONNECTED) for an error message."""
    found: Keys = [], []
    for message in messages:
        if message.error() is not None:
            raise Unknown(Code.DISCONNECTED, f"Kafka: {message.error()}")
        kind, stored_ms = message.timestamp()
        where = f"Kafka {message.topic()}/{message.partition()} at {message.offset()}"
        _append_key(found, message.headers(), stored_ms * 1000 if kind else now_us(), where)
    return found


def of_redis(entries: Iterable[Any]) -> Keys:
    """Return keys of stream entries, ``(entry id, fields)`` as in redis-py, with the times of the entry ids."""
    found: Keys = [], []
    for entry, fields in entries:
        name = entry.decode() if isinstance(entry, bytes) else str(entry)
        _append_key(found, fields or {}, int(name.partition("-")[0]) * 1000, f"Redis entry {name}")
    return found


def of_rabbitmq(messages: Iterable[Any]) -> Keys:
    """Return keys of ``aio_pika`` messages, or of objects with ``headers``. The time is that of reading: RabbitMQ has
    none."""
    found: Keys = [], []
    for message in messages:
        _append_key(found, message.headers, now_us(), "RabbitMQ")
    return found


# Loops


def read_kafka(
    consumer: Any,
    halves: HalfSet,
    *,
    stop: threading.Event | None = None,
    idle_timeout: float | None = None,
    most: int = 1_000,
) -> int:
    """Read a ``confluent_kafka.Consumer`` until ``stop`` is set or nothing arrived for ``idle_timeout`` seconds. It
    must be subscribed to the key topic with ``enable.auto.commit=false``. Offsets are committed at Kafka after their
    keys were recorded. Returns the number of recorded keys."""

    def acknowledge(messages: list[Any]) -> None:
        for message in {(one.topic(), one.partition()): one for one in messages}.values():  # the last of each partition
            try:
                consumer.commit(message=message, asynchronous=False)
            except Exception as problem:  # a partition moved to another consumer: recording keys again changes nothing
                logger.info("keys were recorded but not acknowledged: %s", problem)

    return _read(lambda wait: consumer.consume(most, wait), of_kafka, acknowledge, halves, stop, idle_timeout)


def read_redis(
    client: Any,
    stream: str,
    halves: HalfSet,
    *,
    group: str,
    name: str,
    stop: threading.Event | None = None,
    idle_timeout: float | None = None,
    most: int = 1_000,
    claim_after: float = 60.0,
) -> int:
    """Read a stream by ``redis.Redis`` as consumer ``name`` of its group ``group``, which is created if missing.
    Entries that another consumer has not acknowledged for ``claim_after`` seconds are claimed. Otherwise as
    :func:`read_kafka`."""
    try:
        client.xgroup_create(stream, group, id="0", mkstream=True)
    except Exception as problem:
        if "BUSYGROUP" not in str(problem):
            raise
    first: str | None = "0"  # entries pending from before a crash, then new ones

    def receive(wait: float) -> list[Any]:
        nonlocal first
        entries = client.xautoclaim(stream, group, name, round(claim_after * 1000), start_id="0-0", count=most)[1]
        if not entries:
            block = None if first is not None else max(1, round(wait * 1000))
            answer = client.xreadgroup(group, name, {stream: first or ">"}, count=most, block=block)
            entries = _entries_of(answer)
            first = _last_id(entries) if first is not None and entries else None
        return list(entries)

    def acknowledge(entries: list[Any]) -> None:
        client.xack(stream, group, *(entry for entry, _ in entries))

    return _read(receive, of_redis, acknowledge, halves, stop, idle_timeout)


async def read_rabbitmq(
    queue: Any,
    halves: HalfSet,
    *,
    stop: asyncio.Event | None = None,
    idle_timeout: float | None = None,
    most: int = 500,
) -> int:
    """Read an ``aio_pika`` queue; otherwise as :func:`read_kafka`. It needs a separate channel, because acknowledging
    the last message of a batch acknowledges all earlier ones of the channel."""
    stopping, count, last = stop or asyncio.Event(), 0, time.monotonic()
    away = threading.Event()
    try:
        while not (stopping.is_set() or is_idle(last, idle_timeout)):
            messages: list[Any] = []
            while len(messages) < most and (message := await queue.get(fail=False)) is not None:
                messages.append(message)
            if not messages:
                await asyncio.sleep(min(PAUSE, _wait_seconds(idle_timeout)))
                continue
            keys = of_rabbitmq(messages)
            recording = asyncio.ensure_future(asyncio.to_thread(_record, halves, keys, away))
            waiting = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({recording, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if stopping.is_set():
                away.set()
            if not await recording:
                break
            await messages[-1].ack(multiple=True)
            count, last = count + len(keys[0]), time.monotonic()
    finally:
        away.set()
    return count


# Reading again


def kafka_again(config: Mapping[str, Any], topic: str) -> Callable[[int], Iterator[Keys]]:
    """Return a function for ``GivenKeys(read_again=...)`` that reads the key topic from a time to its current end.
    ``config``: librdkafka's settings, with ``bootstrap.servers``; it joins no group and commits nothing. The function
    raises Unknown(DISCONNECTED) if Kafka does not respond."""

    def read(since_us: int) -> Iterator[Keys]:
        import confluent_kafka as kafka

        conf = {"group.id": "escrowmq-read-again", "enable.auto.commit": False, **config, "enable.partition.eof": True}
        consumer = kafka.Consumer(conf)
        try:
            metadata = consumer.list_topics(topic, timeout=30).topics[topic]
            if metadata.error is not None:
                raise Unknown(Code.DISCONNECTED, f"Kafka: {metadata.error}")
            times = [kafka.TopicPartition(topic, number, max(since_us // 1000, 0)) for number in metadata.partitions]
            starts = [one for one in consumer.offsets_for_times(times, timeout=30) if one.offset >= 0]
            consumer.assign(starts)
            left = {one.partition for one in starts}
            silent_until = time.monotonic() + SILENCE
            while left:
                messages = consumer.consume(READ_ROWS, STEP)  # waits until the batch is full
                if not messages and time.monotonic() > silent_until:
                    raise Unknown(Code.TIMED_OUT, f"Kafka sends no more messages of {topic}")
                found: list[Any] = []
                for one in messages:
                    problem = one.error()
                    if problem is not None and problem.code() == kafka.KafkaError._PARTITION_EOF:
                        left.discard(one.partition())
                    else:
                        found.append(one)
                if found:
                    silent_until = time.monotonic() + SILENCE
                    yield of_kafka(found)
        except kafka.KafkaException as failure:
            raise Unknown(Code.DISCONNECTED, f"Kafka: {failure.args[0]}") from None
        finally:
            consumer.close()

    return read


def redis_again(client: Any, stream: str) -> Callable[[int], Iterator[Keys]]:
    """Return a function for ``GivenKeys(read_again=...)`` that reads a stream from a time to its current end. The
    stream must keep its entries as long as a compensation needs them, and be in another Redis than the sets: whatever
    empties one would empty the other."""

    def read(since_us: int) -> Iterator[Keys]:
        last = client.xrevrange(stream, count=1)
        start = str(max(since_us // 1000, 0))
        while last and (entries := client.xrange(stream, start, last[0][0], count=READ_ROWS)):
            yield of_redis(entries)
            start = f"({_last_id(entries)}"

    return read


# Internals


def _append_key(found: Keys, headers: Any, stored_us: int, where: str) -> None:
    try:
        found[0].append(header_id(headers))
    except Misuse:
        logger.warning("a message without an id announces nothing and is skipped: %s", where)
    else:
        found[1].append(stored_us)


def _read(
    receive: Callable[[float], list[Any]],
    decode: Callable[[list[Any]], Keys],
    acknowledge: Callable[[list[Any]], None],
    halves: HalfSet,
    stop: threading.Event | None,
    idle_timeout: float | None,
) -> int:
    """Receive, record and acknowledge batches; ``receive`` gets the seconds to wait. Returns the number of keys."""
    stopping, count, last = stop or threading.Event(), 0, time.monotonic()
    while not (stopping.is_set() or is_idle(last, idle_timeout)):
        if batch := receive(_wait_seconds(idle_timeout)):
            keys = decode(batch)
            if not _record(halves, keys, stopping):
                break
            acknowledge(batch)
            count, last = count + len(keys[0]), time.monotonic()
    return count


def _record(halves: HalfSet, keys: Keys, stop: threading.Event) -> bool:
    """Record keys, waiting until the half set accepts them. Returns False if stopped before they were recorded."""
    backoff = Backoff(PAUSE, LONGEST_PAUSE)
    while not stop.is_set():
        try:
            if not keys[0]:
                return True
            if halves.ready():
                halves.add(*keys)
                return True
        except Misuse:
            raise
        except EscrowError as problem:
            logger.info("%d keys wait: %s", len(keys[0]), problem)
        stop.wait(backoff.failed())
    return False


def _entries_of(answer: Any) -> list[Any]:
    """Return the entries of the only stream; redis-py returns pairs, or with RESP3 a mapping with one more level."""
    if isinstance(answer, Mapping):
        return [entry for parts in answer.values() for part in parts for entry in part]
    return [entry for _, entries in answer or () for entry in entries]


def _last_id(entries: Sequence[Any]) -> str:
    name = entries[-1][0]
    return name.decode() if isinstance(name, bytes) else str(name)


def _wait_seconds(idle_timeout: float | None) -> float:
    return STEP if idle_timeout is None else min(STEP, max(idle_timeout, 0.001))
