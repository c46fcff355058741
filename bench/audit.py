"""`escrowmq audit` on a real run of N messages, with one lost, one repeated, one altered and one leaked planted in one
window.

The run is built first: a producer's database, a broker's folder with every message put as a transaction of its own
(some are rolled back, and are in no database), and two consumers' databases. Then the four are planted with SQL, and
the command is run twice. The tables are in SQLite files, or with ``--database`` in a PostgreSQL or MariaDB that is
started for it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from _harness import Report, arguments
from pyspark.sql import functions as f

import escrowmq as mq
from escrowmq.pipeline.audit.windows import WINDOWS, window
from escrowmq.pipeline.session import local_session

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
    """The four ids, all of one window."""

    lost: str
    repeated: str
    altered: str
    leaked: str

    def named(self) -> set[tuple[str, str]]:
        """(kind, id) of the four."""
        return {(kind, getattr(self, kind)) for kind in self.__slots__}


def order(number: int) -> dict[str, Any]:
    """An order, all made of its number."""
    units = number % 7 + 1
    cents = number * 7919 % 100_003
    customer = f"c-{number * 31 % 65_537}"
    return {
        "order_id": f"o-{number:010}",
        **{"customer": customer, "country": COUNTRIES[number % 4], "units": units, "cents": cents},
        "points": cents // 100,
    }


def batches(messages: int) -> Iterator[list[dict[str, Any]]]:
    """All orders; those that are rolled back come on top of ``messages``."""
    every = messages + messages // (ROLLED_BACK - 1)
    for start in range(0, every, STEP):
        yield [order(number) for number in range(start, min(start + STEP, every))]


def kept(number: int) -> bool:
    """Whether an order's transaction commits."""
    return number % ROLLED_BACK != 0


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


def build(folder: Path, messages: int, engine: sa.Engine) -> None:
    """The whole run, on which all sides agree."""
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    with engine.begin() as connection:
        for name, columns in TABLES.items():
            connection.exec_driver_sql(f"CREATE TABLE {name} ({', '.join(columns)})")
    number = 0
    with mq.connect(f"file:{folder / 'broker'}") as bus:
        producer = bus.producer("bench-audit", checker=lambda check: mq.UNKNOWN)
        for orders in batches(messages):
            commits = [kept(n) for n in range(number, number + len(orders))]
            number += len(orders)
            put(producer, orders, commits)
            effects = [one for one, commit in zip(orders, commits, strict=True) if commit]
            with engine.begin() as connection:
                for name, columns in TABLES.items():
                    marks = ", ".join(f":{column.split()[0]}" for column in columns)
                    connection.execute(sa.text(f"INSERT INTO {name} VALUES ({marks})"), effects)
        producer.close()


def put(producer: mq.Producer, orders: list[dict[str, Any]], commits: list[bool]) -> None:
    """Prepare these orders, one transaction each, and end them."""
    bodies = [json.dumps({name: one[name] for name in FIELDS}).encode() for one in orders]
    table = {"topic": ["orders"] * len(orders), "key": [one["order_id"] for one in orders], "body": bodies}
    receipts = producer.prepare_batch(pa.RecordBatch.from_pydict(table))
    assert receipts.ok
    outcomes = [mq.COMMIT if commit else mq.ROLLBACK for commit in commits]
    assert producer.end_batch(receipts.transactions, outcomes).ok


def choose(messages: int) -> Planted:
    """Ids of one window, by the product's own function: three orders, and one that was rolled back."""
    every = messages + messages // (ROLLED_BACK - 1)
    with local_session("bench audit", rows=messages) as spark:
        ids = spark.range(every).select(f.format_string("o-%010d", "id").alias("id"), f.col("id") % ROLLED_BACK == 0)
        ids = ids.toDF("id", "gone").withColumn("window", window(f.col("id"), WINDOWS))
        fitting = ids.groupBy("window").agg(f.count_if("gone").alias("gone"), f.count("*").alias("ids"))
        place = fitting.where("gone >= 1 AND ids - gone >= 3").orderBy(f.hash("window")).first()
        assert place is not None, "too few messages for a window of four"
        inside = ids.where(f.col("window") == place["window"]).orderBy("id").collect()
    orders = [row["id"] for row in inside if not row["gone"]]
    return Planted(orders[0], orders[1], orders[2], next(row["id"] for row in inside if row["gone"]))


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


def audit(folder: Path, *flags: str) -> tuple[float, float, dict[str, Any], bytes]:
    """One run of the command: seconds, its processor time without that of a server, the verdict, and its bytes."""
    start, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "escrowmq", "audit", str(folder), "--json", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    seconds, after = time.perf_counter() - start, os.times()
    assert done.returncode == 1, done.returncode  # the sides do not agree
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, busy, json.loads(done.stdout), (folder / "verdict.json").read_bytes()


def check(verdict: dict[str, Any], four: Planted) -> None:
    """Exactly the four are named, and counts would not have told."""
    assert {(one["kind"], one["id"]) for one in verdict["findings"]} == four.named(), verdict["findings"]
    assert verdict["findings_in_all"] == 5  # the lost one by both consumers
    assert [verdict[kind] for kind in (*four.__slots__, "orphaned")] == [1, 1, 1, 1, 0], verdict
    for side in verdict["comparisons"]:
        assert side["expected_rows"] == side["found_rows"], side


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=2, body=0)
    parser.add_argument("--messages", type=lambda text: int(float(text)), default=10**6, help="messages that commit")
    parser.add_argument("--database", choices=["sqlite", "postgres", "mariadb"], default="sqlite")
    parser.add_argument("--rows", action="store_true", help="read all rows in the second run")
    options = parser.parse_args()
    report = Report("audit", options)
    report.begin()
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder)
        folder, messages = Path(stack.enter_context(made)), options.messages
        engine = stack.enter_context(database(options.database, folder))
        start = time.perf_counter()
        build(folder, messages, engine)
        four = choose(messages)
        plant(engine, four)
        report.add("building the run", "s", "", [time.perf_counter() - start])
        report.add("bytes of the run", "MB", "", [size(folder) / 1e6])
        flags = [["--rows"] if number and options.rows else [] for number in range(max(options.repeats, 2))]
        runs = [audit(folder, *more) for more in flags]
        for _, _, verdict, document in runs:
            check(verdict, four)
            assert document == runs[0][3], "a second audit says something else"
        title = f"escrowmq audit, {messages:,} messages, {options.database}"
        report.add(title, "s", "", [one[0] for one in runs])
        report.add(f"{title}: a message", "us", "", [1e6 * one[0] / messages for one in runs])
        report.add(f"{title}: processor time", "s", "", [one[1] for one in runs])
    report.end()


if __name__ == "__main__":
    main()
