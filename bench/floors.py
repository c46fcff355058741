"""The floor under each goal of small and batched transactions: what cannot be left out, measured in turns with the work
itself.

A floor does what the work does for its callers, with the same sockets, syncs, threads and futures, and nothing of a
broker: no ledger, no rules, no repeats, no limits. The ratio of the two says how much of a figure is ours to improve.
``--docs`` writes the table into ``docs/speed.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _harness import machine, served

sys.path.append(str(Path(__file__).parent / "peers"))
sys.path.append(str(Path(__file__).parent / "floor_programs"))
from documents import place
from measuring import Outcome, descendants, processor_seconds, run, written_bytes
from ours import EscrowMQ, Inside, environment
from seam import Peer, Running, Work
from starting import started
from works import BATCHES_100, BATCHES_1000, BATCHES_2000, FLIGHT, ONE, PROCESSES, THREADS_64, WARM_UP, WORKS

import escrowmq as mq
from escrowmq_lab.servers.process import Server, accepts, free_port

PROGRAMS = Path(__file__).parent / "floor_programs"
ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- floors: written by bench/floors.py -->", "<!-- floors: end -->"
READ = "Spark reads a served topic"
WRITES = 200
"""Writes from which the pages of one are counted."""
TOPIC = "bench-floor"


@dataclass(frozen=True)
class Floor:
    """A server and a load program that do what cannot be left out; a peer as those of ``bench/peers``."""

    kind: str
    """What ``floor_programs/server.py`` is started as; ``hand``: there is no server."""

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Running]:
        if self.kind == "hand":
            yield Inside("hand:")
            return
        port, program = free_port(), str(PROGRAMS / "server.py")
        folder.mkdir(parents=True, exist_ok=True)
        server = Server(
            url="",
            command=[sys.executable, program, self.kind, str(port), str(folder / "written")],
            ready=lambda _: accepts(port),
            log=folder / "log",
            environment=environment(),
        )
        with started([server], f"{self.kind}:{port}") as running:
            yield running

    def load(self, address: str) -> list[str]:
        return [sys.executable, str(PROGRAMS / "load.py"), address]


@dataclass(frozen=True)
class Pair:
    """A work, and the floor that it stands on."""

    work: str
    floor: str
    does: str
    key: str = "rate"


PAIRS = (
    Pair(ONE, "bare", "two loopback round trips, a write and its sync in each", "p50_ms"),
    Pair(THREADS_64, "hand", "64 threads that hand over to one other and wait, twice"),
    Pair(PROCESSES, "frames", "a socket for each thread; frames made, read and answered, twice; nothing is written"),
    Pair(FLIGHT, "frames", "two futures of `asyncio`; frames made, read and answered; nothing is written"),
    Pair(
        BATCHES_100, "batches", "frames, one copy, one check, one checksum, one write and one sync for those that wait"
    ),
    Pair(BATCHES_1000, "batches", "the same"),
    Pair(BATCHES_2000, "batches", "the same"),
)
PAGES = (ONE, THREADS_64)
UNITS = {
    "rate": "/s",
    "p50_ms": "ms, p50",
    "written_per_body_byte": "bytes written per body byte",
    "rows": "rows/s",
}


@dataclass
class Figure:
    """One work beside its floor, round by round; ``us``: processor time of all processes per transaction, or row."""

    name: str
    does: str
    unit: str
    ours: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    ours_us: list[float] = field(default_factory=list)
    floor_us: list[float] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": _ratio(self.ours, self.floor), "ratio_us": _ratio(self.ours_us, self.floor_us)}


def _ratio(ours: list[float], floor: list[float]) -> dict[str, float] | None:
    """Of the medians; lowest and highest: of single rounds."""
    if not ours or not floor or not all(floor):
        return None
    rounds = [one / other for one, other in zip(ours, floor, strict=True)]
    middle = statistics.median(ours) / statistics.median(floor)
    return {"median": middle, "low": min(rounds), "high": max(rounds)}


def measured(options: argparse.Namespace, folder: Path) -> list[Figure]:
    """All rounds."""

    def wants(name: str) -> bool:
        return options.only is None or options.only in name

    pairs = [pair for pair in PAIRS if wants(pair.work)]
    figures = {pair.work: Figure(pair.work, pair.does, UNITS[pair.key]) for pair in pairs}
    pages = {work: Figure(work, PAGES_DO, UNITS["written_per_body_byte"]) for work in PAGES if work in figures}
    works = {work.name: work for work in WORKS}
    if pairs:
        with contextlib.ExitStack() as stack:
            ours: Peer = EscrowMQ()
            server = stack.enter_context(ours.running(folder / "ours"))
            floors = {}
            for kind in {pair.floor: None for pair in pairs}:
                floors[kind] = stack.enter_context(Floor(kind).running(folder / kind))
            run(ours, server, WARM_UP, options.warm, options.body)
            for number in range(options.repeats):
                for pair in pairs:
                    work, figure = works[pair.work], figures[pair.work]
                    turns = [
                        partial(_floor, figure, pair, work, floors[pair.floor], options),
                        partial(_ours, figure, pages.get(pair.work), pair, work, server, folder, options),
                    ]
                    for turn in turns if number % 2 else reversed(turns):
                        turn()
                    told(options, f"{pair.work}: {figure.ours[-1]:,.2f} to {figure.floor[-1]:,.2f} {figure.unit}")
    found = [*figures.values(), *pages.values()]
    return found + (_reads(options, folder) if wants(READ) else [])


def _floor(figure: Figure, pair: Pair, work: Work, server: Running, options: argparse.Namespace) -> None:
    peer: Any = Floor(pair.floor)
    outcome = run(peer, server, work, options.seconds, options.body, options.warm)
    _note(outcome, pair.key, figure.floor, figure.floor_us, options.body)


def _ours(
    figure: Figure,
    pages: Figure | None,
    pair: Pair,
    work: Work,
    server: Running,
    folder: Path,
    options: argparse.Namespace,
) -> None:
    before = _rounds(server.address) if pages else {}
    outcome = run(EscrowMQ(), server, work, options.seconds, options.body, options.warm)
    _note(outcome, pair.key, figure.ours, figure.ours_us, options.body)
    if pages is not None:
        counted = {name: value - before[name] for name, value in _rounds(server.address).items()}
        each = counted["rounds"] / counted["transactions"]
        pages.ours.append(outcome.figures(options.body)["written_per_body_byte"])
        pages.floor.append(each * written_by_one(folder, round(counted["bytes"] / counted["rounds"])) / options.body)


def _note(outcome: Outcome, key: str, values: list[float], costs: list[float], body: int) -> None:
    found = outcome.figures(body)
    values.append(found[key])
    costs.append(found["client_us"] + found["server_us"])


# Bytes

PAGES_DO = "as many appends of as many bytes, each synced, to a file whose blocks exist"


def _rounds(url: str) -> dict[str, float]:
    """What a broker has done."""
    with mq.connect(url) as bus:
        [stats] = bus.admin.stats()
    names = {"rounds": "rounds_total", "bytes": "log_bytes_total", "transactions": "committed_total"}
    return {name: float(stats[of]) for name, of in names.items()}


def written_by_one(folder: Path, size: int) -> float:
    """Bytes that the system gives to the disk for one append of ``size`` bytes and its sync; 0 if it does not count
    them."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, WRITES * size)
        os.fsync(descriptor)
        before = written_bytes([os.getpid()])
        for number in range(WRITES):
            os.pwrite(descriptor, b"x" * size, number * size)
            os.fdatasync(descriptor)
        return (written_bytes([os.getpid()]) - before) / WRITES


# Reads for Spark


def _reads(options: argparse.Namespace, folder: Path) -> list[Figure]:
    """A served topic read by Spark, beside a plain client, and beside rows that Spark is given from memory."""
    from reads import plain, register_made

    from escrowmq.pipeline.session import local_session
    from escrowmq.spark.source import register
    from spark import fill, noop, rate

    rows = options.rows
    client = Figure(READ, "the same rows, by a plain client", UNITS["rows"])
    java = Figure(READ, "rows that every worker has in memory, by the same way from Python to Java", UNITS["rows"])
    with mq.connect(f"file:{folder / 'read'}") as bus:
        fill(bus, rows, options.body, TOPIC)
    with served(folder / "read") as url, local_session("floors", rows=rows) as spark:
        register(spark)
        topic = spark.read.format("escrow").option("topic", TOPIC).load(url)
        register_made(spark, url, TOPIC, folder / "made.arrow", rows)
        made = spark.read.format("made").load()
        turns: list[tuple[list[float], list[float], Callable[[], Any]]] = [
            (client.ours, client.ours_us, lambda: noop(topic)),
            (client.floor, client.floor_us, lambda: plain(url, TOPIC)),
            (java.floor, java.floor_us, lambda: noop(made)),
        ]
        for _, _, act in turns:
            act()
        for number in range(options.repeats):
            for values, costs, act in turns if number % 2 else reversed(turns):
                before = processor_seconds(descendants(os.getpid()))
                values.append(rate(rows, act))
                costs.append(1e6 * (processor_seconds(descendants(os.getpid())) - before) / rows)
            told(options, f"{READ}: {client.ours[-1]:,.0f} to {client.floor[-1]:,.0f} and {java.floor[-1]:,.0f} rows/s")
    java.ours, java.ours_us = client.ours, client.ours_us
    return [client, java]


# What is shown


def told(options: argparse.Namespace, line: str) -> None:
    """Beside a run that takes long."""
    if not options.json:
        print(line, file=sys.stderr, flush=True)


def table(content: dict[str, Any]) -> str:
    """Markdown: medians, in brackets the lowest and the highest round."""
    lines = [
        "| work | its floor | ours | floor | ours : floor | µs of processor time: ours | floor | ours : floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in content["figures"]:
        cells = [one["name"], one["does"], f"{_middle(one['ours'])} {one['unit']}", _middle(one["floor"])]
        cells += [_times(one["ratio"]), _middle(one["ours_us"]), _middle(one["floor_us"]), _times(one["ratio_us"])]
        lines.append(f"| {' | '.join(cells)} |")
    where, settings = content["machine"], content["settings"]
    lines += [
        "",
        f"{where['cpu']}, {where['cores']} cores for clients and servers together, Python {where['python']}; "
        f"{settings['repeats']} rounds of "
        f"{settings['seconds']:g} s in turns, bodies of {settings['body']:,} bytes; medians, in brackets the lowest "
        "and the highest round.",
    ]
    return "\n".join(lines)


def _middle(values: list[float]) -> str:
    return _shown(statistics.median(values)) if values else "–"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def _times(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return "–"
    spread = "" if ratio["low"] == ratio["high"] else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['median']:.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--warm", type=float, default=0.5, help="seconds before each that do not count")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, floor and work in turns")
    parser.add_argument("--body", type=int, default=1024, help="bytes of one body")
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=10**6, help="rows that Spark reads")
    parser.add_argument("--only", help="only works whose name contains this")
    parser.add_argument("--folder", type=Path, help="where data folders are made (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/speed.md, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="escrowmq-floors-", dir=options.folder) as folder:
        figures = measured(options, Path(folder))
    names = ("seconds", "warm", "repeats", "body", "rows")
    content = {
        "benchmark": "floors",
        "machine": machine(),
        "settings": {name: getattr(options, name) for name in names},
        "time": time.time(),
        "figures": [figure.content() for figure in figures],
    }
    print(json.dumps(content) if options.json else table(content))
    if options.docs:
        place(ROOT / "docs" / "speed.md", table(content), BEGIN, END)


if __name__ == "__main__":
    main()
