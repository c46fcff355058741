"""Transactions a second, prepare and commit each, synced before every answer: batches, threads, asyncio, one caller."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
from _harness import Report, arguments, broker

import escrowmq as mq

GROUP = "bench"


def batch_face(bus: mq.Bus, body: bytes, rows: int, threads: int, seconds: float) -> float:
    """Columns in, columns out: ``threads`` callers with one batch each in flight."""
    producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)
    table = pa.RecordBatch.from_pydict({"topic": ["bench-batch"] * rows, "body": [body] * rows})

    def work(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            receipts = producer.prepare_batch(table)
            results = producer.end_batch(receipts.transactions, mq.COMMIT)
            assert receipts.ok
            assert results.ok
            done += rows
        return done

    return in_threads(work, threads, seconds, producer)


def thread_face(bus: mq.Bus, body: bytes, threads: int, seconds: float) -> float:
    """One message a call, one thread a caller."""
    producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)

    def work(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            with producer.transaction() as txn:
                txn.send("bench-threads", body)
            done += 1
        return done

    return in_threads(work, threads, seconds, producer)


def in_threads(work, threads: int, seconds: float, producer: mq.Producer) -> float:
    """Calls of ``work`` on threads; what they did a second."""
    producer.prepare_batch([])  # opens the session
    counts = [0] * threads
    start = time.perf_counter()

    def run(index: int) -> None:
        counts[index] = work(start + seconds)

    callers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    rate = sum(counts) / (time.perf_counter() - start)
    producer.close()
    return rate


async def loop_face(url: str, body: bytes, in_flight: int, seconds: float, rate: float | None = None) -> float:
    """One message a call, ``in_flight`` tasks; with ``rate``, no faster than that."""
    async with await mq.aconnect(url) as bus:
        producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)
        async with producer.transaction() as txn:
            await txn.send("bench-loop", body)
        start = time.perf_counter()
        until = start + seconds
        done = 0

        async def caller(index: int) -> None:
            nonlocal done
            turn = start + index / (rate or 1.0)
            while time.perf_counter() < until:
                if rate is not None:
                    await asyncio.sleep(max(turn - time.perf_counter(), 0))
                    turn += in_flight / rate
                async with producer.transaction() as txn:
                    await txn.send("bench-loop", body)
                done += 1

        await asyncio.gather(*(caller(index) for index in range(in_flight)))
        return done / (time.perf_counter() - start)


def latencies(bus: mq.Bus, body: bytes, seconds: float) -> tuple[list[float], list[float]]:
    """One caller, one in flight: milliseconds of each prepare and each commit."""
    producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)
    prepares, commits = [], []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        receipt = producer.prepare("bench-one", body)
        middle = time.perf_counter()
        producer.commit(receipt.transaction_id)
        prepares.append(1e3 * (middle - start))
        commits.append(1e3 * (time.perf_counter() - middle))
    producer.close()
    return prepares[5:], commits[5:]


def visible(bus: mq.Bus, seconds: float) -> list[float]:
    """Milliseconds from the begin of a prepare until a waiting consumer has the committed message."""
    producer = bus.producer(GROUP, checker=lambda check: mq.UNKNOWN)
    found: list[float] = []
    with bus.consumer("bench-visible", ["bench-visible"], start="latest") as consumer:

        def consume() -> None:
            for batch in consumer.batches():
                now = time.perf_counter()
                for message in batch:
                    found.append(1e3 * (now - float(message.body)))
                batch.ack(wait=False)

        reader = threading.Thread(target=consume)
        reader.start()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            with producer.transaction() as txn:
                txn.send("bench-visible", repr(time.perf_counter()).encode())
            time.sleep(0.002)
        time.sleep(0.2)
        consumer.close()
        reader.join()
    producer.close()
    return found[5:]


def sync_time(folder: str) -> list[float]:
    """Milliseconds of one small write and sync, the floor of everything else here."""
    path = os.path.join(folder, f"escrowmq-sync-{os.getpid()}")
    times = []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
        os.fsync(descriptor)
        for index in range(200):
            start = time.perf_counter()
            os.pwrite(descriptor, b"x" * 1300, index * 1300)
            os.fdatasync(descriptor)
            times.append(1e3 * (time.perf_counter() - start))
    finally:
        os.close(descriptor)
        os.unlink(path)
    return times


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=1000, help="rows of one batch")
    parser.add_argument("--batch-callers", type=int, default=4, help="threads that send batches")
    parser.add_argument("--threads", type=int, default=64, help="threads that send one message a call")
    parser.add_argument("--in-flight", type=int, default=1000, help="tasks of the event loop")
    parser.add_argument("--load", type=float, help=argparse_hidden())
    options = parser.parse_args()
    body = os.urandom(options.body)
    if options.load:  # this script as a load in the background
        asyncio.run(loop_face(options.url, body, options.in_flight, options.seconds, options.load))
        return
    report = Report("transactions", options)
    report.begin()
    with broker(options) as url, mq.connect(url) as bus:
        seconds = options.seconds
        report.measure(
            f"batch face, {options.batch_callers} callers, {options.batch} a batch",
            "tx/s",
            ">= 300,000",
            lambda: batch_face(bus, body, options.batch, options.batch_callers, seconds),
        )
        report.measure(
            f"one message a call, {options.threads} threads",
            "tx/s",
            ">= 15,000",
            lambda: thread_face(bus, body, options.threads, seconds),
        )
        rate = report.measure(
            f"one message a call, asyncio, {options.in_flight} in flight",
            "tx/s",
            ">= 60,000",
            lambda: asyncio.run(loop_face(url, body, options.in_flight, seconds)),
        )
        if report.wants("one caller"):
            report.add("a 1.3 kB write and its sync, alone", "ms", "(floor)", sync_time(str(options.folder or "/tmp")))
            prepares, commits = latencies(bus, body, seconds)
            report.add("one caller, prepare", "ms", "a sync + 0.2", prepares, **centiles(prepares))
            report.add("one caller, commit", "ms", "a sync + 0.2", commits, **centiles(commits))
        if report.wants("visible") and not options.embedded:
            load = rate / 2 or 20_000
            with background(url, options, load):
                times = visible(bus, seconds)
            p99 = centiles(times)["p99"]
            report.add(f"prepare to visible, p99, {load:,.0f} tx/s beside it", "ms", "< 10", [p99], **centiles(times))
    report.end()


def argparse_hidden() -> str:
    import argparse

    return argparse.SUPPRESS


def centiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "mean": statistics.fmean(values)}


class background:
    """A process that keeps a load on the broker."""

    def __init__(self, url: str, options, rate: float) -> None:
        self._command = [
            *(sys.executable, __file__, "--url", url, "--load", str(rate), "--body", str(options.body)),
            *("--seconds", str(options.seconds + 30), "--in-flight", str(options.in_flight)),
        ]

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command)
        time.sleep(2.0)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


if __name__ == "__main__":
    main()
