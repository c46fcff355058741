"""What the Python load programs share: arguments, the start in step with others, threads, and the one line of JSON at the end.

A load program is called as ``LOAD.py ADDRESS WORK CALLERS SECONDS BODY ROWS START``. It writes ``begin`` on standard output when it is warm
and START (milliseconds since 1970) has come, and at the end one JSON object.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Arguments(NamedTuple):
    """What the measuring asks for."""

    address: str
    work: str
    callers: int
    seconds: float
    body: bytes
    rows: int
    start_ms: int


def arguments() -> Arguments:
    """Of this program."""
    address, work, callers, seconds, size, rows, start_ms = sys.argv[1:]
    return Arguments(address, work, int(callers), float(seconds), b"x" * int(size), int(rows), int(start_ms))


def begin(given: Arguments) -> float:
    """Wait for the common start and say so; the processor time of this process until now."""
    time.sleep(max(given.start_ms / 1000 - time.time(), 0.0))
    print("begin", flush=True)
    return time.process_time()


def end(done: int, seconds: float, cpu_s: float, latencies_s: Sequence[float], failed: int = 0) -> None:
    """The last line."""
    ordered = sorted(latencies_s)
    centiles = {
        name: 1e3 * ordered[int(len(ordered) * part)] if ordered else 0.0
        for name, part in (("p50_ms", 0.5), ("p99_ms", 0.99))
    }
    print(json.dumps({"done": done, "seconds": seconds, "failed": failed, "cpu_s": cpu_s, **centiles}), flush=True)


def in_threads(given: Arguments, caller: Callable[[int], Callable[[], int]]) -> None:
    """``caller(number)`` makes one caller's step, warm; a step does some transactions and says how many. Prints the result."""
    steps = [caller(number) for number in range(given.callers)]
    for step in steps:
        step()
    counts = [0] * given.callers
    times: list[list[float]] = [[] for _ in steps]
    before = begin(given)
    start = time.perf_counter()
    until = start + given.seconds

    def work(number: int) -> None:
        step, taken = steps[number], times[number]
        last = time.perf_counter()
        while last < until:
            counts[number] += step()
            now = time.perf_counter()
            taken.append(now - last)
            last = now

    threads = [threading.Thread(target=work, args=(number,)) for number in range(given.callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    end(sum(counts), seconds, time.process_time() - before, [one for taken in times for one in taken])
