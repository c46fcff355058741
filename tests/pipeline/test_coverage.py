"""What left a topic, by its retention or because it was deleted, is said by the audit and the reconciliation, and not
taken for lost without a word.
"""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app
from escrowmq.pipeline.audit import run
from escrowmq.pipeline.coverage import MOST_SHOWN, Beginning, describe_beginnings, read_coverage
from escrowmq.pipeline.reconcile import reconcile

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: six orders were announced and sent; retention has left the last one in the topic. A topic was deleted and
    made again, another is whole."""
    folder = tmp_path_factory.mktemp("cut")
    connection = sqlite3.connect(folder / "shop.db")
    connection.execute("CREATE TABLE sent (id TEXT PRIMARY KEY)")
    with mq.connect(f"file:{folder / 'broker'}", auto_create_topics=True) as bus:
        topics = ("order-keys", "orders", "again", "whole")
        for topic in topics:
            bus.admin.create_topic(topic, 1)
        for number in range(6):
            for topic in topics:
                bus.producer("shop").send(topic, b"book", key=f"o-{number}")
        connection.executemany("INSERT INTO sent VALUES (?)", [(f"o-{number}",) for number in range(6)])
        bus.producer("shop").send("order-keys", b"", key="never-sent")
        bus.admin.alter_topic("orders", retention_size=1)
        bus.admin.delete_topic("again")
        bus.admin.create_topic("again", 1)
    connection.commit()
    connection.close()
    manifest = {
        "log": "broker",
        "topics": ["orders", "whole"],
        "tables": {"sent": {"database": "shop.db", "table": "sent", "id": "id", "unique": True}},
        "comparisons": [
            {"expected": "table:sent", "found": "topic:orders", "columns": []},
            {"expected": "topic:orders", "found": "topic:whole", "columns": []},
            {"expected": "table:sent", "found": "topic:whole", "columns": []},
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_queues_that_let_go_of_something_are_named(folder: Path) -> None:
    found = read_coverage(f"file:{folder / 'broker'}", ["again", "orders", "whole", "%half"]).beginnings
    assert [(one.source, one.queue, one.first) for one in found] == [("again", 0, 7), ("orders", 0, 5)]
    assert [one.since_us is None for one in found] == [True, False], "nothing is left of what was made again"
    assert describe_beginnings(found) == "again/0 begins at 7, orders/0 begins at 5"
    many = [Beginning("t", 1, number, 3, None) for number in range(MOST_SHOWN + 2)]
    assert describe_beginnings(many).endswith(f"t/{MOST_SHOWN - 1} begins at 3 and 2 more")


def test_the_audit_says_what_may_have_left(spark: SparkSession, folder: Path) -> None:
    verdict = run(folder, spark=spark)
    text = "it may have left the log by retention or by hand: orders/0 begins at 5"
    assert {(one.kind, one.id): one.reason for one in verdict.findings} == {
        (kind, f"o-{number}"): text for number in range(5) for kind in ("lost", "leaked")
    }
    assert [(one.source, one.first) for one in verdict.beginnings] == [("orders", 5)]
    assert not verdict.agrees, "what cannot be compared does not agree"
    assert "orders/0 begins at 5" in (folder / "report.html").read_text()
    assert json.loads((folder / "verdict.json").read_text())["beginnings"][0]["first"] == 5


def test_reconcile_judges_what_both_topics_still_cover(spark: SparkSession, folder: Path) -> None:
    command = ["reconcile", "--url", f"file:{folder / 'broker'}", "--half", "order-keys", "--commits", "orders"]
    made = CliRunner().invoke(app, [*command, "--grace", "0s", "--json"], catch_exceptions=False)
    report: dict[str, Any] = json.loads(made.stdout)
    assert (report["missing"], report["uncovered"], report["unexpected"]) == (1, 5, 0)
    assert [one["id"] for one in report["named"]][:2] == ["never-sent", "o-0"]
    assert report["covered_from"] is not None
    assert "orders/0 begins at 5" in made.stderr
    assert made.exit_code == 1


def test_what_is_covered_is_judged_and_nothing_else(spark: SparkSession) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    ids = spark.createDataFrame([(f"o-{n}", n) for n in range(6)], "id string, n int")
    half = ids.select("id", (f.lit(begin) + f.make_dt_interval(f.lit(0), f.lit(0), f.col("n"))).alias("at"))
    commits = half.where("id IN ('o-0', 'o-5')")
    judged = {"settled_before": begin + timedelta(hours=1), "covered_from": begin + timedelta(minutes=3)}
    report = reconcile(half, commits, **judged)
    assert (report.missing, report.uncovered, report.ids) == (2, 2, 6)
    assert {(one.kind, one.id) for one in report.named} == {
        ("missing", "o-3"), ("missing", "o-4"), ("uncovered", "o-1"), ("uncovered", "o-2"),
    }  # fmt: skip
    assert not report.agrees
