"""Loads Kafka with transactions, one producer per caller: see ``_load.py``. Works: threads, batches, seen, queue."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from _load import Arguments, arguments, begin, end, in_threads
from confluent_kafka import Consumer, Producer

TOPIC = "bench"


def address(given: Arguments) -> str:
    return given.address.removeprefix("kafka://")


def transactional(given: Arguments, number: int) -> Producer:
    """A producer that has begun its work."""
    name = f"bench-{os.getpid()}-{number}"
    producer = Producer({"bootstrap.servers": address(given), "transactional.id": name, "linger.ms": 0})
    producer.init_transactions(60)
    return producer


def transact(
    producer: Producer, body: bytes, rows: int, headers: dict[str, str] | None = None, topic: str = TOPIC
) -> None:
    """``rows`` messages in one transaction; all or none."""
    producer.begin_transaction()
    for _ in range(rows):
        producer.produce(topic, body, headers=headers)
    producer.commit_transaction(60)


def in_step(given: Arguments) -> None:
    def caller(number: int) -> Callable[[], int]:
        producer = transactional(given, number)

        def step() -> int:
            transact(producer, given.body, given.rows)
            return given.rows

        step()
        return step

    in_threads(given, caller)


def queue(given: Arguments) -> None:
    """``rows`` messages, a thousand a transaction."""
    producer, left = transactional(given, 0), given.rows
    begun = begin()
    while left:
        size = min(left, 1000)
        transact(producer, given.body, size)
        left -= size
    end(begun, given.rows, [])


def seen(given: Arguments) -> None:
    topic = f"bench-{os.getpid()}"
    producer = transactional(given, 0)
    transact(producer, given.body, 1, topic=topic)
    consumer = Consumer(
        {
            "bootstrap.servers": address(given),
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 500,
            "fetch.min.bytes": 1,
        }
    )
    consumer.subscribe([topic])
    found: list[float] = []
    ready, over = threading.Event(), threading.Event()

    def consume() -> None:
        while not over.is_set():
            message = consumer.poll(0.2)
            if message is None or message.error():
                continue
            now = time.perf_counter()
            ready.set()
            if headers := message.headers():
                found.append(now - float(headers[0][1]))

    def send_until(until: float) -> None:
        while time.perf_counter() < until:
            transact(producer, given.body, 1, {"at": repr(time.perf_counter())}, topic)
            time.sleep(0.002)

    reader = threading.Thread(target=consume)
    reader.start()
    if not ready.wait(60):
        raise SystemExit("the consumer saw nothing")
    send_until(time.perf_counter() + given.warm)
    time.sleep(0.2)
    begun = begin()
    found.clear()
    send_until(begun.at + given.seconds)
    time.sleep(0.5)
    end(begun, len(found), found)
    over.set()
    reader.join()
    consumer.close()


if __name__ == "__main__":
    {"seen": seen, "queue": queue}.get(arguments().work, in_step)(arguments())
