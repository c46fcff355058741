"""The audit by spark-submit on a standalone cluster: what is wrong is named, and again the same report."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyspark
import pytest

import escrowmq as mq
from escrowmq.pipeline.audit import submit
from escrowmq.pipeline.java import find_java, write_launcher
from escrowmq.testing.servers.seam import Absent
from escrowmq.testing.servers.spark import cluster

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


def make(folder: Path) -> Path:
    """Orders in a database and as messages; one of each kind is wrong."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "orders.db")) as database:
        database.execute("CREATE TABLE orders (order_id TEXT PRIMARY KEY, cents INTEGER)")
        database.executemany("INSERT INTO orders VALUES (?, ?)", [(f"o-{n}", n) for n in range(200)])
        database.commit()
    sent = [(f"o-{n}", n) for n in range(200) if n != 17] + [("o-5", 5), ("o-none", 0)]
    rows = [mq.Message("orders", json.dumps({"cents": -1 if key == "o-4" else n}).encode(), key=key) for key, n in sent]
    with mq.connect(f"file:{folder / 'broker'}") as bus:
        assert bus.producer("shop").send_batch(rows).ok
    manifest = {
        "log": "broker",
        "tables": {"orders": {"database": "orders.db", "table": "orders", "id": "order_id", "unique": True}},
        "topics": ["orders"],
        "comparisons": [{"expected": "table:orders", "found": "topic:orders", "columns": ["cents"]}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_submitted_to_a_cluster(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    (tmp_path / "cluster").mkdir()
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["JAVA_HOME"] = str(write_launcher(find_java(), tmp_path / "java"))
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    try:
        with cluster(tmp_path / "cluster") as running:
            command = [
                str(program),
                "--master",
                running.url,
                "--executor-memory",
                "512m",
                str(submit.__file__),
                str(folder),
            ]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    except Absent as problem:
        pytest.skip(str(problem))
    assert ran.returncode == 1, ran.stderr[-3000:]
    verdict = json.loads((folder / "verdict.json").read_text())
    assert {(one["kind"], one["id"]) for one in verdict["findings"]} == {
        ("lost", "o-17"),
        ("repeated", "o-5"),
        ("altered", "o-4"),
        ("leaked", "o-none"),
    }
    assert '"verdict": "disagree"' in ran.stdout
