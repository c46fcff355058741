"""Overload: one broker on a slow disk, and more than it can take of everything; what it kept to is measured from
outside.

``python tests/system/overload.py`` is the long form: 5,000 connections, for a minute, with the figures as a table
(``--json``: as JSON). ``test_overload.py`` is the short form.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overload_stamps import breakdown

import escrowmq as mq
from escrowmq.client.admin import Admin
from escrowmq.connecting import links
from escrowmq.platform.descriptors import KEPT
from escrowmq.settings import BrokerSettings

PROGRAMS = Path(__file__).with_name("overload_programs.py")
SAMPLE_SECONDS = 0.1
AT_ONCE = 100
"""Connections that the crowd begins in a moment."""
FLOOD = "flood"
PATIENCE = 120.0
"""Seconds for a call of those whom the broker is to serve."""


@dataclass
class Load:
    """How much of what. Bytes, seconds, numbers."""

    seconds: float = 10.0
    """How long all of it goes on together."""
    sync_seconds: float = 0.05
    bytes_per_second: float | None = 20e6
    crowd: int = 5000
    readers: int = 40
    hoarders: int = 4
    flooders: tuple[tuple[int, int, int], ...] = ((8, 4, 8 << 10), (4, 64, 8 << 10))
    """Programs: connections, rows of a request, bytes of a body."""
    window: int = 32 << 20
    pause: float = 0.005
    stall: float | None = None
    """The patience of the rude producers' connections; None: that of the product."""
    slowest: int = 0
    """Of so many of the slowest sends it is told where their time went."""
    settings: dict[str, Any] = field(
        default_factory=lambda: {
            "transaction_timeout": 1.0,
            "check_interval": 1.0,
            "lease_seconds": 5.0,
            "check_max": 1000,
        }
    )
    """Of the broker."""

    @property
    def memory(self) -> int:
        """Bytes that the broker may have more than at first: what is under way, at most copied once, and two rounds of
        what waits, each as columns and as frames of the log."""
        given = BrokerSettings.load(overrides=self.settings)
        return 2 * given.max_held_bytes + 4 * given.max_waiting_bytes

    @property
    def descriptors(self) -> int:
        """Descriptors that the broker may have: the bound of connections on both ports, those that came since it was
        looked at, and its own."""
        most = BrokerSettings.load(overrides=self.settings).max_connections
        return 2 * (most + AT_ONCE) + KEPT


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

    def says(self, word: str) -> None:
        """Wait until it says this."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(word), f"{self.name} ended with {self.process.wait()}"

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
        self.memory.append(int(status.partition("RssAnon:")[2].split()[0]) << 10)
        self.threads.append(int(status.partition("Threads:")[2].split()[0]))
        self.descriptors.append(len(os.listdir(f"/proc/{self._pid}/fd")))

    def end(self) -> int:
        """Look no more; the most bytes that the process had of its own (without files that are mapped)."""
        self._ended.set()
        self.join()
        return max(self.memory)


def overload(load: Load, folder: Path) -> dict[str, Any]:
    """One run; what was measured, and what is wrong with what was stored."""
    log = folder / "programs.log"
    running: list[Program] = []

    def start(name: str, **options: Any) -> Program:
        running.append(Program(name, log, **options))
        return running[-1]

    try:
        disk = {"sync_seconds": load.sync_seconds, "bytes_per_second": load.bytes_per_second}
        stamps = folder / "stamps.json"
        served = start(
            "serve",
            folder=str(folder / "data"),
            settings=load.settings,
            stamps=str(stamps) if load.slowest else None,
            **disk,
        )
        at = served.ready()
        url = at["url"]
        port = int(url.rpartition(":")[2])
        watch = Watch(served.process.pid)
        watch.look()
        watch.start()
        prepare(url, load)
        polite = start("polite", url=url, pause=0.05, patience=PATIENCE)
        polite.ready()
        floods = [
            start(
                "flood",
                url=url,
                topic=FLOOD,
                connections=connections,
                rows=rows,
                body=body,
                window=load.window,
                instance=1000 * (number + 1),
                pause=load.pause,
                stall=load.stall,
            )
            for number, (connections, rows, body) in enumerate(load.flooders)
        ]
        for one in floods:
            one.ready()
        crowd = start("crowd", port=port, connections=load.crowd, at_once=AT_ONCE, again=True)
        hoarder = start("hoarder", url=url, topic=FLOOD, consumers=load.hoarders)
        unread = [
            start("readers", port=port, topic=FLOOD, asks=asks, connections=load.readers // 2)
            for asks in ("receives", "reads")
        ]
        for one in (crowd, hoarder, *unread):
            one.ready()
        unread[1].process.send_signal(signal.SIGSTOP)  # so that nobody reads
        threading.Event().wait(load.seconds)
        polite.says("enough")
        flooded = [one.finish() for one in floods]
        polites = polite.finish()
        crowded, hoarded = crowd.finish(), hoarder.finish()
        unread[1].process.send_signal(signal.SIGCONT)
        unread_ = [one.finish() for one in unread]
        stored = drain(url, FLOOD, "message_id")
        kept = drain(url, "polite", "key")
        most = watch.end()
        served.process.send_signal(signal.SIGTERM)
        code = served.process.wait()
    finally:
        for one in running:
            one.kill()
    return {
        "exit": code,
        "memory": watch.memory[0],
        "most memory": most,
        "most descriptors": max(watch.descriptors),
        "most threads": max(watch.threads),
        "codes": dict(sum((Counter(one["codes"]) for one in flooded), Counter())),
        "polite": {what: spread(values) for what, values in sorted(polites["seconds"].items())},
        "asked": spread(polites["asked"]),
        "rounds of a send": spread(polites["rounds"]),
        "polite problems": polites["problems"],
        "polite lost": len(set(polites["sent"]) - set(kept)),
        "crowd": crowded,
        "hoarders": hoarded,
        "readers": unread_,
        "stored": len(stored),
        "slowest": breakdown(polites["calls"], json.loads(stamps.read_text()), load.slowest) if load.slowest else [],
        **compare(flooded, stored),
    }


def prepare(url: str, load: Load) -> None:
    """The topic, with something in it for those who do not read, and the groups, so that nobody begins with a slow disk
    in the way."""
    with mq.connect(url) as bus:
        bus.producer("seeds", timeout=PATIENCE).send_batch(
            [mq.Message(FLOOD, bytes(256 << 10)) for _ in range(64)]
        ).check()
    (link,) = links(url, {})
    groups = ["healthy", "hoarders", *(f"unread-{number}" for number in range(load.readers))]
    with ThreadPoolExecutor(16) as several:
        request = lambda group: {"group": group, "topics": [FLOOD], "start": "earliest"}  # noqa: E731
        list(several.map(lambda group: link.action("groups.subscribe", request(group), 60.0), groups))
    link.close()


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


def drain(url: str, topic: str, column: str) -> dict[Any, set[tuple[int, int]]]:
    """What a healthy consumer gets: the values of a column, and the queue and offset of each place where they stand."""
    found: dict[Any, set[tuple[int, int]]] = {}
    group = "healthy" if topic == FLOOD else "auditor"
    with mq.connect(url) as bus:
        consumer = bus.consumer(group, topic, start="earliest", timeout=PATIENCE)
        while not drained(bus, group):
            for batch in consumer.batches(max_messages=5000, idle_timeout=1.0):
                columns = (batch.arrow.column(name).to_pylist() for name in (column, "queue", "offset"))
                for value, queue, offset in zip(*columns, strict=True):
                    found.setdefault(value, set()).add((queue, offset))
                batch.ack()
            consumer.flush()
    return found


def drained(bus: mq.Bus, group: str) -> bool:
    """Whether the group is done with all that is there."""
    (found,) = (one for one in Admin(bus.router, PATIENCE).groups() if one["name"] == group)
    return all(queue["floor"] == queue["end"] for queue in found["queues"])


def compare(flooded: list[dict[str, Any]], stored: dict[bytes, set[tuple[int, int]]]) -> dict[str, Any]:
    """What was acknowledged and is not there, refused and there, or there twice; how many."""
    lost = leaked = acknowledged = unknown = 0
    for one in flooded:
        for first, count, told in one["ranges"]:
            there = sum(number.to_bytes(16, "big") in stored for number in range(first, first + count))
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
        "stored twice": sum(len(places) > 1 for places in stored.values()),
        "unknown": unknown,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0, help="how long all of it goes on together")
    options.add_argument("--crowd", type=int, default=5000, help="connections of which most say nothing")
    options.add_argument("--sync", type=float, default=0.05, help="seconds of a sync")
    options.add_argument("--rate", type=float, default=20e6, help="bytes that the disk writes in a second")
    options.add_argument("--slowest", type=int, default=5, help="of so many sends: where their time went")
    given = options.parse_args()
    load = Load(
        seconds=given.seconds,
        crowd=given.crowd,
        sync_seconds=given.sync,
        bytes_per_second=given.rate,
        slowest=given.slowest,
    )
    with tempfile.TemporaryDirectory(prefix="escrowmq-overload-") as folder:
        print(json.dumps(overload(load, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
