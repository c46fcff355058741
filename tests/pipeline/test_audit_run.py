"""The audit of a small run: whatever row is edited by hand, in any of the databases, exactly that id is named.

The run is written by hand here, log included, so that nothing but the audit is under test; tests/demo has a real one.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from escrowmq import schemas
from escrowmq.demo.databases import COMMITTED, ORDER_COLUMNS, manifest
from escrowmq.demo.orders import generate_orders
from escrowmq.demo.services import KINDS, Service
from escrowmq.demo.shop import OrderCancelled, OrdersDatabase
from escrowmq.errors import Misuse
from escrowmq.model import DecidedBy, TransactionId, TransactionState
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.manifest import Manifest
from escrowmq.pipeline.audit.page import page
from escrowmq.pipeline.audit.readings import Readings
from escrowmq.pipeline.audit.run import audit, run
from escrowmq.pipeline.audit.verdict import Verdict
from escrowmq.pipeline.audit.windows import window
from escrowmq.pipeline.transactions import ROWS, TransactionRead, join_range
from escrowmq.spark.columns import columns_of

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]

ORDERS = 40
START = 1_700_000_000_000_000


def message(order: dict[str, Any], topic: str, number: int, transaction: bytes) -> dict[str, Any]:
    columns = ORDER_COLUMNS if topic == "orders" else ("customer_id", "points")
    return {
        "topic": topic,
        "key": order["order_id"],
        "tag": None,
        "properties": [("a", "1"), ("b", "2")],
        "body": json.dumps({name: order[name] for name in columns}).encode(),
        "message_id": number.to_bytes(16, "big"),
        "queue": 0,
        "position": number,
        "born_us": START,
        "stored_us": START + number * 1000,
        "transaction": transaction,
    }


class ParquetLog:
    """A log that is not a broker's, with the same columns."""

    is_read_in_python = False

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder

    def topics(self, names: Sequence[str], columns: Collection[str]) -> DataFrame:
        return self._read([f"topics/{name}" for name in names], columns)

    def half(self, columns: Collection[str]) -> DataFrame:
        return self._read(["half"], columns)

    def transactions(self, topics: Sequence[str], hex_ids: Sequence[str], sample: int | None) -> DataFrame:
        half, op = (pq.read_table(self._folder / name).to_batches() for name in ("half", "op"))
        read = TransactionRead({}, tuple(topics), tuple(hex_ids), sample)
        table = pa.Table.from_batches(join_range(read, half, op, start=0)).combine_chunks()
        return self._spark.createDataFrame(table, ROWS)

    def _read(self, folders: list[str], columns: Collection[str]) -> DataFrame:
        return self._spark.read.parquet(*[str(self._folder / name) for name in folders]).select(*columns)


def make_run(folder: Path) -> Path:
    """A run in which all sides agree, with its log as Parquet in ``folder/log``."""
    orders = generate_orders(ORDERS, seed=3)
    pq.write_table(orders, folder / "orders.parquet")
    (folder / "manifest.json").write_text(json.dumps(manifest("broker")))
    database = OrdersDatabase(folder / "orders.db")
    half, op, topics = [], [], {"orders": [], "points": []}
    for number, order in enumerate(orders.to_pylist()):
        transaction = TransactionId(0xABC, 16 + number % 2, 2 * number)
        try:
            database.place(order, str(transaction))
            state = TransactionState.COMMITTED
        except OrderCancelled:
            state = TransactionState.ROLLED_BACK
        rows = [message(order, topic, 2 * number + n, bytes(transaction)) for n, topic in enumerate(topics)]
        half += [{**row, "due_us": 0, "state": int(state), "checks": int(number == 1)} for row in rows]
        op.append(
            {
                "position": 1000 + number,
                "half_position": 2 * number,
                "transaction": bytes(transaction),
                "state": int(state),
                "decided_by": int(DecidedBy.CHECK if number == 1 else DecidedBy.PRODUCER),
                "decided_us": START + number * 1000 + 500,
            }
        )
        if state is TransactionState.COMMITTED:
            for row in rows:
                topics[row["topic"]].append({**row, "offset": number, "lease": -1, "attempt": 0})
    database.close()
    write(folder / "log" / "half", half, schemas.HALF_VIEW, "%half")
    write(folder / "log" / "op", op, schemas.OP_VIEW, "%op")
    for topic, kind in (("orders", "cart"), ("points", "points")):
        write(folder / "log" / "topics" / topic, topics[topic], schemas.DELIVERY)
        service = Service(KINDS[kind], folder)
        batch = pa.RecordBatch.from_pylist(topics[topic], schema=schemas.DELIVERY)
        assert service.apply(batch) == batch.num_rows
        assert service.apply(batch) == 0  # once more: no second effect
        service.close()
    return folder


def write(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema, source: str = "topic") -> None:
    """Rows of the wire as format "escrow" would give them."""
    folder.mkdir(parents=True)
    chosen = [column for column in columns_of(source) if column.name != "shard"]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema.append(pa.field("damaged", pa.utf8())))
    arrays = {column.name: column.make(batch, 0) for column in chosen}
    pq.write_table(pa.Table.from_pydict(arrays), folder / "part-0.parquet")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "run"))


def judge(spark: SparkSession, folder: Path, windows: int = 0) -> Verdict:
    found = Manifest.read(folder)
    return audit(found, Readings(spark, found, ParquetLog(spark, folder / "log")), Events(), windows=windows)[0]


def named(verdict: Verdict) -> set[tuple[str, str]]:
    return {(finding.kind, finding.id) for finding in verdict.findings}


def edit(folder: Path, database: str, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(folder / database)
    assert connection.execute(statement, values).rowcount == 1
    connection.commit()
    connection.close()


def test_a_clean_run_agrees(spark: SparkSession, clean: Path) -> None:
    found = Manifest.read(clean)
    verdict, pictures = audit(found, Readings(spark, found, ParquetLog(spark, clean / "log")), Events(), windows=0)
    kept = sum(not order["cancelled"] for order in generate_orders(ORDERS, seed=3).to_pylist())
    assert verdict.findings == ()
    assert (verdict.ids, verdict.transactions) == (ORDERS, ORDERS)
    assert (verdict.committed, verdict.rolled_back, verdict.consumed) == (kept, ORDERS - kept, kept)
    assert verdict.checks == 1
    assert verdict.consumers == {"cart": kept, "points": kept}
    assert (verdict.agrees, verdict.settled) == (True, True)
    assert {side.ids for side in verdict.comparisons} == {kept}
    assert sum(pictures.over_time["prepared"]) == ORDERS
    assert sum(pictures.over_time["committed"]) == kept
    assert pictures.latencies.keys() == {"producer", "check"}


TABLES = [
    ("orders.db", "orders", "amount_cents"),
    ("cart.db", "cleared_carts", "amount_cents"),
    ("points.db", "points_earned", "points"),
]
ID = "700005"


def kept_ids() -> list[str]:
    return [o["order_id"] for o in generate_orders(ORDERS, seed=3).to_pylist() if not o["cancelled"]]


ODD_EDITS = [
    ("cart.db", "UPDATE cleared_carts SET order_id = 'other' WHERE order_id = ?", {"lost"}),
    ("cart.db", "UPDATE cleared_carts SET customer_id = NULL WHERE order_id = ?", {"altered"}),
    ("cart.db", "DELETE FROM trans_recv_log WHERE order_id = ?", {"lost"}),
    ("cart.db", "UPDATE trans_recv_log SET consumer_group = 'x' WHERE order_id = ?", {"lost"}),
    ("points.db", "UPDATE trans_recv_log SET message_id = 'ff' WHERE order_id = ?", {"altered"}),
    ("points.db", "INSERT INTO trans_recv_log VALUES ('points', 'f0', ?)", {"repeated", "altered"}),
    ("orders.db", "DELETE FROM trans_barrier WHERE order_id = ?", {"leaked"}),
    ("orders.db", "UPDATE trans_barrier SET outcome = 'x' WHERE order_id = ?", {"leaked"}),
    ("orders.db", "UPDATE trans_barrier SET transaction_id = 'x' WHERE order_id = ?", {"altered"}),
]


@pytest.mark.invariant("I2", "I43")
def test_every_edit_by_hand_names_exactly_its_id(spark: SparkSession, folder: Path) -> None:
    """Each edit is of an order of its own, which is named as what it is, and nothing else: four in each of the three
    databases; one in each column (a letter more in a text, a text in a number); and odd ones, of ids and marks. One
    audit sees them all: each costs eight seconds."""
    ids = iter(kept_ids())
    wanted = set()
    for database, table, amount in TABLES:
        gone, twice, changed, added = next(ids), next(ids), next(ids), f"by-hand-in-{database}"
        edit(folder, database, f"DELETE FROM {table} WHERE order_id = ?", gone)
        edit(folder, database, f"INSERT INTO {table} SELECT * FROM {table} WHERE order_id = ?", twice)
        edit(folder, database, f"UPDATE {table} SET {amount} = {amount} + 1 WHERE order_id = ?", changed)
        edit(folder, database, f"INSERT INTO {table} (order_id, {amount}) VALUES (?, 5)", added)
        wanted |= {("lost", gone), ("repeated", twice), ("altered", changed), ("leaked", added)}
    columns = edited_columns(folder, ids)
    assert len(columns) == 8 + 4 + 3
    wanted |= {("altered", identity) for identity in columns}
    wanted |= {("leaked", "other"), ("leaked", "new"), ("lost", "late")}
    for database, statement, kinds in ODD_EDITS:
        identity = next(ids)
        edit(folder, database, statement, identity)
        wanted |= {(kind, identity) for kind in kinds}
    edit(folder, "cart.db", "INSERT INTO trans_recv_log VALUES ('cart', 'ff', 'new')")
    edit(folder, "orders.db", "INSERT INTO trans_barrier VALUES ('0-0-0', 'late', ?)", COMMITTED)
    verdict = judge(spark, folder)
    assert named(verdict) == wanted
    told = Counter(kind for kind, _ in wanted)
    assert (verdict.lost, verdict.repeated, verdict.altered, verdict.leaked) == (
        told["lost"],
        told["repeated"],
        told["altered"],
        told["leaked"],
    )
    assert not verdict.agrees
    assert judge(spark, folder, windows=16) == verdict  # most are proven equal, the rest is compared: the same is said


def edited_columns(folder: Path, ids: Iterator[str]) -> set[str]:
    """One column of one order each."""
    changed = set()
    for database, table, _ in TABLES:
        with closing(sqlite3.connect(folder / database)) as connection:
            columns = [row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]
        for column in columns:
            if column != "order_id":
                changed.add(identity := next(ids))
                edit(folder, database, f"UPDATE {table} SET {column} = {column} || 'x' WHERE order_id = ?", identity)
    return changed


@pytest.mark.invariant("I43")
def test_the_four_in_one_window_whose_counts_agree(spark: SparkSession, folder: Path) -> None:
    """A message that was lost is missing from both consumers; the cart repeats another instead, and the points have one
    of nobody. So rows agree in every comparison, and the same is said again, byte for byte."""
    count = 8
    made = spark.createDataFrame([(f"by-hand-{n}",) for n in range(100)], "id string")
    orders = spark.createDataFrame([(one,) for one in kept_ids()], "id string")
    place = window(f.col("id"), count)
    [fullest] = orders.groupBy(place.alias("window")).count().orderBy(f.desc("count"), "window").limit(1).collect()
    lost, twice, altered = [row["id"] for row in orders.where(place == fullest["window"]).limit(3).collect()]
    [leaked] = [row["id"] for row in made.where(place == fullest["window"]).limit(1).collect()]
    for database, table in (("cart.db", "cleared_carts"), ("points.db", "points_earned")):
        edit(folder, database, f"DELETE FROM {table} WHERE order_id = ?", lost)
    edit(folder, "cart.db", "INSERT INTO cleared_carts SELECT * FROM cleared_carts WHERE order_id = ?", twice)
    edit(folder, "cart.db", "UPDATE cleared_carts SET units = units + 1 WHERE order_id = ?", altered)
    edit(folder, "points.db", "INSERT INTO points_earned (order_id, points) VALUES (?, 5)", leaked)
    found = Manifest.read(folder)
    told = set()
    for _ in range(2):
        readings = Readings(spark, found, ParquetLog(spark, folder / "log"))
        verdict, pictures = audit(found, readings, Events(), windows=count)
        told.add((json.dumps(verdict.to_json()), page(verdict, pictures, Events())))
    assert len(told) == 1
    assert named(verdict) == {("lost", lost), ("repeated", twice), ("altered", altered), ("leaked", leaked)}
    assert (verdict.lost, verdict.repeated, verdict.altered, verdict.leaked, verdict.findings_in_all) == (1, 1, 1, 1, 5)
    assert all(side.expected_rows == side.found_rows for side in verdict.comparisons)


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the rows of a Parquet file of the log."""
    file = path / "part-0.parquet"
    table = pq.read_table(file)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), file)


@pytest.mark.invariant("I3")
def test_what_a_broken_broker_would_do_is_named(spark: SparkSession, folder: Path) -> None:
    """A committed message that never came out, one that came out twice, one with another body, one of a rollback, and a
    transaction that nobody decided."""
    cancelled = next(o["order_id"] for o in generate_orders(ORDERS, seed=3).to_pylist() if o["cancelled"])

    def topic(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [row for row in rows if row["key"] != "700001"]
        twice = [row for row in rows if row["key"] == "700003"]
        other = [{**row, "body": b"{}"} if row["key"] == ID else row for row in kept]
        return [*other, *twice, {**rows[0], "key": cancelled, "message_id": bytes(16)}]

    def half(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*rows, {**rows[0], "key": "never", "transaction_id": b"x" * 16, "state": "open"}]

    rewrite(folder / "log" / "topics" / "orders", topic)
    rewrite(folder / "log" / "half", half)
    verdict = judge(spark, folder)
    assert named(verdict) >= {
        ("lost", "700001"),
        ("repeated", "700003"),
        ("altered", ID),
        ("leaked", cancelled),
        ("orphaned", "never"),
    }
    assert {identity for _, identity in named(verdict)} == {"700001", "700003", ID, cancelled, "never"}
    assert (verdict.orphaned, verdict.settled) == (1, False)


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"not a run folder.*escrowmq audit --init"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(Misuse, match="cannot be used"):
        Manifest.read(tmp_path)
    raw = manifest("broker")
    raw["comparisons"][0]["found"] = "table:nothing"
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(Misuse, match="'table:nothing', which is not described"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda raw: raw.pop("log"), "it has no field 'log'"),
        (lambda raw: raw["tables"]["orders"].pop("id"), "table 'orders' has no field 'id'"),
        (lambda raw: raw["tables"]["orders"].update(idd="x"), "table 'orders' has a field 'idd', which is not one of"),
        (lambda raw: raw["comparisons"][0].pop("expected"), "comparison 1 has no field 'expected'"),
    ],
)
def test_a_manifest_says_at_once_what_is_wrong_with_it(tmp_path: Path, change: Any, told: str) -> None:
    """Before Spark starts, and not as a bare KeyError."""
    raw = json.loads(json.dumps(manifest("broker")))
    change(raw)
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(Misuse, match=told):
        run(tmp_path)


@pytest.mark.verify
def test_titles_and_totals_are_those_of_the_manifest(spark: SparkSession, tmp_path: Path) -> None:
    """A broker also has other topics, which other programs use."""
    with mq.connect(f"file:{tmp_path / 'broker'}") as bus:
        producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
        for topic, count in (("orders", 3), ("returns", 7)):
            messages = [mq.Message(topic, b'{"units": 5}', key=f"o-{n}") for n in range(count)]
            made = producer.prepare_batch(messages)
            outcomes = [mq.COMMIT, *[mq.ROLLBACK] * (count - 1)]
            assert producer.end_batch(made.transactions, outcomes).ok
        producer.prepare("returns", b"{}", key="open")
        producer.close()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.executescript("CREATE TABLE t (id TEXT PRIMARY KEY, units INT); INSERT INTO t VALUES ('o-0', 5)")
    table = {"database": "shop.db", "table": "t", "id": "id"}
    compared = {"expected": "topic:orders", "found": "table:t", "columns": ["units"]}
    raw = {"title": "Orders of May", "log": "broker", "topics": ["orders"], "tables": {"t": table}}
    (tmp_path / "manifest.json").write_text(json.dumps({**raw, "comparisons": [compared]}))
    verdict = run(tmp_path)
    assert (verdict.ids, verdict.transactions, verdict.committed, verdict.rolled_back) == (3, 3, 1, 2)
    assert verdict.settled
    assert "Orders of May" in (tmp_path / "report.html").read_text()
