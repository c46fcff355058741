"""What the report counts, beside :mod:`escrowmq.pipeline.timeline`: functions DataFrame → DataFrame. Only aggregates leave Spark.

Transactions are those of :func:`escrowmq.pipeline.timeline.transactions`: ``stored_us, checks, state, decided_us, decided_by``.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

SECOND = 1_000_000
QUANTILES = (0.5, 0.95, 0.99)


def by_second(messages: DataFrame) -> DataFrame:
    """Messages (``topic``, ``stored``, ``state``) → ``topic, second, messages, committed`` (those of transactions)."""
    second = f.unix_seconds("stored").alias("second")
    return messages.groupBy("topic", second).agg(f.count("*").alias("messages"), f.count("state").alias("committed"))


def topics(seconds: DataFrame) -> DataFrame:
    """→ ``topic, messages, committed, first_s, last_s``."""
    return seconds.groupBy("topic").agg(
        f.sum("messages").alias("messages"),
        f.sum("committed").alias("committed"),
        f.min("second").alias("first_s"),
        f.max("second").alias("last_s"),
    )


def volumes(seconds: DataFrame, start_s: int, bucket_s: int) -> DataFrame:
    """→ ``topic, bucket, messages``."""
    bucket = f.floor((f.col("second") - start_s) / bucket_s).cast("int").alias("bucket")
    return seconds.groupBy("topic", bucket).agg(f.sum("messages").alias("messages"))


def latencies(transactions: DataFrame) -> DataFrame:
    """→ ``state, transactions, p50_us, p95_us, p99_us, most_us``: from durable half message to durable decision, by outcome."""
    waited = f.greatest(f.col("decided_us") - f.col("stored_us"), f.lit(0))
    at = f.percentile_approx(waited, list(QUANTILES), 10_000)
    found = (
        transactions.where(f.col("decided_us").isNotNull())
        .groupBy("state")
        .agg(f.count("*").alias("transactions"), at.alias("at"), f.max(waited).alias("most_us"))
    )
    named = [f.col("at")[n].alias(f"p{quantile * 100:g}_us") for n, quantile in enumerate(QUANTILES)]
    return found.select("state", "transactions", *named, "most_us")
