"""The two sets of the compensation: announce, enter and take in Redis, SQLite, PostgreSQL and Spark, by the number of
ids.

Of the ids nine in ten are done, in an order of their own. Ids are sent in calls of 10,000. Processor time is that of
this process and of the server together, so that it does not depend on who else uses the machine; times by the clock do.
"Blocked" is for how long the server serves nobody else (Redis: a command or step), or holds the locks that other
writers need (SQL: one transaction of ``take``).
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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa
from _harness import machine

from escrowmq.compensation import open_sets
from escrowmq.compensation.sets.seam import MAX_IDS, SetStore
from escrowmq_lab.servers import postgres
from escrowmq_lab.servers import redis as redis_serving

STORES = ("redis", "sqlite", "postgresql", "spark")
DONE = 0.9
FAR_US = 1 << 52
TICKS = os.sysconf("SC_CLK_TCK")


def ids_of(count: int, seed: int) -> list[bytes]:
    raw = np.random.default_rng(seed).bytes(16 * count)
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def processor_seconds(pid: int) -> float:
    """Of a process, its children that are there and those that have gone."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    used = sum(int(value) for value in fields[11:15]) / TICKS
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            used += sum(processor_seconds(int(child)) for child in (task / "children").read_text().split())
    return used


@dataclass
class Clock:
    """Seconds by the clock and of processors, phase by phase."""

    server: Callable[[], float]
    wall: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun, used = time.perf_counter(), time.process_time() + self.server()
        yield
        self.wall[name] = time.perf_counter() - begun
        self.processor[name] = time.process_time() + self.server() - used
        print(f"{name}: {self.wall[name]:,.1f} s, {self.processor[name]:,.1f} s of processors", file=sys.stderr)


def work(store: SetStore, clock: Clock, count: int, seed: int) -> list[float]:
    """Announce, enter, take and settle; seconds of each call of ``take``, for a thousand ids that were looked at."""
    ids = ids_of(count, seed)
    done = np.random.default_rng(seed + 1).permutation(count)[: round(count * DONE)].tolist()
    with clock.phase("announce"):
        for at in range(0, count, MAX_IDS):
            part = ids[at : at + MAX_IDS]
            store.add_halves(part, range(at, at + len(part)))
    with clock.phase("enter"):
        for at in range(0, len(done), MAX_IDS):
            store.add_commits([ids[n] for n in done[at : at + MAX_IDS]], FAR_US)
    calls, found = [], 0
    with clock.phase("take"):
        while True:
            before, begun = count - found * 10, time.perf_counter()
            run = store.take(FAR_US, 1_000, 600.0)
            calls.append(
                (time.perf_counter() - begun) / max(1.0, (len(run.ids) * 10 if run else max(before, 1)) / 1000)
            )
            if run is None:
                break
            found += len(run.ids)
            store.settle(run.name, run.ids)
    assert found == count - len(done), "the store is wrong"
    return calls


def redis_once(folder: Path, count: int, seed: int) -> dict[str, float]:
    import redis

    with redis_serving.serving(folder) as server, redis.Redis.from_url(server.url, socket_timeout=3600.0) as admin:
        store = open_sets(server.url, "bench", timeout=300.0)
        store.epoch()
        clock, empty = Clock(lambda: processor_seconds(server.pid)), admin.info("memory")["used_memory"]
        peak = [0.0]
        phase = clock.phase

        @contextlib.contextmanager
        def watched(name: str) -> Iterator[None]:
            with phase(name):
                yield
            if name == "enter":
                peak[0] = admin.info("memory")["used_memory"] - empty
                blocked["whole difference by one command, blocked ms"] = whole_difference(admin)
                admin.config_resetstat()

        clock.phase = watched  # type: ignore[method-assign]
        blocked: dict[str, float] = {}
        work(store, clock, count, seed)
        told = admin.info("latencystats")["latency_percentiles_usec_exec"]
        store.close()
        rows = round(count * (1 + DONE))
        return figures(clock, count) | blocked | {
            "blocked, median ms": told["p50"] / 1000,
            "blocked, p99.9 ms": told["p99.9"] / 1000,
            "bytes an entry": peak[0] / rows,
        }  # fmt: skip


def whole_difference(admin: Any) -> float:
    """What half − commit takes as one ZDIFFSTORE: milliseconds in which Redis serves nobody."""
    half = next(name for name in admin.keys("*:half"))
    admin.config_resetstat()
    admin.zdiffstore("difference", [half, half.replace(b":half", b":commit")])
    spent = admin.info("commandstats")["cmdstat_zdiffstore"]["usec"] / 1000
    admin.unlink("difference")
    print(f"the whole difference: {spent:,.0f} ms", file=sys.stderr)
    return float(spent)


def sql_once(
    url: str, server: Callable[[], float], size: Callable[[], float], count: int, seed: int
) -> dict[str, float]:
    store = open_sets(url, "bench")
    store.epoch()
    clock, full = Clock(server), [0.0]
    phase = clock.phase

    @contextlib.contextmanager
    def watched(name: str) -> Iterator[None]:
        with phase(name):
            yield
        if name == "enter":
            full[0] = size()

    clock.phase = watched  # type: ignore[method-assign]
    steps = work(store, clock, count, seed)[:-1] or [0.0]
    store.close()
    return figures(clock, count) | {
        "blocked, median ms": statistics.median(steps) * 1000,
        "blocked, p99.9 ms": float(np.percentile(steps, 99.9)) * 1000,
        "bytes an entry": full[0] / round(count * (1 + DONE)),
    }


def sqlite_once(folder: Path, count: int, seed: int) -> dict[str, float]:
    file = folder / "sets.db"
    return sql_once(f"sqlite:///{file}", lambda: 0.0, lambda: file.stat().st_size, count, seed)


def postgresql_once(folder: Path, count: int, seed: int) -> dict[str, float]:
    with postgres.serving(folder, durable=True) as server:
        engine = sa.create_engine(server.url)
        tables = "pg_total_relation_size('escrow_half_set') + pg_total_relation_size('escrow_commit_set')"

        def size() -> float:
            with engine.connect() as connection:
                return float(connection.exec_driver_sql(f"SELECT {tables}").scalar() or 0)

        told = sql_once(server.url, lambda: processor_seconds(server.pid), size, count, seed)
        engine.dispose()
        return told


def spark_once(folder: Path, count: int, seed: int) -> dict[str, float]:
    """The job's own difference over two files; the ids are written there by pyarrow, which stands for adding them."""
    from escrowmq.pipeline.reconcile.frames import missing
    from escrowmq.pipeline.session import local_session

    ids = ids_of(count, seed)
    done = np.random.default_rng(seed + 1).permutation(count)[: round(count * DONE)].tolist()
    clock = Clock(lambda: sum(processor_seconds(pid) for pid in children()))

    def write(name: str, texts: list[str]) -> None:
        at = pa.array(np.arange(len(texts)), pa.timestamp("us", "UTC"))
        pq.write_table(pa.table({"id": pa.array(texts), "at": at}), folder / name)

    with local_session("bench") as spark:
        with clock.phase("announce"):
            write("half.parquet", [identity.hex() for identity in ids])
        with clock.phase("enter"):
            write("commits.parquet", [ids[n].hex() for n in done])
        with clock.phase("take"):
            half, commits = (spark.read.parquet(str(folder / name)) for name in ("half.parquet", "commits.parquet"))
            found = missing(half, commits, settled_before=datetime(2100, 1, 1, tzinfo=UTC)).select("id").toArrow()
    assert found.num_rows == count - len(done)
    files = sum((folder / name).stat().st_size for name in ("half.parquet", "commits.parquet"))
    return figures(clock, count) | {"bytes an entry": files / round(count * (1 + DONE))}


def children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def figures(clock: Clock, count: int) -> dict[str, float]:
    """Microseconds for an id that was announced or entered; of the difference for an id of the half set."""
    per = {"announce": count, "enter": round(count * DONE), "take": count}
    told = {f"{name}, processor µs an id": clock.processor[name] / per[name] * 1e6 for name in per}
    return told | {f"{name}, seconds": clock.wall[name] for name in per}


ONCE = {"redis": redis_once, "sqlite": sqlite_once, "postgresql": postgresql_once, "spark": spark_once}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ids", default="100000,1000000", help="numbers of ids, with commas between")
    parser.add_argument("--stores", default=",".join(STORES), help=f"of {', '.join(STORES)}, with commas between")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each, the stores in turns; of a million ids and more one"
    )
    parser.add_argument("--folder", type=Path, help="where data is kept (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    told = []
    for count in map(int, options.ids.split(",")):
        runs: dict[str, list[dict[str, float]]] = {}
        for turn in range(max(1, min(options.repeats, 1_000_000 // count))):
            stores = options.stores.split(",")
            for store in stores if turn % 2 == 0 else reversed(stores):
                with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
                    runs.setdefault(store, []).append(ONCE[store](Path(folder), count, 1000 * turn))
        for store, measured in runs.items():
            for name in measured[0]:
                values = [run[name] for run in measured]
                row = {"store": store, "ids": count, "name": name, "median": statistics.median(values)}
                told.append({**row, "low": min(values), "high": max(values), "values": values})
                if not options.json:
                    print(
                        f"{count:>10,} {store:<11} {name:<44} {row['median']:>12,.2f}  {min(values):,.2f} to "
                        f"{max(values):,.2f}",
                        flush=True,
                    )
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "folder")}
        print(json.dumps({"benchmark": "compensation", "machine": machine(), "settings": settings, "figures": told}))


if __name__ == "__main__":
    main()
