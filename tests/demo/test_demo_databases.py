"""The shop's and the services' databases: the barrier, and effects that happen once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from escrowmq.demo.databases import manifest
from escrowmq.demo.orders import generate_orders
from escrowmq.demo.services import CART, KINDS, Service
from escrowmq.demo.shop import OrderCancelled, OrdersDatabase
from escrowmq.model import COMMIT, ROLLBACK
from escrowmq.pipeline.audit.manifest import Manifest

ORDERS = generate_orders(30, seed=5).to_pylist()
KEPT = next(order for order in ORDERS if not order["cancelled"])
CANCELLED = next(order for order in ORDERS if order["cancelled"])


def rows(path: Path, table: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"SELECT * FROM {table}").fetchall()
    finally:
        connection.close()


def test_an_order_and_its_outcome_are_one_transaction(tmp_path: Path) -> None:
    database = OrdersDatabase(tmp_path / "orders.db")
    database.place(KEPT, "t-1")
    assert database.placed() == {KEPT["order_id"]}
    assert database.outcome("t-1", KEPT["order_id"]) is COMMIT
    database.close()
    assert rows(tmp_path / "orders.db", "trans_barrier") == [("t-1", KEPT["order_id"], "committed")]


def test_a_cancelled_order_leaves_nothing(tmp_path: Path) -> None:
    database = OrdersDatabase(tmp_path / "orders.db")
    with pytest.raises(OrderCancelled):
        database.place(CANCELLED, "t-1")
    database.close()
    assert rows(tmp_path / "orders.db", "orders") == []
    assert rows(tmp_path / "orders.db", "trans_barrier") == []


def test_an_answer_binds_the_local_transaction_that_comes_after_it(tmp_path: Path) -> None:
    """A check that finds nothing answers rollback; the order may then not slip in under the same transaction."""
    database = OrdersDatabase(tmp_path / "orders.db")
    assert database.outcome("t-1", KEPT["order_id"]) is ROLLBACK
    with pytest.raises(sqlite3.IntegrityError):
        database.place(KEPT, "t-1")
    assert database.placed() == set()
    assert database.outcome("t-1", KEPT["order_id"]) is ROLLBACK
    database.place(KEPT, "t-2")
    assert database.outcome("t-2", KEPT["order_id"]) is COMMIT
    database.close()


def delivery(*numbers: int) -> pa.RecordBatch:
    bodies = [json.dumps({"customer_id": None, "units": n, "amount_cents": n}).encode() for n in numbers]
    return pa.record_batch(
        {
            "message_id": pa.array([n.to_bytes(16, "big") for n in numbers], pa.binary(16)),
            "key": pa.array([f"o-{n}" for n in numbers]),
            "body": pa.array(bodies),
        }
    )


def test_a_message_has_one_effect_however_often_it_comes(tmp_path: Path) -> None:
    service = Service(CART, tmp_path)
    assert service.apply(delivery(1, 2, 2)) == 2
    assert service.apply(delivery(2, 3)) == 1
    assert service.applied() == 3
    service.close()
    assert [row[0] for row in rows(tmp_path / "cart.db", "cleared_carts")] == ["o-1", "o-2", "o-3"]


def test_a_batch_that_fails_leaves_neither_marks_nor_effects(tmp_path: Path) -> None:
    service = Service(CART, tmp_path)
    broken = delivery(1, 2).set_column(
        2, "body", pa.array([b'{"customer_id": null, "units": 1, "amount_cents": 1}', b"?"])
    )
    with pytest.raises(ValueError):
        service.apply(broken)
    assert service.applied() == 0
    assert service.apply(delivery(1)) == 1
    service.close()


def test_the_manifest_describes_what_the_services_write(tmp_path: Path) -> None:
    described = Manifest.of(tmp_path, json.loads(json.dumps(manifest("broker"))))
    assert set(described.consumers) == set(KINDS)
    for name, kind in KINDS.items():
        table = described.tables[described.consumers[name]]
        assert (table.database, table.table) == (kind.database, kind.table)
