"""Dead letters and undecided transactions, 10^5 or (``--most 6``) 10^6 of them: milliseconds of a page, a filter, a
summary, a settled batch and an edit, and the memory that they take.

The broker is in this process, so that no network is in the figures. Every dead letter has a cause of its own, of three
kinds, one of them rare. Times are those of one caller who waits for each answer; the log is on the disk of the folder,
and settled batches and edits are recorded and synced.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from _harness import Report, arguments

import escrowmq as mq
from escrowmq.broker import embedded

ROWS = 10_000
SETTLED = 4096
REPEATS = 10
RARE = 1000
"""One of so many dead letters has the rare cause."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--most", type=int, default=5, help="10 to the power of this many")
    options = parser.parse_args()
    options.embedded = True
    report = Report("dead letters", options)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder, opened(folder) as bus:
        engine = embedded._open[Path(folder).resolve()].calls.engine
        bus.admin.create_topic("orders", 4)
        dead_letters(report, bus, engine, 10**options.most, options)
        transactions(report, bus, 10**options.most)
    report.end()


def opened(folder: str) -> mq.Bus:
    """A broker in this process, which does not tell of every death in its log."""
    logging.disable(logging.WARNING)
    return mq.connect(f"file:{folder}")


def dead_letters(report: Report, bus: mq.Bus, engine: Any, count: int, options: argparse.Namespace) -> None:
    producer, body = bus.producer("bench"), b"x" * min(options.body, 64)
    for _ in range(0, count, ROWS):
        producer.send_batch(pa.table({"topic": ["orders"] * ROWS, "body": pa.array([body] * ROWS, pa.binary())}))
    before, begun = resident_bytes(), time.perf_counter()
    kill(bus, count)
    report.add("a death, one after the other in batches", "µs", "-", [(time.perf_counter() - begun) / count * 1e6])
    report.add("memory of a dead letter, with a cause of its own", "B", "-", [(resident_bytes() - before) / count])
    admin, link = bus.admin, bus.router.links[0]

    def page(**more: Any) -> Any:
        return link.action("dead_letters.list", {"group": "cart", **more}, 60)

    middle = [2, count // 8]
    tell(report, "page of 1,000, the first", lambda: page(), goal="< 100")
    tell(report, "page of 1,000, in the middle", lambda: page(after=middle), goal="< 100")
    tell(report, "page of 1,000 of the rare cause", lambda: page(cause="a rare thing"), goal="< 100")
    tell(report, "page of 1,000 of a cause that none has", lambda: page(cause="unheard of"), goal="< 100")
    tell(report, "summary", lambda: admin.dead_letters_summary("cart"), goal="< 1000")
    tell(report, "snapshot of the ledger, on the writer", lambda: engine.look(engine.shard.ledger.snapshot).result())
    letters = list(admin.dead_letters("cart", 4 * SETTLED * REPEATS))
    retried = [letters[at * SETTLED : (at + 1) * SETTLED] for at in range(REPEATS)]
    scattered = letters[REPEATS * SETTLED :]
    discarded = [scattered[at::REPEATS][:SETTLED] for at in range(REPEATS)]
    each = "settle {:,}, {}".format
    times_of(
        report, each(SETTLED, "retry, neighbours"), [lambda p=p: admin.retry_dead_letters("cart", p) for p in retried]
    )
    times_of(
        report,
        each(SETTLED, "discard, scattered"),
        [lambda p=p: admin.discard_dead_letters("cart", p) for p in discarded],
    )
    left = page(after=middle)["dead_letters"][:REPEATS]
    times_of(report, "edit one", [lambda x=x: admin.edit_dead_letter("cart", x, body=b"new") for x in left], goal="-")


def kill(bus: mq.Bus, count: int) -> None:
    """Every message becomes a dead letter of ``cart``."""
    with bus.consumer("cart", "orders", max_attempts=1, lease=600.0) as consumer:
        number = 0
        while number < count:
            for message in consumer.receive(ROWS, wait=30.0):
                number += 1
                rare, odd = number % RARE == 0, number % 2
                cause = (
                    "a rare thing" if rare else f"no stock for order {number}" if odd else f"timeout after {number} ms"
                )
                message.nack(0.0, cause)
        consumer.flush()


def transactions(report: Report, bus: mq.Bus, count: int) -> None:
    producer = bus.producer("shop", unasked=True)
    before = resident_bytes()
    for _ in range(0, count, ROWS):
        producer.prepare_batch(pa.table({"topic": ["orders"] * ROWS, "body": pa.array([b"x"] * ROWS, pa.binary())}))
    report.add("memory of an undecided transaction", "B", "-", [(resident_bytes() - before) / count])
    link = bus.router.links[0]

    def page(**more: Any) -> Any:
        return link.action("transactions.list", {"state": "undecided", "group": "shop", **more}, 60)

    after = page(limit=10_000)["next"] + count // 2
    tell(report, "transactions, page of 1,000, the first", lambda: page(), goal="< 100")
    tell(report, "transactions, page of 1,000, in the middle", lambda: page(after=after, older_than=0.0), goal="< 100")
    tell(report, "transactions, page of a cause that none has", lambda: page(cause="aged"), goal="< 100")
    tell(report, "transactions, summary", lambda: bus.admin.transactions_summary(), goal="< 1000")


def resident_bytes() -> int:
    """Of this process, by Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tell(report: Report, name: str, act: Callable[[], Any], goal: str = "-") -> None:
    times_of(report, name, [act] * REPEATS, goal)


def times_of(report: Report, name: str, acts: list[Callable[[], Any]], goal: str = "< 100") -> None:
    times = []
    for act in acts:
        begun = time.perf_counter()
        act()
        times.append((time.perf_counter() - begun) * 1e3)
    report.add(name, "ms", goal, times, most=max(times))


if __name__ == "__main__":
    main()
