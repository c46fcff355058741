"""What four worker processes receive under a rate limit of their group, in every window of ten seconds.

Each worker receives up to a thousand messages at a time, and acknowledges each. ``highest`` and ``lowest`` are the
messages of the fullest and the emptiest window, as a share of the rate times its length; the first window begins with
the first message. The share of the busiest worker shows that none starves.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.synchronize import Event

import numpy as np
from _harness import Report, arguments, broker
from consume import fill

import escrowmq as mq

WORKERS = 4
RATES = (500, 5_000)  # messages per second
STEP_SECONDS = 0.1  # between the beginnings of two windows
MARGIN_SECONDS = 2.0  # of a run beyond the window
TOPIC = "bench-limits"


def work(url: str, group: str, stop: Event, found: multiprocessing.Queue[list[int]]) -> None:
    """Receive until ``stop``; give the time of each message (ns of the clock that all processes share)."""
    times: list[int] = []
    with mq.connect(url) as bus, bus.consumer(group, [TOPIC]) as consumer:
        while not stop.is_set():
            for message in consumer.receive(1_000, wait=0.5):
                times.append(time.monotonic_ns())
                message.ack()
    found.put(times)


def received(url: str, group: str, seconds: float) -> list[list[int]]:
    """Run the workers for ``seconds`` after the first message; the times of what each received."""
    context = multiprocessing.get_context("spawn")
    stop, found = context.Event(), context.Queue()
    workers = [context.Process(target=work, args=(url, group, stop, found)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    with mq.connect(url) as bus:
        while sum(x["receiving"] for x in bus.admin.standing()[0]["consumers"] if x["group"] == group) < WORKERS:
            time.sleep(0.05)
        bus.admin.resume_group(group)
        time.sleep(seconds)
    stop.set()
    times = [found.get() for _ in workers]
    for worker in workers:
        worker.join()
    return times


def shares(times: list[list[int]], rate: int, seconds: float) -> tuple[float, float, float]:
    """The fullest and the emptiest window as a share of what the rate allows, and the busiest worker's of all."""
    every = np.sort(np.concatenate([np.array(each, np.int64) for each in times])) / 1e9
    begins = np.arange(every[0], every[-1] - seconds, STEP_SECONDS)
    counts = every.searchsorted(begins + seconds) - every.searchsorted(begins)
    return counts.max() / (rate * seconds), counts.min() / (rate * seconds), max(map(len, times)) / len(every)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(seconds=10.0, repeats=3, body=128)
    options = parser.parse_args()
    report = Report("limits", options)
    report.begin()
    with broker(options) as url, mq.connect(url) as bus:
        for rate in RATES:
            found = []
            for number in range(options.repeats):
                group = f"{TOPIC}-{rate}-{number}"
                bus.consumer(group, [TOPIC], start="latest").close()
                bus.admin.limit_group(group, rate=rate)
                bus.admin.pause_group(group)
                run_seconds = options.seconds + MARGIN_SECONDS
                fill(bus, TOPIC, bytes(options.body), int(rate * run_seconds * 1.2))
                found.append(shares(received(url, group, run_seconds), rate, options.seconds))
                print(group, *(f"{share:.3f}" for share in found[-1]), file=sys.stderr)
            for place, (name, goal) in enumerate(
                (("highest", "<= 1.05"), ("lowest", ">= 0.95"), ("busiest worker", "<= 0.5"))
            ):
                report.add(f"{rate}/s, {name}", "x", goal, [each[place] for each in found])
    report.end()


if __name__ == "__main__":
    main()
