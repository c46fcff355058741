"""Programs of somebody who uses the format on a cluster: ``cluster_program.py MASTER ACT WORDS...``, where ACT is a
function of this file.

Prints what it found as JSON. Without an ACT it is asked by lines, many times (apart.Talk).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import revenue_job
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from apart import SETTINGS, answer
from escrowmq.errors import EscrowError
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.reconcile import reconcile
from escrowmq.pipeline.session import local_session
from escrowmq.pipeline.sql.source import read_sql
from escrowmq.pipeline.sql.tables import SqlRead
from escrowmq.spark.checkback import list_commits
from escrowmq.spark.source import register

TASKS = 4


def stream(spark: SparkSession, url: str, checkpoint: str, topic: str) -> dict[str, Any]:
    """Revenue of the orders, in small batches; started again when it fails, as a supervisor would. How many of them a
    process with a session finds in the checkpoint."""
    for left in reversed(range(revenue_job.MOST_TRIES)):
        try:
            revenue_job.stream(spark, url, checkpoint, topic, most=30)
            break
        except StreamingQueryException:  # on a busy machine Spark gives up a Python process that takes 10 s to start
            if not left:
                raise
    return {"noted": len(list_commits(checkpoint))}


def batches(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    """A named write, the same once more, and a read: of the first and of the last the later tasks wait at a gate. How
    many rows were read, and how many of them are different."""
    rows = revenue_job.rows(spark).repartition(TASKS)
    gated = spark.createDataFrame(rows.rdd.mapPartitionsWithIndex(gate(url, "write")), rows.schema)
    for one in (gated, rows):
        one.write.format("escrow").mode("append").option("topic", topic).option("write_id", topic).save(url)
    found = spark.read.format("escrow").option("topic", topic).option("maxRowsPerPartition", 50).load(url)
    keys = [row["key"] for row in found.select("key").rdd.mapPartitionsWithIndex(gate(url, "read")).collect()]
    return {"rows": len(keys), "different": len(set(keys))}


def refused(spark: SparkSession, data: str, database: str, file: str, out: str) -> dict[str, Any]:
    """What is said of a data folder, a SQLite file and a Parquet file of the driver's, and of a folder there to be
    written."""
    side = spark.range(1).select(f.col("id").cast("string"), f.current_timestamp().alias("at"))
    acts: dict[str, Callable[[], object]] = {
        "data": lambda: spark.read.format("escrow").option("topic", "orders").load(f"file:{data}").count(),
        "database": lambda: read_sql(spark, [SqlRead(f"sqlite:///{database}", "orders", ("id",))]).count(),
        "file": lambda: spark.read.parquet(f"file:{file}").collect(),
        "out": lambda: reconcile(side, side, settled_before=datetime.now(UTC), out=out),
    }
    said = {}
    for name, act in acts.items():
        try:
            with unwrap_errors():
                said[name] = f"not refused: {act()}"
        except EscrowError as problem:
            said[name] = f"{problem.code.name}: {problem.message}"
        except Exception as problem:  # which it should not be
            said[name] = f"{type(problem).__name__}: {problem}"
    return said


def gate(url: str, name: str) -> Callable[[int, Iterable[Any]], Iterator[Any]]:
    """Rows as they come. The first task tells by topic ``NAME-passed`` that it has some; the others wait for topic
    ``NAME-go``: their machines share nothing else."""

    def let_through(partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        for number, row in enumerate(rows):
            if number == 0 and partition > 0:
                wait(url, f"{name}-go")
            elif number == 0:
                with mq.connect(url) as bus:
                    bus.admin.create_topic(f"{name}-passed", may_exist=True)
            yield row

    return let_through


def wait(url: str, topic: str) -> None:
    """Until there is a topic."""
    while True:
        try:
            with mq.connect(url) as bus:
                if topic in {one["name"] for one in bus.admin.topics()}:
                    return
        except EscrowError:
            pass  # nobody leads
        time.sleep(0.05)


def main() -> None:
    """As the words say."""
    _, master, *words = sys.argv
    settings = (
        SETTINGS if words else {**SETTINGS, "spark.task.maxFailures": "1"}
    )  # who asks by lines is refused: once is enough
    with local_session("cluster program", master=master, rows=1000, settings=settings) as spark:
        register(spark)
        if not words:
            return answer(globals(), spark)
        print(json.dumps(globals()[words[0]](spark, *words[1:])), flush=True)


if __name__ == "__main__":
    main()
