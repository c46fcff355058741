"""A data folder that a broker has, read by Spark and the jobs: what may be missing is said."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from killing import Broker
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq.cli.main import app
from escrowmq.errors import Code
from escrowmq.pipeline.audit import run
from escrowmq.pipeline.report import report, write_report
from escrowmq.spark import brokers
from escrowmq.spark.options import read_options
from escrowmq.spark.planning import OffsetRange
from escrowmq.spark.source import register

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ORDERS = 5


def send(bus: mq.Bus) -> None:
    """ORDERS orders, one a round; the last one is the last thing that the log has."""
    for number in range(ORDERS):
        bus.producer("shop").send("orders", b"book", key=f"o-{number}", queue=0)


@pytest.fixture(params=["served", "embedded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A run folder whose broker runs: one that can be asked, and one within this program, which cannot."""
    with ExitStack() as stack:
        if request.param == "served":
            broker = Broker(tmp_path / "broker")
            stack.callback(broker.kill)
            bus = stack.enter_context(mq.connect(broker.url))
        else:
            bus = stack.enter_context(mq.connect(f"file:{tmp_path / 'broker'}"))
        for topic in ("order-keys", "orders"):
            bus.admin.create_topic(topic, 1)
        for number in range(ORDERS):
            bus.producer("shop").send("order-keys", b"", key=f"o-{number}")
        send(bus)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            connection.execute("CREATE TABLE sent (id TEXT PRIMARY KEY)")
            connection.executemany("INSERT INTO sent VALUES (?)", [(f"o-{number}",) for number in range(ORDERS)])
        manifest = {
            "log": "broker",
            "topics": ["orders"],
            "tables": {"sent": {"database": "shop.db", "table": "sent", "id": "id", "unique": True}},
            "comparisons": [{"expected": "table:sent", "found": "topic:orders", "columns": []}],
        }
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        yield tmp_path


@pytest.fixture
def is_served(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["folder"] == "served")


def test_a_batch_has_the_last_message_or_can_refuse(spark: SparkSession, folder: Path, is_served: bool) -> None:
    register(spark)
    reader = spark.read.format("escrow").option("topic", "orders")
    url = f"file:{folder / 'broker'}"
    strict = reader.option("incomplete", "refuse").load(url)
    if is_served:
        assert strict.count() == ORDERS
    else:
        with pytest.raises(Exception, match=r"FOLDER_IN_USE.*what it acknowledged last may be missing"):
            strict.count()
    lax = reader.option("incomplete", "warn").load(url)
    assert lax.count() == ORDERS if is_served else ORDERS - 1


def test_a_topic_of_the_last_round_is_there(spark: SparkSession, tmp_path: Path) -> None:
    register(spark)
    broker = Broker(tmp_path / "data")
    seen: list[int] = []
    try:
        with mq.connect(broker.url) as bus:
            bus.producer("p").send("new", b"")
            url = f"file:{broker.folder}"
            assert spark.read.format("escrow").option("topic", "new").load(url).count() == 1
            writer = spark.readStream.format("escrow").option("topic", "new").load(url).writeStream
            writer = writer.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True)
            writer.foreachBatch(lambda frame, _: seen.append(frame.count())).start().awaitTermination()
    finally:
        broker.kill()
    assert seen == [1]


@pytest.mark.invariant("I41")
def test_a_worker_never_gives_fewer_rows_than_were_planned(folder: Path, is_served: bool) -> None:
    """What the planner saw in a folder, a worker may not see yet, when it cannot ask: it must not pass that over."""
    options = read_options({"url": f"file:{folder / 'broker'}", "topic": "orders"})
    links = brokers.open_links(options.url)
    [there] = brokers.topic_partitions(links, options)
    links[0].close()
    planned = OffsetRange(there, there.head, ORDERS + (1 if is_served else 0))
    with pytest.raises(mq.Unknown, match="the folder ends before that") as told:
        list(brokers.read(planned, ["key"], {}, 0.1))
    assert told.value.code is Code.TIMED_OUT
    assert ("what it acknowledged last may be missing" in told.value.message) is not is_served
    assert (
        sum(batch.num_rows for batch in brokers.read(OffsetRange(there, 0, there.end), ["key"], {}, 60.0)) == there.end
    )


@pytest.mark.invariant("I41")
def test_the_audit_says_what_may_be_missing(spark: SparkSession, folder: Path, is_served: bool) -> None:
    verdict = run(folder, spark=spark)
    written, page = json.loads((folder / "verdict.json").read_text()), (folder / "report.html").read_text()
    printed = CliRunner().invoke(app, ["audit", str(folder)], catch_exceptions=False)
    assert written["incomplete"] == verdict.incomplete
    if is_served:
        assert (verdict.incomplete, verdict.agrees, printed.exit_code) == ("", True, 0)
        assert "may be incomplete" not in page + printed.stdout
        return
    assert verdict.incomplete.endswith("what it acknowledged last may be missing")
    assert "The log may be incomplete" in page
    assert "the log may be incomplete" in printed.stdout
    assert [(one.kind, one.id, one.reason) for one in verdict.findings] == [
        ("lost", f"o-{ORDERS - 1}", "it may be among what was acknowledged last")
    ]


def test_the_report_says_what_may_be_missing(spark: SparkSession, folder: Path, is_served: bool) -> None:
    url, out = f"file:{folder / 'broker'}", folder / "pages"
    found = report(url, spark=spark)
    write_report(out, found)
    printed = CliRunner().invoke(app, ["report", "--url", url, "--out", str(out)], catch_exceptions=False)
    page, written = (out / "report.html").read_text(), json.loads((out / "report.json").read_text())
    assert {topic["topic"]: topic["messages"] for topic in found.topics} == {
        "order-keys": ORDERS,
        "orders": ORDERS if is_served else ORDERS - 1,
    }
    assert written["incomplete"] == found.incomplete
    for text, words in ((page, "It may be incomplete"), (printed.stderr, "the report may be incomplete")):
        assert (words in text) is not is_served
    assert found.incomplete.endswith("" if is_served else "what it acknowledged last may be missing")
    assert bool(found.incomplete) is not is_served


def test_reconcile_says_what_may_be_missing(spark: SparkSession, folder: Path, is_served: bool) -> None:
    url = f"file:{folder / 'broker'}"
    command = [
        "reconcile",
        "--url",
        url,
        "--half",
        "order-keys",
        "--commits",
        "orders",
        "--settled-before",
        "2100-01-01",
    ]
    made = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    told: dict[str, Any] = json.loads(made.stdout)
    assert told["missing"] == (0 if is_served else 1)
    assert (told["incomplete"] == "") is is_served
    assert ("the log may be incomplete" in made.stderr) is not is_served
