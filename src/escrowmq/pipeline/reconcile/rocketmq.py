"""Reads a copy of a RocketMQ topic (:mod:`escrowmq.gateway.rocketmq.copying`) as one side of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as f

from escrowmq.pipeline.coverage import Beginning, Coverage, read_coverage
from escrowmq.pipeline.reconcile.reading import read_side

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from escrowmq.pipeline.reconcile.reading import Side


SCHEMA = (
    "key string, message_id string, stored timestamp, digest string, "
    "broker string, queue int, offset bigint, attempt int"
)


def read_both(spark: SparkSession, folder: Path, url: str, theirs: str, ours: str) -> tuple[list[Side], Coverage]:
    """Return two sides, the copy in ``folder`` of RocketMQ's topic ``theirs`` and the topic ``ours`` of the broker at
    ``url``, and the limits of both."""
    copied, limits = read_copy(spark, folder, theirs)
    seen = read_coverage(url, [ours])
    whole = not seen.incomplete
    here = read_side(spark, url, ours, content=True, digest=lambda column: f.sha2(column, 256), whole=whole)
    incomplete = "; ".join(text for text in (limits.incomplete, seen.incomplete) if text)
    return [copied, here], Coverage(limits.beginnings + seen.beginnings, incomplete)


def read_copy(spark: SparkSession, folder: Path, topic: str) -> tuple[Side, Coverage]:
    """Return the messages of a copy as a side with ``digest``, and its limits: queues that do not begin at 0, because
    RocketMQ has removed their first messages or the group began later, and messages that are missing between others. A
    message that was delivered again is one row."""
    first = f.min("attempt").over(Window.partitionBy("message_id"))
    files = sorted(map(str, folder.glob("*.parquet")))
    rows = spark.read.schema(SCHEMA).parquet(*files) if files else spark.createDataFrame([], SCHEMA)
    kept = rows.withColumn("first", first).where(f.col("attempt") == f.col("first"))
    return kept.select(f.col("key").alias("id"), f.col("stored").alias("at"), "digest"), _cover(kept, topic)


def _cover(rows: DataFrame, topic: str) -> Coverage:
    # A message that was delivered again comes from a queue of its own for that: it has no place among the offsets.
    queues = rows.where("attempt <= 1").groupBy("broker", "queue")
    found = queues.agg(
        f.min("offset").alias("first"),
        (f.max("offset") - f.min("offset") + 1 - f.count_distinct("offset")).alias("holes"),
        f.unix_micros(f.min("stored")).alias("since_us"),
    ).collect()
    begins = [
        Beginning(f"RocketMQ {topic} at {row['broker']}", 0, row["queue"], row["first"], row["since_us"])
        for row in found
        if row["first"] > 0
    ]
    lacking = sum(row["holes"] for row in found) - rows.where("attempt > 1").count()
    text = f"{lacking:,} messages between others of RocketMQ's queues were not delivered" if lacking > 0 else ""
    return Coverage(tuple(begins), text)
