"""Loads Redis with XADD, one connection per caller: see ``_load.py``. Works: threads, paced, batches (a pipeline),
seen, queue.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from _load import Arguments, arguments, begin, end, in_threads
from redis import Redis

STREAM = "bench"


def add(client: Redis, body: bytes, rows: int) -> None:
    """``rows`` entries in one pipeline."""
    pipeline = client.pipeline(transaction=False)
    for _ in range(rows):
        pipeline.xadd(STREAM, {"body": body})
    pipeline.execute()


def in_step(given: Arguments) -> None:
    def caller(number: int) -> Callable[[], int]:
        client = Redis.from_url(given.address)

        def one() -> int:
            client.xadd(STREAM, {"body": given.body})
            return 1

        def many() -> int:
            add(client, given.body, given.rows)
            return given.rows

        return many if given.work == "batches" else one

    in_threads(given, caller)


def queue(given: Arguments) -> None:
    """``rows`` entries, a thousand a pipeline."""
    client, left = Redis.from_url(given.address), given.rows
    begun = begin()
    while left:
        size = min(left, 1000)
        add(client, given.body, size)
        left -= size
    end(begun, given.rows, [])


def seen(given: Arguments) -> None:
    stream = f"bench-{os.getpid()}"
    found: list[float] = []
    over = threading.Event()

    def consume() -> None:
        client, last = Redis.from_url(given.address), "$"
        while not over.is_set():
            for _, entries in client.xread({stream: last}, block=200) or ():
                now = time.perf_counter()
                for last, values in entries:  # noqa: B007  # the id to go on from
                    found.append(now - float(values[b"at"]))

    def send_until(until: float) -> None:
        while time.perf_counter() < until:
            client.xadd(stream, {"body": given.body, "at": repr(time.perf_counter())})
            time.sleep(0.002)

    client = Redis.from_url(given.address)
    reader = threading.Thread(target=consume)
    reader.start()
    time.sleep(0.3)
    send_until(time.perf_counter() + given.warm)
    begun = begin()
    found.clear()
    send_until(begun.at + given.seconds)
    time.sleep(0.5)
    end(begun, len(found), found)
    over.set()
    reader.join()


if __name__ == "__main__":
    {"seen": seen, "queue": queue}.get(arguments().work, in_step)(arguments())
