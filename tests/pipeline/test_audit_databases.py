"""An audit of tables in any database names exactly what was changed by hand, by rows and by checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from test_canonical_text import JSON, ROWS, TYPES, backend, fill, sqlite_value

import escrowmq as mq
from escrowmq.pipeline.audit import run

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]

ORDERS = 80
Named = set[tuple[str, str]]


def value(url: str, row: dict[str, Any], name: str) -> Any:
    return sqlite_value(name, row[name]) if backend(url) == "sqlite" else row[name]


def build(folder: Path, url: str) -> tuple[Path, Named]:
    """A run with one edit of each kind, and of each column: in the producer's table, the log, the consumer's table. In
    each of them, rows that are deleted, added and duplicated cancel out in counts. Returns its folder, and what an
    audit must name."""
    columns = list(TYPES[backend(url)])
    ids = iter(f"o-{n:03}" for n in range(ORDERS))
    rows = [(f"o-{n:03}", *(value(url, ROWS[0], name) for name in columns)) for n in range(ORDERS)]
    fill(url, TYPES[backend(url)], rows, key="id VARCHAR(40)")  # not unique: a row can be stored twice
    in_log = {row[0]: [JSON[0]] for row in rows}
    missing, twice = next(ids), next(ids)
    in_log |= {missing: [], twice: [JSON[0]] * 2, "added-log": [JSON[0]]}
    wanted = {("lost", missing), ("repeated", twice), ("leaked", "added-log")}
    wanted |= {("leaked", missing), ("lost", "added-log")}  # by the consumer
    for name in columns:
        changed = next(ids)
        in_log[changed] = [{**JSON[0], name: JSON[1][name]}]
        wanted.add(("altered", changed))
    wanted.add(("altered", twice))  # its two messages have two ids
    with mq.connect(f"file:{folder / 'broker'}") as bus:
        bodies = [(id, {name: body[name] for name in columns}) for id, many in in_log.items() for body in many]
        producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
        receipts = producer.prepare_batch([mq.Message("orders", json.dumps(b).encode(), key=id) for id, b in bodies])
        assert producer.end_batch(receipts.transactions, [mq.COMMIT] * len(bodies)).ok
        producer.close()
    wanted |= edit(url, columns, ids)
    (folder / "manifest.json").write_text(json.dumps(manifest(columns)))
    return folder, wanted


def edit(url: str, columns: list[str], ids: Any) -> Named:
    """Copy the table to a consumer's, and edit both."""
    wanted = set()
    engine = sa.create_engine(url)
    with engine.begin() as connection:

        def execute(statement: str, **values: Any) -> None:
            assert connection.execute(sa.text(statement), values).rowcount == 1

        if backend(url) == "mysql":
            connection.exec_driver_sql("SET time_zone = '+00:00', sql_mode = ''")
        kinds = ", ".join(f"{name} {kind}" for name, kind in TYPES[backend(url)].items())
        connection.exec_driver_sql(f"CREATE TABLE effects (id VARCHAR(40), {kinds})")
        connection.exec_driver_sql("INSERT INTO effects SELECT * FROM t")
        for table in ("t", "effects"):
            for name in columns:
                identity = next(ids)
                execute(f"UPDATE {table} SET {name} = :x WHERE id = :id", x=value(url, ROWS[1], name), id=identity)
                wanted.add(("altered", identity))
            gone, nothing = next(ids), next(ids)
            execute(f"DELETE FROM {table} WHERE id = :id", id=gone)
            execute(f"UPDATE {table} SET note = NULL WHERE id = :id", id=nothing)
            execute(f"INSERT INTO {table} (id, small) VALUES (:id, 5)", id=f"added-{table}")
            kinds_of = ("leaked", "lost") if table == "t" else ("lost", "leaked")
            again = next(ids)
            execute(f"INSERT INTO {table} SELECT * FROM {table} WHERE id = :id", id=again)
            wanted |= {("altered", nothing), (kinds_of[0], gone), (kinds_of[1], f"added-{table}"), ("repeated", again)}
    engine.dispose()
    return wanted


def manifest(columns: list[str]) -> dict[str, Any]:
    tables = {name: {"database": "${SHOP_DB}", "table": name, "id": "id", "unique": True} for name in ("t", "effects")}
    return {
        "log": "broker",
        "tables": tables,
        "topics": ["orders"],
        "comparisons": [
            {"expected": "table:t", "found": "topic:orders", "columns": columns},
            {"expected": "half:orders", "found": "topic:orders", "columns": ["message_id", "body"]},
            {"expected": "topic:orders", "found": "table:effects", "columns": columns},
            {"expected": "table:t", "found": "table:effects", "columns": columns, "judges": []},
        ],
        "consumers": {"cart": "effects"},
    }


@pytest.mark.invariant("I2", "I43")
def test_every_edit_is_named_by_rows_and_by_checksums_with_the_same_bytes(
    spark: SparkSession, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = build(tmp_path, database_url)
    monkeypatch.setenv("SHOP_DB", database_url)
    said = set()
    for windows in (16, 0):
        verdict = run(folder, page=False, windows=windows)
        assert {(finding.kind, finding.id) for finding in verdict.findings} == wanted
        rows = {number for side in verdict.comparisons for number in (side.expected_rows, side.found_rows)}
        assert rows == {ORDERS + 1}, "counts show nothing"
        said.add((folder / "verdict.json").read_bytes())
    [text] = said
    password = sa.make_url(database_url).password
    assert password is None or str(password).encode() not in text
