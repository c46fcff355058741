"""Transactions a second, prepare and commit each, synced before every answer: threads, processes, asyncio, batches, one
caller.

The works of the goals' table for EscrowMQ alone, each in load programs of their own; beside each figure stands the
processor time per transaction on both sides, and the bytes written. ``bench/peers`` measures the same works in turns
with other systems.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _harness import Report, arguments, broker

sys.path.append(str(Path(__file__).parent / "peers"))
from measuring import Outcome, run, sync_ms
from ours import Embedded, EscrowMQ, Inside, OneWay
from seam import Peer, Running, Work
from works import BATCHES_100, BATCHES_1000, BATCHES_2000, FLIGHT, ONE, PROCESSES, SEEN, SEEN_BESIDE, THREADS_64, WORKS

GOALS = {
    ONE: "0.9 x RocketMQ",
    SEEN: "RocketMQ's",
    SEEN_BESIDE: "p99 < 10",
    THREADS_64: ">= 15,000",
    PROCESSES: "3 x RocketMQ",
    FLIGHT: ">= 60,000",
    BATCHES_100: ">= 80,000",
    BATCHES_1000: ">= 300,000",
    BATCHES_2000: ">= 300,000",
}
UNITS = {"rate": "tx/s", "p50_ms": "ms p50", "p10_ms": "ms p10", "p99_ms": "ms p99"}
WARM_SECONDS = 0.5


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(seconds=1.0, repeats=3)
    parser.add_argument("--oneway", action="store_true", help="ends are not waited for")
    options = parser.parse_args()
    peer: Peer = Embedded() if options.embedded else OneWay() if options.oneway else EscrowMQ()
    report = Report("transactions", options)
    report.begin()
    with running(peer, options) as server:
        if report.wants("sync"):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                times = [sync_ms(Path(folder)) for _ in range(options.repeats)]
            report.add("a 1.3 kB write and its sync, alone", "ms p50", "(floor)", times)
        for work in WORKS:
            if report.wants(work.name) and not peer.lacks(work):
                measure(report, peer, server, work, options)
    report.end()


@contextlib.contextmanager
def running(peer: Peer, options) -> Iterator[Running]:
    """A broker to measure: in its own process, inside the load program, or the one that was named."""
    if options.url:
        with broker(options) as url:
            yield Inside(url)  # whatever it is, its processes are not measured
        return
    folders = tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder)
    with folders as folder, peer.running(Path(folder)) as server:
        yield server


def measure(report: Report, peer: Peer, server: Running, work: Work, options) -> None:
    """One work as often as asked; a line for each of its figures."""
    runs = [run(peer, server, work, options.seconds, options.body, WARM_SECONDS) for _ in range(options.repeats)]
    figures = [outcome.figures(options.body) for outcome in runs]
    for key in work.shows:
        goal = GOALS.get(work.name, "") if key in ("rate", "p50_ms") or "p99" in GOALS.get(work.name, "") else ""
        values = [one[key] for one in figures]
        report.add(work.name, UNITS[key], goal, values, **({} if key != work.shows[0] else costs(runs, options.body)))


def costs(runs: list[Outcome], body: int) -> dict[str, float]:
    """Medians of what one transaction cost."""
    names = ("client_us", "server_us", "written_per_body_byte", "beside_rate")
    return {name: statistics.median(one.figures(body)[name] for one in runs) for name in names}


if __name__ == "__main__":
    main()
