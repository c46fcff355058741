"""How fast the commit log appends, syncs, opens and replays. `python bench/log.py [--json] [--folder DIR] [--seconds
S]`.

Appends rows with 1 KB bodies in frames of 1,000 (and singly), each followed by a sync, on the real disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.log.commit_log import SegmentLog, open_log
from escrowmq.log.frames import size_bound
from escrowmq.platform.disk import RealDisk
from escrowmq.schemas import Kind
from escrowmq.testing.log_conformance import START_US, checked, messages

BODY = 1000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments.add_argument("--seconds", type=float, default=3.0, help="how long each figure is measured")
    arguments.add_argument("--compression", choices=("none", "lz4"), default="none")
    chosen = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="escrowmq-bench-", dir=chosen.folder))
    try:
        report = {
            "machine": machine(folder),
            "settings": {"body_bytes": BODY, "seconds": chosen.seconds, "compression": chosen.compression},
            "figures": figures(folder, chosen.seconds, chosen.compression),
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(report, indent=2) if chosen.json else table(report))


def machine(folder: Path) -> dict[str, Any]:
    disk = shutil.disk_usage(folder)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "disk_free_gb": round(disk.free / 1e9, 1),
    }


def figures(folder: Path, seconds: float, compression: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for rows in (1, 100, 1000):  # small ones first: rented disks throttle after a burst
        log = open_log(RealDisk(folder / f"rows-{rows}"), compression=compression)
        batch = messages(rows, body=BODY)
        rates = measure(lambda log=log, batch=batch: append(log, batch), seconds)
        found[f"append+sync, {rows} rows a frame (rows/s)"] = spread([rows * rate for rate in rates])
        found[f"append+sync, {rows} rows a frame (MB/s of bodies)"] = spread([rows * BODY * r / 1e6 for r in rates])
        size = log.bytes_written / (log.next_position - 1)
        found[f"stored bytes a body byte, {rows} rows a frame"] = spread([size / BODY])
        log.close()
    found |= reading(folder / "rows-1000", seconds)
    log = open_log(RealDisk(folder / "checks"))
    before = log.bytes_written
    log.append(Kind.CHECKED, checked([1]), START_US)
    found["stored bytes of one lone check"] = spread([float(log.bytes_written - before)])
    log.close()
    return found


def append(log: SegmentLog, batch: pa.RecordBatch) -> None:
    log.reserve(size_bound(batch))
    log.append(Kind.PLAIN, batch, START_US)
    log.sync()


def reading(folder: Path, seconds: float) -> dict[str, dict[str, float]]:
    """Opening, replaying and reading the log that the first figure wrote."""
    opens, replays = [], []
    for _ in range(3):
        start = time.perf_counter()
        log = open_log(RealDisk(folder))
        opens.append(time.perf_counter() - start)
        start = time.perf_counter()
        rows = sum(frame.batch.num_rows for frame in log.frames())
        replays.append(rows / (time.perf_counter() - start))
        stored = log.stored_bytes()
        log.close()
    log = open_log(RealDisk(folder))
    strided = measure(lambda: log.read(np.arange(1, 4 * 1000, 4)), seconds / 3)
    log.close()
    return {
        f"open a log of {stored / 1e9:.2f} GB (s)": spread(opens),
        "replay (rows/s)": spread(replays),
        "read every fourth row (rows/s)": spread([1000 * rate for rate in strided]),
    }


def measure(act: Callable[[], None], seconds: float) -> list[float]:
    """Calls a second, in ten slices of the time."""
    rates = []
    for _ in range(10):
        calls, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds / 10:
            act()
            calls += 1
        rates.append(calls / passed)
    return rates


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(report: dict[str, Any]) -> str:
    lines = [" ".join(f"{k}={v}" for k, v in report[part].items()) for part in ("machine", "settings")]
    lines.append(f"{'':52} {'median':>14} {'least':>14} {'most':>14}")
    for name, values in report["figures"].items():
        lines.append(f"{name:52} " + " ".join(f"{values[k]:>14,.2f}" for k in ("median", "least", "most")))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
