"""Keys that come by another broker: Kafka, Redis Streams, RabbitMQ. Small loops that read them into the half set with
*your* client.

Each takes a batch, records it, and acknowledges it when ``HalfSet.add`` has returned; while the compensation is
suspended it holds what it has and takes no more. What comes twice is one entry. A message that announces nothing (no id
in its header or its key) is logged, acknowledged and passed over.

For a store that can lose what it holds, keys must be readable again: ``kafka_again`` and ``redis_again`` are what
``GivenKeys(read_again=...)`` takes. A RabbitMQ queue cannot be read again, so there the sets belong into a SQL
database.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.outbox.inbox import header_id
from escrowmq.platform.backoff import Backoff

logger = logging.getLogger(__name__)

PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two looks whether the half set takes keys again."""
STEP = 0.5
"""Seconds that a broker is waited for before it is looked whether to stop."""
READ_ROWS = 5_000
SILENCE = 30.0
"""Seconds without a message, or the word that there are no more, until reading again gives up."""

Keys = tuple[list[bytes], list[int]]
"""Ids, and the time at which the broker stored each key (microseconds since 1970)."""


class Halves(Protocol):
    """The part of :class:`escrowmq.compensation.HalfSet` that is needed here."""

    def ready(self) -> bool:
        """Return whether keys may be taken now."""
        ...

    def add(self, ids: Sequence[bytes], stored_us: Sequence[int]) -> None:
        """Record them."""
        ...


# What a message of each broker says


def of_kafka(messages: Iterable[Any]) -> Keys:
    """Keys from ``confluent_kafka`` messages. The time is Kafka's timestamp: the relay's clock, or the broker's where
    the topic has ``message.timestamp.type=LogAppendTime``, which is better. Raises Unknown(DISCONNECTED) for a message
    that is an error."""
    found: list[tuple[bytes, int]] = []
    for message in messages:
        if message.error() is not None:
            raise Unknown(Code.DISCONNECTED, f"Kafka: {message.error()}")
        kind, stored_ms = message.timestamp()
        where = f"Kafka {message.topic()}/{message.partition()} at {message.offset()}"
        _put(found, message.headers(), stored_ms * 1000 if kind else _now_us(), where)
    return _columns(found)


def of_redis(entries: Iterable[Any]) -> Keys:
    """Keys from entries of a stream, ``(entry id, fields)`` as redis-py gives them, decoded or not. The time is Redis's
    own, in the entry id."""
    found: list[tuple[bytes, int]] = []
    for entry, fields in entries:
        name = entry.decode() if isinstance(entry, bytes) else str(entry)
        _put(found, fields or {}, int(name.partition("-")[0]) * 1000, f"Redis entry {name}")
    return _columns(found)


def of_rabbitmq(messages: Iterable[Any]) -> Keys:
    """Keys from ``aio_pika`` messages, or anything with ``headers``. RabbitMQ keeps no time: it is that of this
    reading, so the grace time of such an id begins when it is read."""
    found: list[tuple[bytes, int]] = []
    for message in messages:
        _put(found, message.headers, _now_us(), "RabbitMQ")
    return _columns(found)


# Loops


def read_kafka(
    consumer: Any,
    halves: Halves,
    *,
    stop: threading.Event | None = None,
    idle_timeout: float | None = None,
    most: int = 1_000,
) -> int:
    """Read a ``confluent_kafka.Consumer``, subscribed to the key topic with ``enable.auto.commit=false``, until
    ``stop`` is set or nothing came for ``idle_timeout`` seconds; how many keys were recorded. Offsets are committed at
    Kafka when their keys are recorded."""
    ended, count, last = stop or threading.Event(), 0, time.monotonic()
    while not (ended.is_set() or _idle(last, idle_timeout)):
        messages = consumer.consume(most, _step(idle_timeout))
        if not messages:
            continue
        keys = of_kafka(messages)
        if not _record(halves, keys, ended):
            break
        for message in {(one.topic(), one.partition()): one for one in messages}.values():  # the last of each partition
            try:
                consumer.commit(message=message, asynchronous=False)
            except Exception as problem:  # a partition that went to another consumer: recorded again they are the same
                logger.info("keys were recorded but not acknowledged: %s", problem)
        count, last = count + len(keys[0]), time.monotonic()
    return count


def read_redis(
    client: Any,
    stream: str,
    halves: Halves,
    *,
    group: str,
    name: str,
    stop: threading.Event | None = None,
    idle_timeout: float | None = None,
    most: int = 1_000,
    claim_after: float = 60.0,
) -> int:
    """Read a stream by ``redis.Redis`` as consumer ``name`` of its consumer group ``group``, which is made if it is not
    there; otherwise as :func:`read_kafka`. What another consumer has read and not acknowledged for ``claim_after``
    seconds is taken over."""
    try:
        client.xgroup_create(stream, group, id="0", mkstream=True)
    except Exception as problem:
        if "BUSYGROUP" not in str(problem):
            raise
    ended, count, last = stop or threading.Event(), 0, time.monotonic()
    first: str | None = "0"  # what this name was given before it died, then what is new
    while not (ended.is_set() or _idle(last, idle_timeout)):
        entries = client.xautoclaim(stream, group, name, round(claim_after * 1000), start_id="0-0", count=most)[1]
        if not entries:
            block = None if first is not None else max(1, round(_step(idle_timeout) * 1000))
            answer = client.xreadgroup(group, name, {stream: first or ">"}, count=most, block=block)
            entries = _entries(answer)
            first = _last(entries) if first is not None and entries else None
        if not entries:
            continue
        keys = of_redis(entries)
        if not _record(halves, keys, ended):
            break
        client.xack(stream, group, *(entry for entry, _ in entries))
        count, last = count + len(keys[0]), time.monotonic()
    return count


async def read_rabbitmq(
    queue: Any, halves: Halves, *, stop: asyncio.Event | None = None, idle_timeout: float | None = None, most: int = 500
) -> int:
    """Read an ``aio_pika`` queue; otherwise as :func:`read_kafka`. Give it a channel of its own: acknowledging the last
    message of a batch acknowledges all that the channel has taken before."""
    ended, count, last = stop or asyncio.Event(), 0, time.monotonic()
    away = threading.Event()
    try:
        while not (ended.is_set() or _idle(last, idle_timeout)):
            messages: list[Any] = []
            while len(messages) < most and (message := await queue.get(fail=False)) is not None:
                messages.append(message)
            if not messages:
                await asyncio.sleep(min(PAUSE, _step(idle_timeout)))
                continue
            keys = of_rabbitmq(messages)
            recording = asyncio.ensure_future(asyncio.to_thread(_record, halves, keys, away))
            waiting = asyncio.ensure_future(ended.wait())
            await asyncio.wait({recording, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if ended.is_set():
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
    """For ``GivenKeys(read_again=...)``: reads the key topic from a time on, up to what stands in it now. ``config``:
    librdkafka's settings, with ``bootstrap.servers``; it joins no group and commits nothing. Raises
    Unknown(DISCONNECTED) if Kafka does not answer."""

    def read(since_us: int) -> Iterator[Keys]:
        import confluent_kafka as kafka

        own = {"group.id": "escrowmq-read-again", "enable.auto.commit": False, **config, "enable.partition.eof": True}
        consumer = kafka.Consumer(own)
        try:
            there = consumer.list_topics(topic, timeout=30).topics[topic]
            if there.error is not None:
                raise Unknown(Code.DISCONNECTED, f"Kafka: {there.error}")
            times = [kafka.TopicPartition(topic, number, max(since_us // 1000, 0)) for number in there.partitions]
            starts = [one for one in consumer.offsets_for_times(times, timeout=30) if one.offset >= 0]
            consumer.assign(starts)
            left = {one.partition for one in starts}
            silent_until = time.monotonic() + SILENCE
            while left:
                messages = consumer.consume(READ_ROWS, STEP)  # it waits for all of them
                if not messages and time.monotonic() > silent_until:
                    raise Unknown(Code.TIMED_OUT, f"Kafka gives no more of {topic}")
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
    """For ``GivenKeys(read_again=...)``: reads a stream from a time on, up to what stands in it now. The stream must
    not be trimmed to less than a compensation needs, and not be in the same Redis as the sets: what empties one empties
    the other."""

    def read(since_us: int) -> Iterator[Keys]:
        last = client.xrevrange(stream, count=1)
        start = str(max(since_us // 1000, 0))
        while last and (entries := client.xrange(stream, start, last[0][0], count=READ_ROWS)):
            yield of_redis(entries)
            start = f"({_last(entries)}"

    return read


# Inside


def _put(found: list[tuple[bytes, int]], headers: Any, stored_us: int, where: str) -> None:
    try:
        found.append((header_id(headers), stored_us))
    except Misuse:
        logger.warning("a message without an id announces nothing and is passed over: %s", where)


def _columns(found: list[tuple[bytes, int]]) -> Keys:
    return [identity for identity, _ in found], [stored_us for _, stored_us in found]


def _record(halves: Halves, keys: Keys, stop: threading.Event) -> bool:
    """Record them, however long the half set takes none; False: it was stopped first, and they are not recorded."""
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


def _entries(answer: Any) -> list[Any]:
    """Of the only stream; redis-py gives pairs, or with RESP3 a mapping with one more level."""
    if not answer:
        return []
    if isinstance(answer, Mapping):
        return [entry for part in next(iter(answer.values())) for entry in part]
    return list(answer[0][1])


def _last(entries: Sequence[Any]) -> str:
    name = entries[-1][0]
    return name.decode() if isinstance(name, bytes) else str(name)


def _idle(last: float, idle_timeout: float | None) -> bool:
    return idle_timeout is not None and time.monotonic() - last >= idle_timeout


def _step(idle_timeout: float | None) -> float:
    return STEP if idle_timeout is None else min(STEP, max(idle_timeout, 0.001))


def _now_us() -> int:
    return time.time_ns() // 1000
