"""What the report counts, as functions DataFrame → DataFrame over topics, half messages and decisions. Only aggregates leave Spark.

Transactions are those of :func:`escrowmq.pipeline.audit.timeline.transactions`: ``stored_us, checks, state, decided_us, decided_by``.
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


def decided(transactions: DataFrame) -> DataFrame:
    """Those that are decided, with ``waited_us`` from durable half message to durable decision."""
    waited = f.greatest(f.col("decided_us") - f.col("stored_us"), f.lit(0)).alias("waited_us")
    return transactions.where(f.col("decided_us").isNotNull()).select("*", waited)


def latencies(transactions: DataFrame) -> DataFrame:
    """→ ``state, transactions, p50_us, p95_us, p99_us, most_us`` of decided ones, by outcome."""
    at = f.percentile_approx("waited_us", list(QUANTILES), 10_000)
    found = (
        decided(transactions)
        .groupBy("state")
        .agg(f.count("*").alias("transactions"), at.alias("at"), f.max("waited_us").alias("most_us"))
    )
    named = [f.col("at")[n].alias(f"p{quantile * 100:g}_us") for n, quantile in enumerate(QUANTILES)]
    return found.select("state", "transactions", *named, "most_us")


def steps(transactions: DataFrame, per_power: int) -> DataFrame:
    """→ ``state, step, transactions``: step s holds latencies from 10^(s / per_power) microseconds to the next."""
    step = f.floor(f.log10(f.greatest("waited_us", f.lit(1))) * per_power).cast("int").alias("step")
    return decided(transactions).groupBy("state", step).agg(f.count("*").alias("transactions"))


def deciders(transactions: DataFrame, start_us: int, bucket_us: int) -> DataFrame:
    """→ ``decided_by, bucket, transactions``: who decided, over time."""
    bucket = f.floor((f.col("decided_us") - start_us) / bucket_us).cast("int").alias("bucket")
    return decided(transactions).groupBy("decided_by", bucket).agg(f.count("*").alias("transactions"))


def totals(transactions: DataFrame) -> DataFrame:
    """→ one row: ``transactions, committed, rolled_back, expired, undecided, asked`` (questions), ``asked_about`` (transactions), ``first_us,
    last_us, oldest_us`` (oldest undecided; these null if there are none)."""
    state = f.col("state")
    return transactions.agg(
        f.count("*").alias("transactions"),
        *[f.count_if(state == word).alias(word) for word in ("committed", "rolled_back", "expired")],
        f.count_if(state.isNull()).alias("undecided"),
        f.coalesce(f.sum("checks"), f.lit(0)).alias("asked"),
        f.count_if(f.col("checks") > 0).alias("asked_about"),
        f.min("stored_us").alias("first_us"),
        f.max(f.greatest("stored_us", "decided_us")).alias("last_us"),
        f.min(f.when(state.isNull(), f.col("stored_us"))).alias("oldest_us"),
    )
