"""One folder on which all four jobs find something, and the jobs as words of the command line, over relative paths."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sweeps_world import SHARDS, world

import escrowmq as mq

BROKER = "file:./run/broker"
JOBS = {
    "audit": ["run"],
    "reconcile": [
        *("--url", BROKER, "--half", "order-keys", "--commits", "orders"),
        *("--settled-before", "2100-01-01", "--out", "findings"),
    ],
    "report": ["--url", BROKER, "--out", "pages"],
    "sweep": [
        *("--orders", "sqlite:///orders_0.db", "--orders", "sqlite:///orders_1.db"),
        *("--products", "sqlite:///products.db", "--shard-by", "user_id"),
    ],
}
"""Arguments of each job, run in the folder."""
WRONG = {("lost", "o-17"), ("repeated", "o-5"), ("altered", "o-4"), ("leaked", "o-none")}
"""What the audit has to name."""
UNCONFIRMED = {"o-17", "k-1"}
"""Announced, never committed."""


def make(folder: Path, count: int = 200) -> Path:
    """A run folder with one of each kind of fault, whose broker also has the keys of the orders; and a shop to be
    swept."""
    run = folder / "run"
    run.mkdir(parents=True)
    with closing(sqlite3.connect(run / "orders.db")) as database:
        database.execute("CREATE TABLE orders (order_id TEXT PRIMARY KEY, cents INTEGER)")
        database.executemany("INSERT INTO orders VALUES (?, ?)", [(f"o-{n}", n) for n in range(count)])
        database.commit()
    with mq.connect(f"file:{run / 'broker'}") as bus:
        fill(bus, count)
    manifest = {
        "log": "broker",
        "tables": {"orders": {"database": "orders.db", "table": "orders", "id": "order_id", "unique": True}},
        "topics": ["orders"],
        "comparisons": [{"expected": "table:orders", "found": "topic:orders", "columns": ["cents"]}],
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    with shop(folder) as made:
        made.fill()
    return folder


def fill(bus: mq.Bus, count: int = 200) -> None:
    """What the broker has of the orders o-0, o-1, ... with their numbers as cents, with the faults; their keys, and
    carts."""
    sent = [(f"o-{n}", n) for n in range(count) if n != 17] + [("o-5", 5), ("o-none", 0)]
    rows = [mq.Message("orders", json.dumps({"cents": -1 if key == "o-4" else n}).encode(), key=key) for key, n in sent]
    keys = [mq.Message("order-keys", b"", key=key) for key in [f"o-{n}" for n in range(count)] + ["o-none", "k-1"]]
    assert bus.producer("plain").send_batch(rows).ok
    assert bus.producer("plain").send_batch(keys).ok
    producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
    for number in range(6):
        half = producer.prepare("carts", b"{}", key=f"c-{number}")
        (producer.commit if number % 2 else producer.rollback)(half.transaction_id)


def copy(folder: Path, to: Path) -> Path:
    """The same once more."""
    return Path(shutil.copytree(folder, to))


def shop(folder: Path, *, there: bool = False) -> Any:
    """The databases of the sweeps (a context manager; see sweeps_world.py)."""
    names = ["products", "warehouse", *(f"orders_{number}" for number in range(SHARDS))]
    return world([f"sqlite:///{folder / name}.db" for name in names], there=there)


def left(folder: Path) -> dict[str, Any]:
    """What the jobs have written."""
    found: dict[str, Any] = {}
    for name in ("run/verdict.json", "findings/report.json", "pages/report.json"):
        if (folder / name).exists():
            found[name] = json.loads((folder / name).read_text())
    with shop(folder, there=True) as made:
        found["shop"], found["problems"] = made.content(), made.problems()
    return found
