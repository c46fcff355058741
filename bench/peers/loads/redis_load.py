"""Loads Redis with XADD, one connection per caller: see ``_load.py``. Works: threads, batches (a pipeline), seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from _load import Arguments, arguments, begin, end, in_threads
from redis import Redis

STREAM = "bench"


def in_step(given: Arguments) -> None:
    def caller(number: int) -> Callable[[], int]:
        client = Redis.from_url(given.address)

        def one() -> int:
            client.xadd(STREAM, {"body": given.body})
            return 1

        def many() -> int:
            pipeline = client.pipeline(transaction=False)
            for _ in range(given.rows):
                pipeline.xadd(STREAM, {"body": given.body})
            pipeline.execute()
            return given.rows

        return one if given.rows == 1 else many

    in_threads(given, caller)


def seen(given: Arguments) -> None:
    found: list[float] = []
    over = threading.Event()

    def consume() -> None:
        client, last = Redis.from_url(given.address), "$"
        while not over.is_set():
            for _, entries in client.xread({STREAM: last}, block=200) or ():
                now = time.perf_counter()
                for last, values in entries:  # noqa: B007  # the id to go on from
                    found.append(now - float(values[b"at"]))

    client = Redis.from_url(given.address)
    client.xadd(STREAM, {"body": given.body})
    reader = threading.Thread(target=consume)
    reader.start()
    time.sleep(0.3)
    before, start = begin(given), time.perf_counter()
    while time.perf_counter() < start + given.seconds:
        client.xadd(STREAM, {"body": given.body, "at": repr(time.perf_counter())})
        time.sleep(0.002)
    time.sleep(0.5)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    over.set()
    reader.join()
    end(len(found), seconds, cpu, found)


if __name__ == "__main__":
    seen(arguments()) if arguments().work == "seen" else in_step(arguments())
