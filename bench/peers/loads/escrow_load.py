"""Loads EscrowMQ: see ``_load.py``. Works: threads, paced, flight, batches, seen, prepare, first, asked, queue.

An address that ends with ``#oneway`` means producers that do not wait for the ends of their transactions.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from _load import Arguments, arguments, begin, end, in_threads

import escrowmq as mq

TOPIC, SEEN, GROUP = "bench", "bench-seen", "bench"
ONE_WAY = "#oneway"
RETRY_SECONDS = 0.005


def undecided(check: mq.Check) -> mq.Outcome:
    """The checker of loads that decide by themselves."""
    return mq.UNKNOWN


def options(given: Arguments) -> dict[str, Any]:
    """Of the producer."""
    return {"checker": undecided, **({"confirm": "oneway"} if given.address.endswith(ONE_WAY) else {})}


def url(given: Arguments) -> str:
    return given.address.removesuffix(ONE_WAY)


def threads(given: Arguments) -> None:
    with mq.connect(url(given)) as bus:
        producer = bus.producer(GROUP, **options(given))

        def caller(number: int) -> Callable[[], int]:
            def step() -> int:
                with producer.transaction() as txn:
                    txn.send(TOPIC, given.body)
                return 1

            return step

        in_threads(given, caller)


def batches(given: Arguments) -> None:
    with mq.connect(url(given)) as bus:
        producer = bus.producer(GROUP, **options(given))
        table = pa.RecordBatch.from_pydict({"topic": [TOPIC] * given.rows, "body": [given.body] * given.rows})

        def caller(number: int) -> Callable[[], int]:
            def step() -> int:
                prepared = producer.prepare_batch(table).check()
                producer.end_batch(prepared.transactions, mq.COMMIT).check()
                return given.rows

            return step

        in_threads(given, caller)


def flight(given: Arguments) -> None:
    """``callers`` tasks of one event loop; ``paced``: no more than ``rows`` transactions per second."""

    async def main() -> None:
        async with await mq.aconnect(url(given)) as bus:
            producer = bus.producer(GROUP, **options(given))
            done = 0
            times: list[float] = []
            pause = given.callers / given.rows if given.work == "paced" else 0.0

            async def caller(number: int, start: float, until: float) -> None:
                nonlocal done
                turn = start + pause * number / given.callers
                last = time.perf_counter()
                while last < until:
                    if pause:
                        await asyncio.sleep(max(turn - last, 0.0))
                        turn += pause
                        last = time.perf_counter()
                    async with producer.transaction() as txn:
                        await txn.send(TOPIC, given.body)
                    now = time.perf_counter()
                    times.append(now - last)
                    last = now
                    done += 1

            async def all_callers(start: float, seconds: float) -> None:
                await asyncio.gather(*(caller(number, start, start + seconds) for number in range(given.callers)))

            await all_callers(time.perf_counter(), given.warm)
            begun = begin()
            done = 0
            times.clear()
            await all_callers(begun.at, given.seconds)
            end(begun, done, times)

    asyncio.run(main())


def seen(given: Arguments) -> None:
    found: list[float] = []
    ready = threading.Event()
    with mq.connect(url(given)) as bus:
        producer = bus.producer(GROUP, **options(given))
        consumer = bus.consumer(f"bench-{time.time_ns()}", [SEEN], start="latest")

        def consume() -> None:
            for message in consumer:
                now = time.perf_counter()
                ready.set()
                if sent := message.properties.get("at"):
                    found.append(now - float(sent))
                message.ack()

        def send_until(until: float) -> None:
            while time.perf_counter() < until:
                with producer.transaction() as txn:
                    txn.send(SEEN, given.body, properties={"at": repr(time.perf_counter())})
                time.sleep(0.002)

        reader = threading.Thread(target=consume)
        reader.start()
        while not ready.wait(0.05):
            with producer.transaction() as txn:
                txn.send(SEEN, given.body)
        send_until(time.perf_counter() + given.warm)
        time.sleep(0.2)
        begun = begin()
        found.clear()
        send_until(begun.at + given.seconds)
        time.sleep(0.5)
        end(begun, len(found), found)
        consumer.close()
        reader.join()


def rows(given: Arguments, outcome: mq.Outcome | None) -> None:
    """``rows`` messages, prepared in batches and, with an outcome, ended by it."""
    with mq.connect(url(given)) as bus:
        producer = bus.producer(GROUP, **options(given))
        producer.prepare_batch([])
        begun, left = begin(), given.rows
        while left:
            size = min(left, 1000)
            table = pa.RecordBatch.from_pydict({"topic": [TOPIC] * size, "body": [given.body] * size})
            prepared = producer.prepare_batch(table).check()
            if outcome is not None:
                producer.end_batch(prepared.transactions, outcome).check()
            left -= size
        end(begun, given.rows, [])


def first(given: Arguments) -> None:
    """The first transaction of a broker that has just been started, of a group that is asked nothing."""
    begun = begin()
    while True:
        try:
            with mq.connect(url(given)) as bus, bus.producer("bench-first", unasked=True).transaction() as txn:
                txn.send(TOPIC, given.body)
            break
        except (mq.Unknown, mq.Overloaded):
            time.sleep(RETRY_SECONDS)
    end(begun, 1, [time.perf_counter() - begun.at])


def asked(given: Arguments) -> None:
    """Be asked about ``rows`` transactions, within ``seconds``; what is asked stays undecided."""
    known: set[mq.TransactionId] = set()
    enough = threading.Event()

    def note(check: mq.Check) -> mq.Outcome:
        known.add(check.transaction_id)
        if len(known) >= given.rows:
            enough.set()
        return mq.UNKNOWN

    begun = begin()
    with mq.connect(url(given)) as bus:
        bus.producer(GROUP, checker=note)
        enough.wait(given.seconds)
        end(begun, len(known), [], max(given.rows - len(known), 0))


WORKS: dict[str, Callable[[Arguments], None]] = {
    "threads": threads,
    "paced": flight,
    "batches": batches,
    "flight": flight,
    "seen": seen,
    "prepare": lambda given: rows(given, None),
    "queue": lambda given: rows(given, mq.COMMIT),
    "first": first,
    "asked": asked,
}

if __name__ == "__main__":
    WORKS[arguments().work](arguments())
