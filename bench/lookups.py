"""Look-ups by id and key in logs of 10^5, 10^6 and 10^7 messages: milliseconds warm, and of the first after a restart;
what the files cost.

Messages are plain, of small bodies, each with a key of its own, in batches; the broker is in this process, so that no
network is in the figures. The first look-ups after each of some restarts are taken one by one, clean and after a kill
(the folder is copied while it is in use). The cost on the way in is processor time of all threads; ``--without`` fills
without making files, for comparing in turns.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _harness import Report, arguments

import escrowmq as mq
from escrowmq.broker import embedded
from escrowmq.log.lookups import finder
from escrowmq.log.lookups.parts import Sizes

ROWS = 10_000
TOPIC = "looked-up"
LOOKS = 200
RESTARTS = 5
Times = list[tuple[float, float]]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--most", type=int, default=7, help="the largest log has 10 to the power of this messages")
    parser.add_argument("--without", action="store_true", help="fill only, and make no look-up files")
    options = parser.parse_args()
    options.body = min(options.body, 64)
    options.embedded = True
    report = Report("look-ups", options)
    report.begin()
    for power in range(5, options.most + 1):
        with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
            measure(report, Path(folder), power, options)
    report.end()


def measure(report: Report, folder: Path, power: int, options: argparse.Namespace) -> None:
    data, count = folder / "data", 10**power
    if options.without:
        finder.Sizes = lambda: Sizes(threaded=False)
    before = time.process_time()
    bus = opened(data)
    fill(bus, count, options.body)
    shard = embedded._open[data.resolve()].calls.engine
    if not options.without:
        shard.log._lookups.settle()
    spent = time.process_time() - before
    report.add(f"10^{power}: filling, processor time", "µs", "-", [spent / count * 1e6])
    if options.without:
        bus.close()
        return
    files = sum(path.stat().st_size for path in data.glob("*.lookup"))
    report.add(f"10^{power}: look-up files, a message", "B", "-", [files / count])
    tell(report, power, "view by key, warm", many(lambda n: bus.view_message(TOPIC, key(n)), count))
    tell(report, power, "view by id, warm", many(lambda n: bus.view_message(TOPIC, identity(n)), count))
    tell(report, power, "lookup by key, any topic, warm", many(lambda n: bus.admin.lookup(key=key(n)), count))
    tell(report, power, "a key that nobody has", many(lambda n: bus.view_message(TOPIC, f"no-{n}"), count))
    shutil.copytree(data, folder / "killed", ignore=shutil.ignore_patterns("lock"))
    bus.close()
    for name, place in (("clean", data), ("killed", folder / "killed")):
        firsts, seconds = [], []
        for number in range(RESTARTS):
            left = place
            if name == "killed":  # each time anew: closing it would write what the kill left undone
                left = folder / "left"
                shutil.rmtree(left, ignore_errors=True)
                shutil.copytree(place, left)
            bus = opened(left)
            view = partial(viewed, bus)
            firsts.append(one(view, (number * 7919 + count // 3) % count))
            seconds.append(one(view, (number * 104_729 + count // 2) % count))
            bus.close()
        tell(report, power, f"first after a restart, {name}", firsts)
        tell(report, power, f"second after a restart, {name}", seconds)


def opened(folder: Path) -> mq.Bus:
    return mq.connect(f"file:{folder}")


def fill(bus: mq.Bus, count: int, body: int) -> None:
    producer = bus.producer("bench")
    bodies = pa.array([b"x" * body] * ROWS, pa.binary())
    for start in range(0, count, ROWS):
        producer.send_batch(batch(bodies, start))


def batch(bodies: pa.Array, start: int) -> pa.Table:
    ids = np.empty((ROWS, 2), ">u8")
    ids[:, 0], ids[:, 1] = 77, np.arange(start, start + ROWS)
    return pa.table(
        {
            "topic": pa.array([TOPIC] * ROWS),
            "key": pa.array([key(number) for number in range(start, start + ROWS)]),
            "body": bodies,
            "message_id": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), ROWS, [None, pa.py_buffer(ids.tobytes())]
            ),
        }
    )


def viewed(bus: mq.Bus, number: int) -> None:
    assert bus.view_message(TOPIC, key(number)) is not None


def key(number: int) -> str:
    return f"order-{number:09d}"


def identity(number: int) -> bytes:
    return (77).to_bytes(8, "big") + number.to_bytes(8, "big")


def many(look: Callable[[int], Any], count: int) -> Times:
    """Each of some look-ups, all over the log; the first few are not counted."""
    numbers = [int(n) for n in np.random.default_rng(5).integers(0, count, LOOKS + 10)]
    return [one(look, number) for number in numbers][10:]


def one(look: Callable[[int], Any], number: int) -> tuple[float, float]:
    """Milliseconds that a look-up takes, and of processor time, of all threads."""
    start, begun = time.perf_counter(), time.process_time()
    look(number)
    return (time.perf_counter() - start) * 1e3, (time.process_time() - begun) * 1e3


def tell(report: Report, power: int, what: str, times: Times) -> None:
    report.add(f"10^{power}: {what}", "ms", "2", [wall for wall, _ in times])
    report.add(f"10^{power}: {what}, processor", "ms", "-", [spent for _, spent in times])


if __name__ == "__main__":
    main()
