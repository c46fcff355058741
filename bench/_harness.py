"""What the benchmarks share: options, a broker to measure, the machine, medians and spread as a table or JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import escrowmq as mq


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--url", help="measure this broker instead of one that is started for it")
    parser.add_argument("--embedded", action="store_true", help="the broker inside this process")
    parser.add_argument("--folder", type=Path, help="where the data folder is made (default: the temporary folder)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per figure")
    parser.add_argument("--body", type=int, default=1024, help="bytes of one body")
    parser.add_argument("--only", help="only figures whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


@contextmanager
def broker(options: argparse.Namespace) -> Iterator[str]:
    """The URL of a broker on a fresh folder: in its own process, unless told otherwise."""
    if options.url:
        with mq.connect(options.url) as bus:
            bus.admin.hello()  # one that is away, or knows no such token, is not measured
        yield options.url
        return
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
        if options.embedded:
            yield f"file:{folder}/data"
            return
        with served(Path(folder) / "data") as url:
            yield url


def serve(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start ``escrowmq serve`` on a folder; the process, and what it says when it is ready."""
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder), "-l", "127.0.0.1:0", "--json", *flags]
    command += ["--log-level", "error"]  # not a line for every death of a million
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of a broker on a folder, in a process of its own, stopped at the end."""
    process, ready = serve(folder)
    try:
        yield ready["url"]
    finally:
        process.terminate()
        process.communicate()


def machine() -> dict[str, Any]:
    """The machine that it ran on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
    }


class Report:
    """Figures with medians and spread, and the goal that each has."""

    def __init__(self, title: str, options: argparse.Namespace) -> None:
        self._title = title
        self._options = options
        self._figures: list[dict[str, Any]] = []

    @property
    def repeats(self) -> int:
        """Measurements per figure."""
        return int(self._options.repeats)

    def wants(self, name: str) -> bool:
        return self._options.only is None or self._options.only in name

    def measure(self, name: str, unit: str, goal: str, one: Callable[[], float]) -> float:
        """Run ``one`` the asked number of times, after one run to warm up; the median."""
        if not self.wants(name):
            return 0.0
        one()
        values = [one() for _ in range(self._options.repeats)]
        self.add(name, unit, goal, values)
        return statistics.median(values)

    def add(self, name: str, unit: str, goal: str, values: list[float], **more: float) -> None:
        middle = statistics.median(values)
        figure = {"name": name, "unit": unit, "goal": goal, "median": middle, "low": min(values), "high": max(values)}
        self._figures.append({**figure, "values": values, **more})
        if not self._options.json:
            print(f"{name:<46} {middle:>12,.2f} {unit:<8} {min(values):>12,.2f} to {max(values):<12,.2f} goal {goal}")
            if "server_us" in more:
                print(
                    f"{'':<8} client {more['client_us']:,.0f} + broker {more['server_us']:,.0f} µs of processor time "
                    "each, "
                    f"{more['written_per_body_byte']:.2f} bytes written per body byte"
                )

    def begin(self) -> None:
        if not self._options.json:
            where = machine()
            print(
                f"{self._title}: {where['cpu']}, {where['cores']} cores, Python {where['python']}, Arrow "
                f"{where['pyarrow']}"
            )
            print(", ".join(f"{name} {value}" for name, value in self._settings().items()))

    def end(self) -> None:
        if self._options.json:
            content = {"benchmark": self._title, "machine": machine(), "settings": self._settings()}
            print(json.dumps({**content, "time": time.time(), "figures": self._figures}))

    def _settings(self) -> dict[str, Any]:
        where = self._options.url or ("embedded" if self._options.embedded else "served, own process, same machine")
        skipped = ("url", "embedded", "folder", "json", "only")
        return {"broker": where, "sync": "before every answer"} | {
            name: value for name, value in vars(self._options).items() if name not in skipped
        }
