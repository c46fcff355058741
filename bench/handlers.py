"""What a handler costs per message, beside a loop over batches: microseconds of one process that drains a topic."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable

from _harness import Report, arguments, broker
from consume import fill

import escrowmq as mq
from escrowmq.handlers import App, Handled

GROUPS = itertools.count()
TOPIC = "bench-handlers"


def new_group() -> str:
    return f"bench-handlers-{os.getpid()}-{next(GROUPS)}"


def in_batches(bus: mq.Bus, count: int) -> float:
    """Microseconds per message of a loop over ``consumer.batches`` that looks at every body."""
    taken, size = 0, 0
    with bus.consumer(new_group(), [TOPIC]) as consumer:
        start = time.perf_counter()
        for batch in consumer.batches(1000):
            for message in batch:
                size += len(message.body)
            taken += len(batch)
            batch.ack(wait=False)
            if taken >= count:
                break
        consumer.flush()
        return (time.perf_counter() - start) / taken * 1e6


class Counter:
    """Counts results; notices when all messages were handled."""

    def __init__(self, count: int) -> None:
        self.left, self.done = count, threading.Event()

    def __call__(self, handled: Handled) -> None:
        self.left -= 1
        if not self.left:
            self.done.set()


def plain(bus: mq.Bus, count: int, **choices: int) -> float:
    """Microseconds per message of a plain function."""
    app = App()

    @app.handler(TOPIC, group=new_group(), **choices)  # type: ignore[arg-type]
    def handle(body: bytes) -> None:
        len(body)

    return run(app, bus, count)


def awaited(bus: mq.Bus, count: int) -> float:
    """Microseconds per message of a coroutine function."""
    app = App()

    @app.handler(TOPIC, group=new_group(), concurrency=8)
    async def handle(body: bytes) -> None:
        len(body)

    async def main() -> float:
        async with mq.AsyncBus(bus.router.links, owns_links=False) as own:
            counter = Counter(count)
            start = time.perf_counter()
            async with app.running(own, on_handled=counter):
                while not await asyncio.to_thread(counter.done.wait, 0.05):
                    pass
                return (time.perf_counter() - start) / count * 1e6

    return asyncio.run(main())


def run(app: App, bus: mq.Bus, count: int) -> float:
    counter = Counter(count)
    start = time.perf_counter()
    with app.running(bus, on_handled=counter):
        counter.done.wait()
        return (time.perf_counter() - start) / count * 1e6


def timed(one: Callable[[], float], count: int) -> tuple[float, float]:
    """Microseconds per message: of the clock, and of this process."""
    before = time.process_time()
    return one(), (time.process_time() - before) / count * 1e6


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(body=100)
    parser.add_argument("--messages", type=int, default=100_000, help="messages in the topic")
    options = parser.parse_args()
    report = Report("handlers", options)
    report.begin()
    with broker(options) as url, mq.connect(url) as bus:
        fill(bus, TOPIC, os.urandom(options.body), options.messages)
        count = options.messages
        plain(bus, count)
        loops, handlers = [], []
        for _ in range(options.repeats):  # in turns, so that both have the same minute
            loops.append(timed(lambda: in_batches(bus, count), count))
            handlers.append(timed(lambda: plain(bus, count), count))
        for place, kind in enumerate(("", ", processor time of the client")):
            extra = [one[place] - other[place] for one, other in zip(handlers, loops, strict=True)]
            report.add(f"a loop over batches{kind}", "us/msg", "", [loop[place] for loop in loops])
            report.add(f"a plain handler, above that{kind}", "us/msg", "<= 15", extra)
        report.measure("a plain handler, concurrency 4", "us/msg", "", lambda: plain(bus, count, concurrency=4))
        report.measure("a coroutine handler, concurrency 8", "us/msg", "", lambda: awaited(bus, count))
    report.end()


if __name__ == "__main__":
    main()
