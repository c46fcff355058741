"""What the Python load programs share: arguments, the start in step with others, threads, and the one line of JSON at
the end.

A load program is called as ``LOAD.py ADDRESS WORK CALLERS SECONDS WARM BODY ROWS``. It does its work for WARM seconds
that do not count, writes ``ready`` on standard output, waits for a line on standard input, and writes one JSON object
at the end.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Arguments(NamedTuple):
    """What the measuring asks for."""

    address: str
    work: str
    callers: int
    seconds: float
    warm: float
    body: bytes
    rows: int


class Begun(NamedTuple):
    """What this process had spent when its work began."""

    at: float
    cpu_s: float
    written: int


def arguments() -> Arguments:
    """Of this program."""
    address, work, callers, seconds, warm, size, rows = sys.argv[1:]
    return Arguments(address, work, int(callers), float(seconds), float(warm), b"x" * int(size), int(rows))


def begin() -> Begun:
    """Say that all is warm, and wait for the common start."""
    print("ready", flush=True)
    sys.stdin.readline()
    return Begun(time.perf_counter(), time.process_time(), _written())


def _written() -> int:
    """Bytes that this process has given to the disk (a broker may be inside it)."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), 0)


def end(begun: Begun, done: int, latencies_s: Sequence[float], failed: int = 0) -> None:
    """The last line."""
    seconds, cpu_s, written = time.perf_counter() - begun.at, time.process_time() - begun.cpu_s, _written()
    ordered = sorted(latencies_s)
    centiles = {
        name: 1e3 * ordered[int(len(ordered) * part)] if ordered else 0.0
        for name, part in (("p10_ms", 0.1), ("p50_ms", 0.5), ("p99_ms", 0.99))
    }
    found = {"done": done, "seconds": seconds, "failed": failed, "cpu_s": cpu_s, "written": written - begun.written}
    print(json.dumps({**found, **centiles}), flush=True)


def in_threads(given: Arguments, caller: Callable[[int], Callable[[], int]]) -> None:
    """``caller(number)`` makes one caller's step; a step does some transactions and says how many. Prints the result.

    Work ``paced``: ``rows`` transactions per second of all callers together, if they come to that."""
    steps = [caller(number) for number in range(given.callers)]
    pause = given.callers / given.rows if given.work == "paced" else 0.0
    if given.warm:
        _run(steps, time.perf_counter(), given.warm, pause)
    begun = begin()
    counts, times = _run(steps, begun.at, given.seconds, pause)
    end(begun, sum(counts), [one for taken in times for one in taken])


def _run(
    steps: Sequence[Callable[[], int]], start: float, seconds: float, pause: float
) -> tuple[list[int], list[list[float]]]:
    """Each step again and again on a thread of its own; what they did, and how long each took."""
    counts = [0] * len(steps)
    times: list[list[float]] = [[] for _ in steps]
    until = start + seconds

    def work(number: int) -> None:
        step, taken = steps[number], times[number]
        turn, last = start + pause * number / len(steps), time.perf_counter()
        while last < until or not taken:  # once at least, on however busy a machine
            if pause:
                time.sleep(max(turn - last, 0.0))
                turn += pause
                last = time.perf_counter()
            counts[number] += step()
            now = time.perf_counter()
            taken.append(now - last)
            last = now

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, times
