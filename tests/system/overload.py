"""Overload: one broker on a slow disk, and more than it can take of everything; what it kept to is measured from outside.

``python tests/system/overload.py`` is the long form: 5,000 connections, for a minute, with the figures as a table (``--json``: as JSON).
``test_overload.py`` is the short form.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import escrowmq as mq

PROGRAMS = Path(__file__).with_name("overload_programs.py")
SAMPLE_SECONDS = 0.1
FLOOD = "flood"


@dataclass
class Load:
    """How much of what. Bytes, seconds, numbers."""

    seconds: float = 10.0
    """How long all of it goes on together."""
    sync_seconds: float = 0.05
    bytes_per_second: float | None = 20e6
    crowd: int = 300
    readers: int = 40
    hoarders: int = 4
    flooders: tuple[tuple[str, int, int, int], ...] = (("lean", 4, 4, 8 << 10), ("flight", 2, 64, 8 << 10))
    """Programs: carrier, connections, rows of a request, bytes of a body."""
    window: int = 32 << 20
    settings: dict[str, Any] = field(
        default_factory=lambda: {
            "max_held_bytes": 64 << 20,
            "max_waiting_bytes": 64 << 20,
            "max_connections": 256,
            "max_calls": 1024,
            "transaction_timeout": 1.0,
            "check_interval": 1.0,
            "lease_seconds": 5.0,
        }
    )
    descriptors: int | None = None
    """The limit of the broker's process."""


class Program:
    """One of the programs, with its answer; it is told to end by the end of its input."""

    def __init__(self, name: str, log: Path, **options: Any) -> None:
        self.name = name
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAMS), name, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def ready(self) -> dict[str, Any]:
        """Wait until it is; what it says then."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready"), f"{self.name} ended with {self.process.wait()}"
        return json.loads(line[5:]) if line[5:].strip() else {}

    def finish(self) -> dict[str, Any]:
        """Let it end; what it says at last."""
        said, _ = self.process.communicate()
        assert self.process.returncode == 0, f"{self.name} ended with {self.process.returncode}"
        return json.loads(said.splitlines()[-1])

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Watch(threading.Thread):
    """Looks at the memory, descriptors and threads of a process all the time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.memory: list[int] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Once."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        if "VmRSS:" not in status:  # it has ended
            return
        self.memory.append(int(status.partition("VmRSS:")[2].split()[0]) << 10)
        self.threads.append(int(status.partition("Threads:")[2].split()[0]))
        self.descriptors.append(len(os.listdir(f"/proc/{self._pid}/fd")))

    def end(self) -> int:
        """Look no more; the most bytes that the process ever had."""
        self._ended.set()
        self.join()
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10


def overload(load: Load, folder: Path) -> dict[str, Any]:
    """One run; what was measured, and what is wrong with what was stored."""
    log = folder / "programs.log"
    running: list[Program] = []

    def start(name: str, **options: Any) -> Program:
        running.append(Program(name, log, **options))
        return running[-1]

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if load.descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (load.descriptors, limits[1]))
        disk = {"sync_seconds": load.sync_seconds, "bytes_per_second": load.bytes_per_second}
        served = start("serve", folder=str(folder / "data"), settings=load.settings, **disk)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        at = served.ready()
        url, lean_port = at["url"], at["lean"]["port"]
        port = int(url.rpartition(":")[2])
        watch = Watch(served.process.pid)
        watch.look()
        watch.start()
        polite = start("polite", url=url, pause=0.05)
        polite.ready()
        quiet = time.monotonic()
        floods = [
            start(
                "flood",
                url=url,
                topic=FLOOD,
                carrier=carrier,
                connections=connections,
                rows=rows,
                body=body,
                window=load.window,
                instance=1000 * (number + 1),
                patience=60.0,
            )
            for number, (carrier, connections, rows, body) in enumerate(load.flooders)
        ]
        for one in floods:
            one.ready()
        crowd = start(
            "crowd", port=port, lean_port=lean_port, connections=load.crowd, at_once=100, again=True
        )
        hoarder = start("hoarder", url=url, topic=FLOOD, consumers=load.hoarders)
        unread = [
            start("readers", url=url, lean_port=lean_port, topic=FLOOD, carrier=carrier, connections=load.readers // 2)
            for carrier in ("lean", "flight")
        ]
        for one in (crowd, hoarder, *unread):
            one.ready()
        unread[1].process.send_signal(signal.SIGSTOP)  # so that nobody, not gRPC either, reads
        began = time.monotonic()
        threading.Event().wait(load.seconds)
        print("measured", time.monotonic() - began, began - quiet, file=sys.stderr)
        flooded = [one.finish() for one in floods]
        polites = polite.finish()
        crowded, hoarded = crowd.finish(), hoarder.finish()
        unread[1].process.send_signal(signal.SIGCONT)
        unread_ = [one.finish() for one in unread]
        stored = drain(url, FLOOD)
        most = watch.end()
        served.process.send_signal(signal.SIGTERM)
        code = served.process.wait()
    finally:
        for one in running:
            one.kill()
    return {
        "exit": code,
        "memory": {"most": most, "at first": watch.memory[0]},
        "descriptors": max(watch.descriptors),
        "threads": max(watch.threads),
        "codes": dict(sum((Counter(one["codes"]) for one in flooded), Counter())),
        "polite": {what: spread(values) for what, values in polites["seconds"].items()},
        "asked": spread(polites["asked"]),
        "polite problems": polites["problems"],
        "polite sent": len(polites["sent"]),
        "polite received": polites["received"],
        "crowd": crowded,
        "hoarders": hoarded,
        "readers": unread_,
        "stored": sum(stored.values()),
        **compare(flooded, stored),
    }


def spread(values: list[float]) -> dict[str, float]:
    """How many, the median and the most, in seconds."""
    if not values:
        return {"count": 0}
    values = sorted(values)
    return {
        "count": len(values),
        "median": statistics.median(values),
        "p99": values[min(int(len(values) * 0.99), len(values) - 1)],
        "most": values[-1],
    }


def drain(url: str, topic: str) -> Counter[int]:
    """How often a healthy consumer gets each message id."""
    found: Counter[int] = Counter()
    with mq.connect(url) as bus:
        for batch in bus.consumer("healthy", topic, start="earliest").batches(max_messages=5000, idle_timeout=3.0):
            found.update(int.from_bytes(value, "big") for value in batch.arrow.column("message_id").to_pylist())
            batch.ack()
    return found


def compare(flooded: list[dict[str, Any]], stored: Counter[int]) -> dict[str, Any]:
    """What was acknowledged and is not there, refused and there, or there twice; how many."""
    lost = leaked = acknowledged = unknown = 0
    for one in flooded:
        for first, count, told in one["ranges"]:
            there = sum(1 for number in range(first, first + count) if number in stored)
            if told == "ok":
                lost += count - there
                acknowledged += count
            elif told == "refused":
                leaked += there
            else:
                unknown += count
    return {
        "acknowledged": acknowledged,
        "lost": lost,
        "refused and stored": leaked,
        "stored twice": sum(1 for times in stored.values() if times > 1),
        "unknown": unknown,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--crowd", type=int, default=5000)
    options.add_argument("--short", action="store_true")
    options.add_argument("--keep", action="store_true")
    given = options.parse_args()
    load = Load() if given.short else Load(seconds=given.seconds, crowd=given.crowd)
    folder = Path(tempfile.mkdtemp(prefix="escrowmq-overload-"))
    try:
        print(json.dumps(overload(load, folder), indent=1))
    finally:
        if given.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
