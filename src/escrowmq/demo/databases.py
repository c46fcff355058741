"""The three SQLite databases of the demo, and the manifest by which the audit compares them with the log.

The audit compares every column, so that no manual change goes unnoticed. The business tables have no unique constraint:
exactly-once is the work of ``trans_barrier`` and ``trans_recv_log``, not of an insert that fails, and the audit can be
shown to find a row that was duplicated manually.

``trans_barrier`` holds the outcome of each transaction as the orders database knows it. The local transaction inserts
*committed* with its order; the answer to a check-back inserts *rolled back* and reads which of the two is stored. So
the answer is never a guess: after *rolled back* a late local transaction fails on the row.

``trans_recv_log`` holds the id of each message whose effect is in the database; both are written in one transaction.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMITTED, ROLLED_BACK = "committed", "rolled back"

ORDERS_DB = """
CREATE TABLE IF NOT EXISTS orders (
  order_id TEXT, customer_id TEXT, country TEXT, placed_at TEXT, units INTEGER, amount_cents INTEGER, points INTEGER,
  lines TEXT, transaction_id TEXT
);
CREATE INDEX IF NOT EXISTS orders_by_id ON orders (order_id);
CREATE TABLE IF NOT EXISTS trans_barrier (transaction_id TEXT PRIMARY KEY, order_id TEXT, outcome TEXT);
"""

CART_DB = """
CREATE TABLE IF NOT EXISTS cleared_carts (
  order_id TEXT, customer_id TEXT, units INTEGER, amount_cents INTEGER, message_id TEXT
);
"""

POINTS_DB = """
CREATE TABLE IF NOT EXISTS points_earned (order_id TEXT, customer_id TEXT, points INTEGER, message_id TEXT);
"""

RECEIVE_LOG = """
CREATE TABLE IF NOT EXISTS trans_recv_log (
  consumer_group TEXT, message_id TEXT, order_id TEXT, PRIMARY KEY (consumer_group, message_id)
);
"""

ORDER_COLUMNS = ("customer_id", "country", "placed_at", "units", "amount_cents", "points", "lines")
CART_COLUMNS = ("customer_id", "units", "amount_cents")
POINTS_COLUMNS = ("customer_id", "points")


class Database:
    """One SQLite database, created if it does not exist; commits are durable when they return (WAL, synchronous FULL).
    One connection under a lock: SQLite has one writer anyway, and waiting for a lock is fairer than retrying."""

    def __init__(self, path: Path, schema: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(schema)
        self._lock = threading.Lock()

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection to one thread at a time; each statement commits by itself."""
        with self._lock:
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection in a transaction, which is rolled back if the block raises."""
        with self.using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def close(self) -> None:
        """Close the connection, once no thread uses it."""
        with self.using() as connection:
            connection.close()


def insert(connection: sqlite3.Connection, table: str, *row: Any, repeat_ok: bool = False) -> bool:
    """Insert one row. Returns whether it is new. Raises IntegrityError for an existing key, unless ``repeat_ok``."""
    verb, marks = "INSERT OR IGNORE" if repeat_ok else "INSERT", ", ".join("?" * len(row))
    return connection.execute(f"{verb} INTO {table} VALUES ({marks})", row).rowcount > 0


def manifest(log: str) -> dict[str, Any]:
    """Return the manifest for the audit; ``log`` is the broker's data folder in the run folder."""
    barrier, orders, cart, points = "table:barrier", "table:orders", "table:carts", "table:points"
    whole = ["message_id", "transaction_id", "tag", "properties", "body"]
    return {
        "log": log,
        "files": {"placed": {"path": "orders.parquet", "id": "order_id", "where": {"cancelled": "false"}}},
        "tables": {
            "orders": _table("orders.db", "orders"),
            "barrier": _table("orders.db", "trans_barrier", outcome=COMMITTED),
            "carts": _table("cart.db", "cleared_carts"),
            "points": _table("points.db", "points_earned"),
            **{f"{n} log": _table(f"{n}.db", "trans_recv_log", consumer_group=n) for n in ("cart", "points")},
        },
        "topics": ["orders", "points"],
        "comparisons": [
            _comparison("file:placed", orders, ORDER_COLUMNS),
            _comparison(barrier, orders, ["transaction_id"]),
            # The barrier shows which orders must have a message; the order's row only its content.
            _comparison(barrier, "topic:orders", ["transaction_id"]),
            _comparison(barrier, "topic:points", ["transaction_id"]),
            _comparison(orders, "topic:orders", ORDER_COLUMNS, ["altered"]),
            _comparison(orders, "topic:points", POINTS_COLUMNS, ["altered"]),
            _comparison("half:orders", "topic:orders", whole),
            _comparison("half:points", "topic:points", whole),
            _comparison("topic:orders", cart, [*CART_COLUMNS, "message_id"]),
            _comparison("topic:orders", "table:cart log", ["message_id"]),
            _comparison("topic:points", points, [*POINTS_COLUMNS, "message_id"]),
            _comparison("topic:points", "table:points log", ["message_id"]),
        ],
        "consumers": {"cart": "carts", "points": "points"},
        "events": "events.jsonl",
    }


def _table(database: str, table: str, **where: str) -> dict[str, Any]:
    return {"database": database, "table": table, "id": "order_id", "where": where}


def _comparison(expected: str, found: str, columns: Any, judges: list[str] | None = None) -> dict[str, Any]:
    pair = {"expected": expected, "found": found, "columns": list(columns)}
    return pair if judges is None else {**pair, "judges": judges}
