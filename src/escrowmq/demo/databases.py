"""The three SQLite databases of the demo, and the manifest by which the audit compares them with the log.

Every column is one that the audit compares, so that no row can be changed manually unnoticed. The business tables have
no unique constraint: exactly-once is the work of ``trans_barrier`` and ``trans_recv_log``, not of an insert that fails,
and a row doubled manually can be shown to be found.

``trans_barrier`` holds the outcome of each transaction as the orders database knows it. The local transaction inserts
*committed* beside its order; the answer to a check inserts *rolled back* and reads which of the two stands. So the
answer is never a guess: after *rolled back* a late local transaction fails on the row.

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
    """One SQLite database, made if it is not there; commits are durable when they return (WAL, synchronous FULL).

    One connection under a lock: SQLite has one writer anyway, and waiting for a lock is fairer than retrying.
    """

    def __init__(self, path: Path, schema: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(schema)
        self._lock = threading.Lock()

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, for one thread at a time; each statement commits by itself."""
        with self._lock:
            yield self._connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a transaction, which is rolled back if the block raises."""
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
    """Insert one row; whether it is new. A row whose key is there raises IntegrityError, unless ``repeat_ok``."""
    verb, marks = "INSERT OR IGNORE" if repeat_ok else "INSERT", ", ".join("?" * len(row))
    return connection.execute(f"{verb} INTO {table} VALUES ({marks})", row).rowcount > 0


def manifest(log: str) -> dict[str, Any]:
    """Return what the audit compares; ``log`` is the broker's data folder within the run folder."""
    barrier, orders, cart, points = "table:barrier", "table:orders", "table:carts", "table:points"
    return {
        "log": log,
        "files": {"placed": {"path": "orders.parquet", "id": "order_id", "where": {"cancelled": "false"}}},
        "tables": {
            "orders": {"database": "orders.db", "table": "orders", "id": "order_id"},
            "barrier": {
                "database": "orders.db",
                "table": "trans_barrier",
                "id": "order_id",
                "where": {"outcome": COMMITTED},
            },
            "carts": {"database": "cart.db", "table": "cleared_carts", "id": "order_id"},
            "points": {"database": "points.db", "table": "points_earned", "id": "order_id"},
            **{
                f"{name} log": {
                    "database": f"{name}.db",
                    "table": "trans_recv_log",
                    "id": "order_id",
                    "where": {"consumer_group": name},
                }
                for name in ("cart", "points")
            },
        },
        "topics": ["orders", "points"],
        "comparisons": [
            _pair("file:placed", orders, ORDER_COLUMNS),
            _pair(barrier, orders, ["transaction_id"]),
            # The barrier says which orders must have a message; the order's row only what must be in it.
            _pair(barrier, "topic:orders", ["transaction_id"]),
            _pair(barrier, "topic:points", ["transaction_id"]),
            _pair(orders, "topic:orders", ORDER_COLUMNS, ["altered"]),
            _pair(orders, "topic:points", POINTS_COLUMNS, ["altered"]),
            _pair("half:orders", "topic:orders", ["message_id", "transaction_id", "tag", "properties", "body"]),
            _pair("half:points", "topic:points", ["message_id", "transaction_id", "tag", "properties", "body"]),
            _pair("topic:orders", cart, [*CART_COLUMNS, "message_id"]),
            _pair("topic:orders", "table:cart log", ["message_id"]),
            _pair("topic:points", points, [*POINTS_COLUMNS, "message_id"]),
            _pair("topic:points", "table:points log", ["message_id"]),
        ],
        "consumers": {"cart": "carts", "points": "points"},
        "events": "events.jsonl",
    }


def _pair(expected: str, found: str, columns: Any, judges: list[str] | None = None) -> dict[str, Any]:
    pair = {"expected": expected, "found": found, "columns": list(columns)}
    return pair if judges is None else {**pair, "judges": judges}
