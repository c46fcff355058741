"""Loads Kafka with transactions, one producer per caller: see ``_load.py``. Works: threads, batches, seen."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from _load import Arguments, arguments, begin, end, in_threads
from confluent_kafka import Consumer, Producer

TOPIC = "bench"


def transactional(given: Arguments, number: int) -> Producer:
    """A producer that has begun its work."""
    name = f"bench-{os.getpid()}-{number}"
    settings = {"bootstrap.servers": given.address.removeprefix("kafka://"), "transactional.id": name, "linger.ms": 0}
    producer = Producer(settings)
    producer.init_transactions(60)
    return producer


def transact(producer: Producer, body: bytes, rows: int, headers: dict[str, str] | None = None) -> None:
    """``rows`` messages in one transaction; all or none."""
    producer.begin_transaction()
    for _ in range(rows):
        producer.produce(TOPIC, body, headers=headers)
    producer.commit_transaction(60)


def in_step(given: Arguments) -> None:
    def caller(number: int) -> Callable[[], int]:
        producer = transactional(given, number)

        def step() -> int:
            transact(producer, given.body, given.rows)
            return given.rows

        return step

    in_threads(given, caller)


def seen(given: Arguments) -> None:
    producer = transactional(given, 0)
    transact(producer, given.body, 1)
    consumer = Consumer(
        {
            "bootstrap.servers": given.address.removeprefix("kafka://"),
            "group.id": f"bench-{os.getpid()}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 500,
            "fetch.min.bytes": 1,
        }
    )
    consumer.subscribe([TOPIC])
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

    reader = threading.Thread(target=consume)
    reader.start()
    ready.wait(60)
    before, start = begin(given), time.perf_counter()
    while time.perf_counter() < start + given.seconds:
        transact(producer, given.body, 1, {"at": repr(time.perf_counter())})
        time.sleep(0.002)
    time.sleep(0.5)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    over.set()
    reader.join()
    consumer.close()
    end(len(found), seconds, cpu, found)


if __name__ == "__main__":
    seen(arguments()) if arguments().work == "seen" else in_step(arguments())
