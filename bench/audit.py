"""`escrowmq audit` on real runs of N messages: whole, and again after 1 % of changes, with time and memory by step.

A run is built first: a producer's database, a broker's folder with every message put as a transaction of its own (some
are rolled back, and are in no database), and two consumers' databases. One lost, one repeated, one altered and one
leaked row are planted in one window with SQL. Building is not measured; ``--prepare`` does only this, so that a quiet
machine can measure later:

    python bench/audit.py --messages 1e6,1e7 --folder /tmp/audit --prepare
    python bench/audit.py --messages 1e6,1e7 --folder /tmp/audit

The second command removes the runs; with ``--only whole`` it does only the first audit, and keeps them. The tables are
in SQLite files, or with ``--database`` in a PostgreSQL or MariaDB that is started for it. ``--profile`` prints the
stages of Spark.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
import xxhash
from _harness import arguments

import escrowmq as mq
from escrowmq.pipeline.audit.manifest import KINDS
from escrowmq.pipeline.audit.windows import WINDOWS
from escrowmq.pipeline.session import local_session

PREPARED = "prepared"
"""A file in the folder of a run that is complete."""
FEW = 200_000
"""The planted ids are among the first so many."""
STEP = 20_000
"""Messages of one batch."""
ROLLED_BACK = 20
"""One transaction of this many is rolled back."""
COUNTRIES = ("de", "fr", "it", "pl")

TABLES = {
    "orders": (
        *("order_id VARCHAR(20) PRIMARY KEY", "customer VARCHAR(20)", "country VARCHAR(20)"),
        *("units INTEGER", "cents INTEGER"),
    ),
    "carts": ("order_id VARCHAR(20)", "customer VARCHAR(20)", "units INTEGER", "cents INTEGER"),
    "points": ("order_id VARCHAR(20)", "customer VARCHAR(20)", "points INTEGER"),
}
"""The databases, one table each, and its columns. What consumers have has no unique index: a repeated effect can be
stored.
"""

FIELDS = ("customer", "country", "units", "cents", "points")
"""What a body says."""
NUMBERS = ("units", "cents", "points")
QUOTE = {name: "" if name in NUMBERS else '"' for name in FIELDS}

VARIABLE = "AUDIT_DATABASE"
"""The environment variable with the URL of the database."""

DATABASE = f"${{{VARIABLE}}}"
MANIFEST: dict[str, Any] = {
    "log": "broker",
    "tables": {
        name: {"database": f"${{{VARIABLE}}}", "table": name, "id": "order_id", "unique": name == "orders"}
        for name in TABLES
    },
    "topics": ["orders"],
    "comparisons": [
        {"expected": one, "found": other, "columns": columns}
        for one, other, columns in (
            ("table:orders", "topic:orders", ["customer", "country", "units", "cents"]),
            ("half:orders", "topic:orders", ["message_id", "transaction_id", "tag", "properties", "body"]),
            ("topic:orders", "table:carts", ["customer", "units", "cents"]),
            ("topic:orders", "table:points", ["customer", "points"]),
        )
    ],
    "consumers": {"cart": "carts", "points": "points"},
}


@dataclass(frozen=True, slots=True)
class Planted:
    """Ids of one window: four that are planted, and one that is altered later."""

    lost: str
    repeated: str
    altered: str
    leaked: str
    later: str

    def named(self) -> set[tuple[str, str]]:
        """(kind, id) of the four."""
        return {(kind, getattr(self, kind)) for kind in KINDS}


def orders(start: int, stop: int) -> dict[str, Any]:
    """Orders as columns of Arrow texts and numbers, all made of their numbers: a run of 10⁷ is made in minutes."""
    number = np.arange(start, stop)
    cents = number * 7919 % 100_003
    columns = {"units": number % 7 + 1, "cents": cents, "points": cents // 100}
    texts = {name: pa.array(values).cast(pa.utf8()) for name, values in columns.items()}
    ids = pc.utf8_lpad(pa.array(number).cast(pa.utf8()), 10, "0")
    return {
        "order_id": pc.binary_join_element_wise("o-", ids, ""),
        "customer": pc.binary_join_element_wise("c-", pa.array(number * 31 % 65_537).cast(pa.utf8()), ""),
        "country": pa.array(COUNTRIES).take(pa.array(number % len(COUNTRIES))),
        **texts,
        "kept": number % ROLLED_BACK != 0,
    }


@contextmanager
def database(kind: str, folder: Path) -> Iterator[sa.Engine]:
    """A database for the three tables; the audit finds it by the environment."""
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'shop.db'}"
        if kind != "sqlite":
            server = importlib.import_module(f"escrowmq_lab.servers.{kind}")
            (folder / kind).mkdir()
            url = stack.enter_context(server.serving(folder / kind)).url
        os.environ[VARIABLE] = url
        engine = sa.create_engine(url)
        stack.callback(engine.dispose)
        yield engine


def with_rolled_back(messages: int) -> int:
    """The number of all orders, of which ``messages`` commit."""
    return messages + messages // (ROLLED_BACK - 1)


def build(folder: Path, messages: int, engine: sa.Engine) -> None:
    """The whole run, on which all sides agree."""
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    with engine.begin() as connection:
        for name, columns in TABLES.items():
            connection.exec_driver_sql(f"CREATE TABLE {name} ({', '.join(columns)})")
    put(folder, range(with_rolled_back(messages)), engine)


def put(folder: Path, numbers: range, engine: sa.Engine) -> None:
    """Place the orders of these numbers: in the producer's table, in the log, one transaction each, and in the
    consumers' tables."""
    with mq.connect(f"file:{folder / 'broker'}") as bus:
        producer = bus.producer("bench-audit", checker=lambda check: mq.UNKNOWN)
        for start in range(numbers.start, numbers.stop, STEP):
            made = orders(start, min(start + STEP, numbers.stop))
            parts = [part for name in FIELDS for part in (f', "{name}": {QUOTE[name]}', made[name], QUOTE[name])]
            body = pc.binary_join_element_wise("{" + parts[0][2:], *parts[1:], "}", "").cast(pa.binary())
            topic = pa.array(["orders"] * len(body))
            receipts = producer.prepare_batch(
                pa.RecordBatch.from_arrays([topic, made["order_id"], body], ["topic", "key", "body"])
            )
            assert receipts.ok
            outcomes = [mq.COMMIT if kept else mq.ROLLBACK for kept in made["kept"].tolist()]
            assert producer.end_batch(receipts.transactions, outcomes).ok
            insert(engine, {name: made[name].filter(pa.array(made["kept"])) for name in made if name != "kept"})
        producer.close()


def insert(engine: sa.Engine, effects: dict[str, pa.Array]) -> None:
    """Insert orders into all three tables, by the driver itself: it takes tuples."""
    mark = "?" if engine.dialect.paramstyle == "qmark" else "%s"
    connection = engine.raw_connection()
    for name, columns in TABLES.items():
        names = [column.split()[0] for column in columns]
        values = [effects[column].cast(pa.int64() if column in NUMBERS else pa.utf8()).to_pylist() for column in names]
        marks = ", ".join([mark] * len(names))
        connection.cursor().executemany(f"INSERT INTO {name} VALUES ({marks})", list(zip(*values, strict=True)))
    connection.commit()
    connection.close()


def choose(messages: int, portable: bool) -> Planted:
    """Ids of one window (with a server: of its MD5): three orders, and one that was rolled back."""
    every = min(with_rolled_back(messages), FEW)
    by_window: dict[int, list[tuple[str, bool]]] = {}
    for number, id in enumerate(orders(0, every)["order_id"].to_pylist()):
        md5 = int(hashlib.md5(id.encode()).hexdigest()[:15], 16)
        place = (md5 if portable else xxhash.xxh64_intdigest(id.encode(), 42)) % WINDOWS
        by_window.setdefault(place, []).append((id, number % ROLLED_BACK != 0))
    for inside in by_window.values():
        kept, gone = ([id for id, is_kept in inside if is_kept is wanted] for wanted in (True, False))
        if len(kept) >= 4 and gone:
            return Planted(*kept[:3], gone[0], later=kept[3])
    raise SystemExit("too few messages for a window of four")


def plant(engine: sa.Engine, four: Planted) -> None:
    """Edit what the consumers have, so that every count agrees, of all rows and of the window's.

    One comparison alone cannot have all four with equal counts: a lost row and a leaked one cancel out, and the second
    row of the repeated id is one too many. But a message that is lost is missing from *every* consumer. So the cart,
    which lost one, repeats one; and the points, which lost the same, have one of a rollback.
    """
    edits = {
        "carts": [
            ("DELETE FROM carts WHERE order_id = :id", four.lost),
            ("INSERT INTO carts SELECT * FROM carts WHERE order_id = :id", four.repeated),
            ("UPDATE carts SET cents = cents + 1 WHERE order_id = :id", four.altered),
        ],
        "points": [
            ("DELETE FROM points WHERE order_id = :id", four.lost),
            ("INSERT INTO points VALUES (:id, 'c-1', 5)", four.leaked),
        ],
    }
    with engine.begin() as connection:
        for statement, identity in (edit for statements in edits.values() for edit in statements):
            assert connection.execute(sa.text(statement), {"id": identity}).rowcount == 1


def prepare(folder: Path, messages: int, kind: str, engine: sa.Engine) -> None:
    """Build a run, and plant the four."""
    build(folder, messages, engine)
    plant(engine, choose(messages, kind != "sqlite"))
    (folder / PREPARED).touch()
    os.sync()  # otherwise the first audit waits for the disk


def change(folder: Path, messages: int, four: Planted, engine: sa.Engine) -> None:
    """Add 1 % of messages on all sides, and alter an old row of a consumer."""
    every = with_rolled_back(messages)
    put(folder, range(every, every + max(messages // 100, 1)), engine)
    with engine.begin() as connection:
        altered = sa.text("UPDATE points SET points = points + 1 WHERE order_id = :id")
        assert connection.execute(altered, {"id": four.later}).rowcount == 1


@dataclass
class Audited:
    """One audit in a process of its own: seconds, also of each step; processor seconds of Java, and of all Python
    processes together; the most memory (MB) of both; the verdict."""

    seconds: float
    steps: dict[str, float]
    java_s: float
    python_s: float
    java_mb: float
    python_mb: float
    verdict: bytes


def audit(folder: Path, **options: Any) -> Audited:
    """Run one audit as the command does, and watch its memory."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--audit", str(folder), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        memory, busy = {"java": 0.0, "python": 0.0}, {"java": 0.0, "python": 0.0}
        watching = threading.Thread(target=watch, args=(process, memory, busy))
        watching.start()
        lines = list(process.stdout)
    watching.join()
    seconds = time.perf_counter() - start
    assert process.returncode == 0, process.returncode
    marks = [line.rstrip().split(" ", 2) for line in lines if line.startswith("step ")]
    ends = [float(at) for _, at, _ in marks[1:]] + [seconds]
    steps = {name: end - float(at) for (_, at, name), end in zip(marks, ends, strict=True)}
    others = [line for line in lines if not line.startswith("step ")]
    print("".join(others), end="", file=sys.stderr)
    verdict = (folder / "verdict.json").read_bytes()
    return Audited(seconds, steps, busy["java"], busy["python"], memory["java"], memory["python"], verdict)


def watch(process: subprocess.Popen[str], memory: dict[str, float], busy: dict[str, float]) -> None:
    """Keep the most memory and the processor seconds of Java, and of the Python processes, until the process ends.

    The times that the system adds up for an ended child lack Spark's Python workers: nobody waits for their end."""
    last: dict[tuple[int, str], float] = {}
    while process.poll() is None:
        found = dict.fromkeys(memory, 0.0)
        for pid, name, mb, seconds in list_processes(process.pid):
            kind = "java" if name == "java" else "python"
            found[kind] += mb
            last[pid, kind] = seconds
        memory |= {name: max(memory[name], found[name]) for name in memory}
        time.sleep(0.1)
    busy |= {name: sum(seconds for (_, kind), seconds in last.items() if kind == name) for name in busy}


def list_processes(pid: int) -> list[tuple[int, str, float, float]]:
    """Number, name, resident memory (MB) and processor seconds of a process and all that it started."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        pids = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    except OSError:  # it has ended
        return []
    mb, seconds = pages * os.sysconf("SC_PAGE_SIZE") / 1e6, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return [(pid, name, mb, seconds), *(one for child in pids for one in list_processes(child))]


def run_one(folder: Path, state: str | None = None, windows: int | None = None, profile: bool = False) -> None:
    """Audit, and print the seconds since this process began at each step."""
    begun = time.perf_counter() - time.process_time()  # imports included

    def on_step(text: str) -> None:
        print(f"step {time.perf_counter() - begun:.2f} {text}", flush=True)

    on_step("imports")
    from escrowmq.pipeline.audit import run

    with ExitStack() as stack:
        more: dict[str, Any] = {}
        if profile:
            logs = stack.enter_context(tempfile.TemporaryDirectory())
            settings = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file:{logs}"}
            settings["spark.eventLog.compress"] = "false"
            rows = int(folder.name) * 2
            more["spark"] = stack.enter_context(local_session("bench audit", rows=rows, settings=settings))
        run(folder, progress=on_step, state=None if state is None else Path(state), windows=windows, **more)
        on_step("ending")
        if profile:
            show_stages(Path(logs))


def show_stages(logs: Path) -> None:
    """Print wall time, processor time in Java and shuffled bytes of each stage, from Spark's event log."""
    tasks: dict[int, list[float]] = {}
    stages = []
    for file in (one for one in logs.rglob("*") if one.is_file() and one.name.startswith("events")):
        for event in map(json.loads, file.read_text().splitlines()):
            if event["Event"] == "SparkListenerTaskEnd" and "Task Metrics" in event:
                metrics, sums = event["Task Metrics"], tasks.setdefault(event["Stage ID"], [0, 0, 0, 0])
                written = metrics["Shuffle Write Metrics"]["Shuffle Bytes Written"]
                values = (1, metrics["Executor Run Time"] / 1e3, metrics["Executor CPU Time"] / 1e9, written / 1e6)
                sums[:] = [one + other for one, other in zip(sums, values, strict=True)]
            elif event["Event"] == "SparkListenerStageCompleted":
                info = event["Stage Info"]
                stages.append((info["Submission Time"], info["Completion Time"], info["Stage ID"], info["Stage Name"]))
    for begin, end, number, name in sorted(stages):
        count, run_s, busy, mb = tasks.get(number, [0, 0, 0, 0])
        at, wall = (begin - min(stages)[0]) / 1e3, (end - begin) / 1e3
        place = name.rpartition("/")[2]
        print(f"{at:7.1f} s + {wall:6.1f} s, {count:4} tasks {run_s:7.1f} s, Java {busy:7.1f} s, {mb:7.1f} MB {place}")


def check(verdict: bytes, wrong: set[tuple[str, str]], counts: bool) -> None:
    """Exactly these are named, and ``counts`` would not have told."""
    found = json.loads(verdict)
    assert {(one["kind"], one["id"]) for one in found["findings"]} == wrong, found["findings"]
    assert found["findings_in_all"] == len(wrong) + 1  # the lost one by both consumers
    for side in found["comparisons"] if counts else ():
        assert side["expected_rows"] == side["found_rows"], side


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def measure(folder: Path, messages: int, options: argparse.Namespace, engine: sa.Engine) -> list[tuple[str, Audited]]:
    """Audit a run: whole, with a state, and after 1 % of changes with that state."""
    four = choose(messages, options.database != "sqlite")
    profile = {"profile": True} if options.profile else {}
    whole = [audit(folder, **profile) for _ in range(options.repeats)]
    found = [("whole", one) for one in whole]
    if options.only == "whole":
        check(whole[0].verdict, four.named(), counts=True)
        return found
    state = str(folder / "audit.state")
    if options.rows:
        found.append(("all rows", audit(folder, windows=0)))
    found.append(("whole, writes a state", audit(folder, state=state)))
    for _, one in found:
        check(one.verdict, four.named(), counts=True)
        assert one.verdict == whole[0].verdict, "another audit says something else"
    change(folder, messages, four, engine)
    os.sync()
    found.append(("after 1 % of changes", audit(folder, state=state, **profile)))
    check(found[-1][1].verdict, four.named() | {("altered", four.later)}, counts=True)
    return found


def read_bare(url: str, table: str, half: int) -> int:
    """Read every second million of a table's rows with the driver alone. Returns their number."""
    connection, rows, start = sqlite3.connect(url), 0, half * 10**6
    (last,) = connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()
    while start <= last:
        cursor = connection.execute(f"SELECT * FROM {table} WHERE rowid > ? AND rowid <= ?", (start, start + 10**6))
        while page := cursor.fetchmany(8192):
            rows += len(page)
        start += 2 * 10**6
    connection.close()
    return rows


def measure_floor(folder: Path) -> float:
    """Seconds in which two processes read the three tables once, and do nothing with their rows."""
    start = time.perf_counter()
    with ProcessPoolExecutor(2) as pool:
        jobs = [pool.submit(read_bare, str(folder / "shop.db"), table, half) for table in TABLES for half in (0, 1)]
        assert sum(job.result() for job in jobs) > 0
    return time.perf_counter() - start


def show(messages: int, found: list[tuple[str, Audited]]) -> None:
    """Print a row per audit, and its steps."""
    for name, one in found:
        busy = one.java_s + one.python_s
        print(f"| {messages:.0e} | {name} | {one.seconds:.1f} s | {one.java_s:.1f} s | {one.python_s:.1f} s | ", end="")
        print(f"{1e6 * busy / messages:.1f} µs | {one.java_mb:.0f} MB | {one.python_mb:.0f} MB |")
    for name, one in found:
        print(f"  {messages:.0e}, {name}: " + ", ".join(f"{step} {at:.1f} s" for step, at in one.steps.items()))


def main() -> None:
    if sys.argv[1:2] == ["--audit"]:
        run_one(Path(sys.argv[2]), **json.loads(sys.argv[3]))
        return
    parser = arguments(__doc__)
    parser.set_defaults(repeats=1)
    parser.add_argument("--messages", default="1e6", help="messages that commit; several sizes with commas")
    parser.add_argument("--database", choices=["sqlite", "postgres", "mariadb"], default="sqlite")
    parser.add_argument("--rows", action="store_true", help="also read all rows, instead of checksums first")
    parser.add_argument("--profile", action="store_true", help="print the stages of Spark to the standard error")
    parser.add_argument("--prepare", action="store_true", help="only build the runs in --folder (SQLite)")
    options = parser.parse_args()
    with ExitStack() as stack:
        root = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="escrowmq-bench-")))
        for messages in (int(float(text)) for text in options.messages.split(",")):
            folder = root / str(messages)
            is_there = (folder / PREPARED).exists()
            if not is_there:
                shutil.rmtree(folder, ignore_errors=True)  # half of a run
            folder.mkdir(parents=True, exist_ok=True)
            with database(options.database, folder) as engine:
                if not is_there:
                    prepare(folder, messages, options.database, engine)
                if not options.prepare:
                    print(f"{messages:,} messages, {size(folder) / 1e9:.1f} GB, {options.database}", flush=True)
                    show(messages, measure(folder, messages, options, engine))
                    if options.database == "sqlite":
                        print(f"  {messages:.0e}: the tables read once, no audit: {measure_floor(folder):.1f} s")
            if not options.prepare and options.only is None:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
