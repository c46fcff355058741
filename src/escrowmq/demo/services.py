"""The services behind the shop: each consumes one topic and applies every message to its own database exactly once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from escrowmq.demo.databases import CART_COLUMNS, CART_DB, POINTS_COLUMNS, POINTS_DB, RECEIVE_LOG, Database, insert
from escrowmq.demo.shop import ORDERS_TOPIC, POINTS_TOPIC
from escrowmq.errors import EscrowError

AFTER_DATABASE_COMMIT = "between its database commit and its ack"


@dataclass(frozen=True, slots=True)
class Kind:
    """A service: the topic that it consumes, and the table that it writes."""

    name: str
    topic: str
    database: str
    schema: str
    table: str
    columns: tuple[str, ...]


CART = Kind("cart", ORDERS_TOPIC, "cart.db", CART_DB, "cleared_carts", CART_COLUMNS)
POINTS = Kind("points", POINTS_TOPIC, "points.db", POINTS_DB, "points_earned", POINTS_COLUMNS)
KINDS = {kind.name: kind for kind in (CART, POINTS)}


class Service(Database):
    """Applies batches of messages; a batch's effects and records of handled ids share a database transaction."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        super().__init__(folder / kind.database, kind.schema + RECEIVE_LOG)
        self._kind = kind

    def applied(self) -> int:
        """Return the number of effects in the database."""
        with self.using() as connection:
            return int(connection.execute(f"SELECT count(*) FROM {self._kind.table}").fetchone()[0])

    def apply(self, batch: pa.RecordBatch) -> int:
        """Apply new messages. Returns their number. Durable when it returns."""
        columns = (batch.column(name).to_pylist() for name in ("message_id", "key", "body"))
        with self.transaction() as connection:
            return sum(
                self._apply_one(connection, message_id.hex(), key, json.loads(body))
                for message_id, key, body in zip(*columns, strict=True)
            )

    def run(self, batches: Any, report: Callable[..., None], stop_after: int | None) -> None:
        """Consume until the batches end. After ``stop_after`` messages ``report`` gets the event "at failpoint"."""
        total, done = self.applied(), 0
        for batch in batches:
            fresh = self.apply(batch.arrow)
            total, done = total + fresh, done + fresh
            if stop_after is not None and done >= stop_after:
                report("at failpoint", where=AFTER_DATABASE_COMMIT)
            try:
                batch.ack()
            except EscrowError as problem:  # the broker was unreachable: redeliveries are recognized by their records
                report("retry", code=problem.code.name)
            report("progress", number=total, repeats=len(batch.arrow) - fresh)

    def _apply_one(
        self, connection: sqlite3.Connection, message_id: str, order_id: str, content: dict[str, Any]
    ) -> bool:
        kind = self._kind
        fresh = insert(connection, "trans_recv_log", kind.name, message_id, order_id, repeat_ok=True)
        if fresh:
            insert(connection, kind.table, order_id, *(content[name] for name in kind.columns), message_id)
        return fresh
