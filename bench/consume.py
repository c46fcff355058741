"""Messages a second that one consumer takes and acknowledges: in batches, and one by one."""

from __future__ import annotations

import itertools
import os
import time

import pyarrow as pa
from _harness import Report, arguments, broker

import escrowmq as mq

GROUPS = itertools.count()


def fill(bus: mq.Bus, topic: str, body: bytes, count: int) -> None:
    """Put ``count`` messages into a topic."""
    rows = 10_000
    table = pa.RecordBatch.from_pydict({"topic": [topic] * rows, "body": [body] * rows})
    producer = bus.producer("bench-fill")
    for start in range(0, count, rows):
        producer.send_batch(table.slice(0, min(rows, count - start))).check()


def in_batches(bus: mq.Bus, topic: str, count: int, batch_rows: int, prefetch: int) -> float:
    """A new group drains the topic by columns; every batch is acknowledged."""
    taken = 0
    name = f"bench-{os.getpid()}-{next(GROUPS)}"
    with bus.consumer(name, [topic], prefetch=prefetch, max_bytes=64 << 20) as consumer:
        start = time.perf_counter()
        for batch in consumer.batches(batch_rows):
            taken += batch.arrow.num_rows
            batch.ack(wait=False)
            if taken >= count:
                break
        assert consumer.flush() == 0
        return taken / (time.perf_counter() - start)


def one_by_one(bus: mq.Bus, topic: str, count: int, prefetch: int) -> float:
    """A new group drains the topic by messages; the body of each is looked at, and each is acknowledged."""
    taken, size = 0, 0
    with bus.consumer(f"bench-{os.getpid()}-{next(GROUPS)}", [topic], prefetch=prefetch) as consumer:
        start = time.perf_counter()
        for message in consumer:
            size += len(message.body)
            message.ack()
            taken += 1
            if taken >= count:
                break
        assert consumer.flush() == 0
        return taken / (time.perf_counter() - start)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--messages", type=int, default=500_000, help="messages in the topic")
    parser.add_argument("--batch", type=int, default=20_000, help="rows of one batch")
    parser.add_argument("--prefetch", type=int, default=2, help="receives ahead")
    options = parser.parse_args()
    report = Report("consume", options)
    report.begin()
    with broker(options) as url, mq.connect(url) as bus:
        topic = "bench-consume"
        fill(bus, topic, os.urandom(options.body), options.messages)
        for rows in dict.fromkeys((options.batch, 1000)):
            report.measure(
                f"one consumer, batches of {rows}",
                "msg/s",
                ">= 500,000",
                lambda rows=rows: in_batches(bus, topic, options.messages, rows, options.prefetch),
            )
        few = min(options.messages, 100_000)
        report.measure(
            "one consumer, one message at a time, each acknowledged",
            "msg/s",
            "",
            lambda: one_by_one(bus, topic, few, options.prefetch),
        )
    report.end()


if __name__ == "__main__":
    main()
