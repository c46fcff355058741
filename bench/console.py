"""Pages of the console over a broker with 10^5 or (``--most 6``) 10^6 dead letters of three causes, and as many
undecided transactions: milliseconds of each page, for one person who waits for it.

Broker and console are in this process, the pages come over HTTP on the loopback interface.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

import httpx
import pyarrow as pa
from _harness import Report, arguments

import escrowmq as mq
from escrowmq.connecting import links
from escrowmq.console import beside

ROWS = 10_000
REPEATS = 10
GOAL = "< 1000"
CAUSES = ("timeout after 17 ms", "no stock for order 4711", "a rare thing")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--most", type=int, default=5, help="10 to the power of this many")
    options = parser.parse_args()
    options.embedded = True
    logging.disable(logging.WARNING)  # not a line for every death
    report = Report("console", options)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
        url = f"file:{Path(folder) / 'data'}"
        with mq.connect(url) as bus:
            fill(bus, 10**options.most)
            prepare(bus, 10**options.most)
            transaction = bus.admin.transactions("undecided", limit=1)[0]["id"]
            letter = bus.admin.dead_letters("cart", 1)[0]
            with beside(lambda _: links(url, {}), listen="127.0.0.1:0", plans=Path(folder) / "plans") as at:
                place = f"topic=orders&queue={letter['queue']}&offset={letter['offset']}"
                paths = [
                    "/",
                    "/waiting",
                    "/groups",
                    "/groups/cart",
                    "/topics/orders",
                    "/dead-letters",
                    "/dead-letters/cart",
                ]
                paths += [
                    "/producers",
                    "/transactions?state=undecided",
                    "/transactions?state=parked",
                    "/acts",
                    "/plans",
                ]
                paths += ["/transactions?state=open&group=shop&older=1s", f"/transactions/{transaction}"]
                paths += ["/dead-letters/cart?cause=a+rare+thing", f"/dead-letters/cart/letter?{place}", "/find?q=k77"]
                with httpx.Client(base_url=at["console"], trust_env=False, timeout=60.0) as browser:
                    for path in paths:
                        times = [seconds(browser, path) * 1e3 for _ in range(REPEATS)]
                        name = "/transactions/ID" if transaction in path else path.partition("?topic")[0]
                        report.add(name, "ms", GOAL, times, most=max(times))
    report.end()


def seconds(browser: httpx.Client, path: str) -> float:
    """How long a page takes."""
    begun = time.perf_counter()
    browser.get(path).raise_for_status()
    return time.perf_counter() - begun


def fill(bus: mq.Bus, count: int) -> None:
    """So many dead letters of the group ``cart``."""
    bus.admin.create_topic("orders", 4)
    producer = bus.producer("bench")
    for first in range(0, count, ROWS):
        keys = [f"k{number}" for number in range(first, first + ROWS)]
        body = pa.array([b"{}"] * ROWS, pa.binary())
        producer.send_batch(pa.table({"topic": ["orders"] * ROWS, "body": body, "key": keys}))
    with bus.consumer("cart", "orders", max_attempts=1, lease=600.0) as consumer:
        number = 0
        while number < count:
            for message in consumer.receive(ROWS, wait=30.0):
                number += 1
                message.nack(0.0, CAUSES[2] if number % 1000 == 0 else CAUSES[number % 2])
        consumer.flush()


def prepare(bus: mq.Bus, count: int) -> None:
    """So many undecided transactions of the group ``shop``, about which nobody can be asked."""
    producer = bus.producer("shop", unasked=True)
    for _ in range(0, count, ROWS):
        producer.prepare_batch(pa.table({"topic": ["orders"] * ROWS, "body": pa.array([b"{}"] * ROWS, pa.binary())}))


if __name__ == "__main__":
    main()
