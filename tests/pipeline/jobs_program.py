"""The jobs as somebody uses them on a cluster: ``jobs_program.py MASTER``, which is asked by lines (apart.Talk) and has
one session for all.
"""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from sweeps_world import BOOKS, NOW
from typer.testing import CliRunner

from apart import SETTINGS, answer
from escrowmq.cli.main import app
from escrowmq.pipeline.audit import compare
from escrowmq.pipeline.reconcile import read_side, reconcile
from escrowmq.pipeline.session import local_session
from escrowmq.pipeline.sql.source import read_sql
from escrowmq.pipeline.sql.tables import SqlRead
from escrowmq.pipeline.sweeps import Databases, sweep_freezes, sweep_orders
from escrowmq.spark.source import register

ORDERS = ("order_id", "cents", "placed")


def command(spark: SparkSession, *words: str) -> dict[str, Any]:
    """A command of escrowmq on this session's cluster: its exit code, what it printed, what it said beside."""
    ran = CliRunner().invoke(app, [*words, "--master", str(spark.sparkContext.master)])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return {"code": ran.exit_code, "printed": ran.stdout, "said": ran.stderr}


def watched(spark: SparkSession, *words: str) -> dict[str, Any]:
    """The same; and as soon as tasks of it run on the workers, other than those that look at the head of a file, a line
    that says so."""
    over = threading.Event()
    told = sys.stdout

    def look() -> None:
        tracker = spark.sparkContext.statusTracker()
        while not over.wait(0.01):
            for number in tracker.getActiveStageIds():
                stage = tracker.getStageInfo(number)
                if stage is not None and stage.numActiveTasks and not stage.name.startswith("parquet"):
                    print(json.dumps(stage.name), file=told, flush=True)
                    return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        return command(spark, *words)
    finally:
        over.set()
        thread.join()


def placed(spark: SparkSession, path: str, prefix: str, count: str) -> int:
    """Write orders PREFIX0, PREFIX1, ... with their numbers as cents into a file system that all see. How many."""
    number = f.col("id")
    rows = spark.range(int(count)).select(f.concat(f.lit(prefix), number).alias("order_id"), number.alias("cents"))
    rows.write.parquet(path)
    return spark.read.parquet(path).count()


def found(spark: SparkSession, path: str) -> list[list[str]]:
    """Kinds and ids of the findings that were written."""
    return sorted([row["kind"], row["id"]] for row in spark.read.parquet(path).collect())


def compared(spark: SparkSession, database: str, url: str, topic: str) -> list[list[str]]:
    """A table of a database server against a topic, by id and content: kinds and ids of the findings."""
    register(spark)
    orders = read_sql(spark, [SqlRead(database, "orders", ORDERS)])
    messages = spark.read.format("escrow").option("topic", topic).load(url)
    cents = f.get_json_object(f.col("body").cast("string"), "$.cents").cast("bigint")
    delivered = messages.select(f.col("key").alias("order_id"), cents.alias("cents"))
    result = compare(orders, delivered, id="order_id", columns=["cents"], unique="expected")
    try:
        return sorted([row["kind"], row["id"]] for row in result.findings.collect())
    finally:
        result.close()


def reconciled(spark: SparkSession, database: str, url: str, topic: str, out: str) -> dict[str, Any]:
    """The same by id alone, with all findings written into ``out``."""
    rows = read_sql(spark, [SqlRead(database, "orders", ORDERS)])
    half = rows.select(f.col("order_id").alias("id"), f.col("placed").alias("at"))
    after = datetime(2100, 1, 1, tzinfo=UTC)
    report = reconcile(half, read_side(spark, url, topic), settled_before=after, out=out)
    return report.to_json()


def swept(spark: SparkSession, products: str, *orders: str) -> list[dict[str, Any]]:
    """Both sweeps at the time of the shop of sweeps_world.py."""
    databases = Databases(orders, products)
    return [sweep(spark, databases, books=BOOKS, now_us=NOW).to_json() for sweep in (sweep_orders, sweep_freezes)]


def main() -> None:
    """Answer."""
    acts = (command, watched, placed, found, compared, reconciled, swept)
    with local_session("jobs program", master=sys.argv[1], rows=1000, settings=SETTINGS) as spark:
        answer({act.__name__: act for act in acts}, spark)


if __name__ == "__main__":
    main()
