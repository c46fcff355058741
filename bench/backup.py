"""A backup beside live traffic: how long one send takes without a backup, beside one, and beside one with a rate; and
how fast a backup is.

A broker in a process of its own, on a folder of some gigabytes, and one client that sends messages at a steady pace,
one after the other, waiting for each. The three are measured in turns, each time for --seconds; the backup runs in a
process of its own, as the command does, into a fresh folder, again and again until the time is over.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _harness import Report, arguments, served

import escrowmq as mq

ROWS = 1000


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="what is stored before")
    parser.add_argument("--pace", type=float, default=200.0, help="messages a second that are sent meanwhile")
    parser.add_argument("--rate", default="50MiB", help="of the limited backup: the command's own unless given")
    options = parser.parse_args()
    report = Report("backup", options)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
        place = Path(folder)
        with served(place / "data") as url, mq.connect(url) as bus:
            fill(bus, int(options.gigabytes * (1 << 30)), options.body)
            producer = bus.producer("live")
            live = mq.Message("live", b"x" * options.body)
            found: dict[str, list[float]] = {"none": [], "unlimited": [], options.rate: []}
            most: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(options.repeats):
                for name in found:
                    with beside(place, url, name, options.rate):
                        times = paced(lambda: producer.send(live), options.pace, options.seconds)
                    found[name].append(float(np.percentile(times, 99)) * 1e3)
                    most[name].append(float(np.median(times)) * 1e3)
            for name, values in found.items():
                what = "no backup" if name == "none" else f"a backup beside, {name}"
                report.add(f"{what}: median of a send", "ms", "-", most[name])
                report.add(f"{what}: p99 of a send", "ms", "-", values)
            speeds(report, place, url)
    report.end()


def fill(bus: mq.Bus, size: int, body: int) -> None:
    producer = bus.producer("fill")
    batch = [mq.Message("stored", b"%08d" % n + b"x" * (body - 8)) for n in range(ROWS)]
    for _ in range(max(size // (ROWS * body), 1)):
        producer.send_batch(batch)


def paced(one: object, pace: float, seconds: float) -> list[float]:
    """Seconds of each call, of calls that begin at a steady pace; what comes late counts from when it should have
    begun."""
    times, start = [], time.perf_counter()
    for n in range(int(pace * seconds)):
        due = start + n / pace
        time.sleep(max(due - time.perf_counter(), 0.0))
        one()  # type: ignore[operator]
        times.append(time.perf_counter() - due)
    return times


class beside:
    """A backup, again and again, for as long as the block lasts."""

    def __init__(self, place: Path, url: str, name: str, rate: str) -> None:
        self._target = place / "backup"
        self._words = [sys.executable, "-m", "escrowmq", "backup", "-u", url, "--to", str(self._target)]
        self._words += ["--rate", rate if name == rate else "100GiB"]
        self._runs = name != "none"
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = threading.Event()

    def __enter__(self) -> None:
        if self._runs:
            self._thread = threading.Thread(target=self._work)
            self._thread.start()
            self._begun.wait()

    def _work(self) -> None:
        while not self._stop.is_set():
            shutil.rmtree(self._target, ignore_errors=True)
            self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while self._process.poll() is None and not list(self._target.glob("*.copy")):
                time.sleep(0.01)  # measure from when it reads, not while Python starts
            self._begun.set()
            self._process.wait()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._runs:
            assert self._process is not None
            self._process.send_signal(signal.SIGKILL)
            self._thread.join()
            shutil.rmtree(self._target, ignore_errors=True)


def speeds(report: Report, place: Path, url: str) -> None:
    """Seconds of a whole backup, of one that is brought up to date, of a restore."""
    target, made = place / "backup", place / "restored"
    size = sum(path.stat().st_size for path in (place / "data").glob("*.segment"))
    whole = ["backup", "-u", url, "--to", str(target), "--rate", "100GiB"]
    for what, words in (
        ("a whole backup", whole),
        ("brought up to date", whole),
        ("verified", ["restore", str(target), "--verify"]),
        ("restored", ["restore", str(target), "--to", str(made)]),
    ):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "escrowmq", *words], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        report.add(f"{what}, with the start of Python", "s", "-", [seconds])
        report.add(f"{what}", "MB/s", "-", [size / seconds / 1e6])


if __name__ == "__main__":
    main()
