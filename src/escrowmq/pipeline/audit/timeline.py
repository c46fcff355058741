"""What happened when, for the pictures: computed from the log's own times, in Spark, down to some hundred rows."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

BUCKETS = 160
"""Points in time that a picture shows."""

LATENCY_STEPS = 8
"""Histogram bars per factor of ten."""


def transactions(half: DataFrame, decisions: DataFrame) -> DataFrame:
    """Half messages and decisions → one row a transaction: ``stored_us, checks, state, decided_us, decided_by`` (the last three
    null while it is undecided)."""
    begun = half.groupBy("transaction").agg(f.min("stored_us").alias("stored_us"), f.max("checks").alias("checks"))
    ended = decisions.groupBy("transaction").agg(
        f.min_by(f.struct("state", "decided_by", "decided_us"), "decided_us").alias("end")
    )
    return begun.join(ended, "transaction", "left").select("stored_us", "checks", "end.*")


def over_time(every: DataFrame, start_us: int, bucket_us: int) -> DataFrame:
    """Transactions → ``bucket, event, number``: how many were prepared, committed, rolled back in each stretch of time."""
    moments = f.array(
        f.struct(f.col("stored_us").alias("at"), f.lit("prepared").alias("event")),
        f.struct(f.col("decided_us").alias("at"), f.col("state").alias("event")),
    )
    return (
        every.select(f.explode(moments).alias("moment"))
        .where(f.col("moment.at").isNotNull())
        .groupBy(
            ((f.col("moment.at") - start_us) / bucket_us).cast("int").alias("bucket"),
            f.col("moment.event").alias("event"),
        )
        .agg(f.count("*").alias("number"))
    )


def latencies(every: DataFrame) -> DataFrame:
    """Transactions → ``step, decided_by, number``: decisions by the time from escrow to decision.

    Step s holds latencies from 10^(s / LATENCY_STEPS) microseconds to the next.
    """
    waited = f.greatest(f.col("decided_us") - f.col("stored_us"), f.lit(1))
    return (
        every.where(f.col("decided_us").isNotNull())
        .groupBy(f.floor(f.log10(waited) * LATENCY_STEPS).cast("int").alias("step"), "decided_by")
        .agg(f.count("*").alias("number"))
    )


def totals(every: DataFrame) -> DataFrame:
    """Transactions → one row: ``transactions, committed, rolled_back, checks, first_us, last_us``."""
    return every.agg(
        f.count("*").alias("transactions"),
        f.count_if(f.col("state") == "committed").alias("committed"),
        f.count_if(f.col("state") == "rolled_back").alias("rolled_back"),
        f.coalesce(f.sum("checks"), f.lit(0)).alias("checks"),
        f.min("stored_us").alias("first_us"),
        f.max(f.greatest("decided_us", "stored_us")).alias("last_us"),
    )
