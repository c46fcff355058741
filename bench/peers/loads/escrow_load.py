"""Loads EscrowMQ: see ``_load.py``. Works: threads, flight, batches, seen, prepare, asked, queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pyarrow as pa
from _load import Arguments, arguments, begin, end, in_threads

import escrowmq as mq

TOPIC, GROUP = "bench", "bench"


def undecided(check: mq.Check) -> mq.Outcome:
    """The checker of loads that decide by themselves."""
    return mq.UNKNOWN


def threads(given: Arguments) -> None:
    with mq.connect(given.address) as bus:
        producer = bus.producer(GROUP, checker=undecided)

        def caller(number: int) -> Callable[[], int]:
            def step() -> int:
                with producer.transaction() as txn:
                    txn.send(TOPIC, given.body)
                return 1

            return step

        in_threads(given, caller)


def batches(given: Arguments) -> None:
    with mq.connect(given.address) as bus:
        producer = bus.producer(GROUP, checker=undecided)
        table = pa.RecordBatch.from_pydict({"topic": [TOPIC] * given.rows, "body": [given.body] * given.rows})

        def caller(number: int) -> Callable[[], int]:
            def step() -> int:
                prepared = producer.prepare_batch(table).check()
                producer.end_batch(prepared.transactions, mq.COMMIT).check()
                return given.rows

            return step

        in_threads(given, caller)


def flight(given: Arguments) -> None:
    async def main() -> None:
        async with await mq.aconnect(given.address) as bus:
            producer = bus.producer(GROUP, checker=undecided)
            done = 0
            times: list[float] = []

            async def caller(until: float) -> None:
                nonlocal done
                last = time.perf_counter()
                while last < until:
                    async with producer.transaction() as txn:
                        await txn.send(TOPIC, given.body)
                    now = time.perf_counter()
                    times.append(now - last)
                    last = now
                    done += 1

            await asyncio.gather(*(caller(time.perf_counter() + 0.3) for _ in range(given.callers)))
            done, before, start = 0, begin(given), time.perf_counter()
            times.clear()
            await asyncio.gather(*(caller(start + given.seconds) for _ in range(given.callers)))
            end(done, time.perf_counter() - start, time.process_time() - before, times)

    asyncio.run(main())


def seen(given: Arguments) -> None:
    found: list[float] = []
    ready = threading.Event()
    with mq.connect(given.address) as bus:
        producer = bus.producer(GROUP, checker=undecided)
        consumer = bus.consumer(f"bench-{time.time_ns()}", [TOPIC], start="latest")

        def consume() -> None:
            for message in consumer:
                now = time.perf_counter()
                ready.set()
                if sent := message.properties.get("at"):
                    found.append(now - float(sent))
                message.ack(wait=False)

        reader = threading.Thread(target=consume)
        reader.start()
        while not ready.wait(0.05):
            with producer.transaction() as txn:
                txn.send(TOPIC, given.body)
        before, start = begin(given), time.perf_counter()
        while time.perf_counter() < start + given.seconds:
            with producer.transaction() as txn:
                txn.send(TOPIC, given.body, properties={"at": repr(time.perf_counter())})
            time.sleep(0.002)
        time.sleep(0.5)
        seconds, cpu = time.perf_counter() - start, time.process_time() - before
        consumer.close()
        reader.join()
    end(len(found), seconds, cpu, found)


def rows(given: Arguments, outcome: mq.Outcome | None) -> None:
    """``rows`` messages, prepared in batches and, with an outcome, ended by it."""
    with mq.connect(given.address) as bus:
        producer = bus.producer(GROUP, checker=undecided)
        producer.prepare_batch([])
        before, start, left = begin(given), time.perf_counter(), given.rows
        while left:
            size = min(left, 1000)
            table = pa.RecordBatch.from_pydict({"topic": [TOPIC] * size, "body": [given.body] * size})
            prepared = producer.prepare_batch(table).check()
            if outcome is not None:
                producer.end_batch(prepared.transactions, outcome).check()
            left -= size
        end(given.rows, time.perf_counter() - start, time.process_time() - before, [])


def asked(given: Arguments) -> None:
    """Be asked about ``rows`` transactions, within ``seconds``."""
    known: set[mq.TransactionId] = set()
    enough = threading.Event()

    def commit(check: mq.Check) -> mq.Outcome:
        known.add(check.transaction_id)
        if len(known) >= given.rows:
            enough.set()
        return mq.COMMIT

    before, start = begin(given), time.perf_counter()
    with mq.connect(given.address) as bus:
        bus.producer(GROUP, checker=commit)
        enough.wait(given.seconds)
    left = max(given.rows - len(known), 0)
    end(len(known), time.perf_counter() - start, time.process_time() - before, [], left)


WORKS: dict[str, Callable[[Arguments], None]] = {
    "threads": threads,
    "batches": batches,
    "flight": flight,
    "seen": seen,
    "prepare": lambda given: rows(given, None),
    "queue": lambda given: rows(given, mq.COMMIT),
    "asked": asked,
}

if __name__ == "__main__":
    WORKS[arguments().work](arguments())
