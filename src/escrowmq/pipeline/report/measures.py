"""The report's aggregates besides :mod:`escrowmq.pipeline.timeline`, as functions DataFrame → DataFrame, and the
numbers that leave Spark.

Transactions are those of :func:`escrowmq.pipeline.timeline.unpack`: ``stored_us, checks, state, decided_us,
decided_by``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

SECOND = 1_000_000
QUANTILES = (0.5, 0.95, 0.99)
BUCKETS = 80
"""Maximum number of bars in a chart over time."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The numbers of a report. Times: microseconds since 1970, of the brokers' clocks; null where none."""

    url: str
    as_of_us: int
    """The time from which ages are counted: now, or for a folder the newest time in its log."""
    start_us: int
    bucket_us: int
    """Series have up to BUCKETS values, one per ``bucket_us`` from ``start_us`` on."""
    totals: dict[str, int | None]
    """transactions, committed, rolled_back, expired, undecided, asked, asked_about, first_us, last_us, oldest_us; see
    timeline.count_totals"""
    topics: Rows
    """name, messages, committed, first_s, last_s; by volume"""
    volumes: dict[str, list[int]]
    """messages by topic"""
    begun: list[int]
    ended: dict[str, list[int]]
    """transactions by who decided them: producer, check, operator, exhausted, retention"""
    latencies: Rows
    """state, transactions, p50_us, p95_us, p99_us, most_us"""
    latency_steps: dict[str, dict[int, int]]
    """transactions by outcome and step: LATENCY_STEPS for each factor of ten above a microsecond"""
    producers: Rows = field(default_factory=list)
    """group, transactional, open, parked, oldest_us, broker"""
    consumers: Rows = field(default_factory=list)
    """group, topics, waiting, leased, retrying, dead, lag (all not yet acknowledged), broker"""
    incomplete: str = ""
    """What a folder may lack, and why; empty: nothing."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def count_by_second(messages: DataFrame) -> DataFrame:
    """Convert messages (``topic``, ``stored``, ``state``) → ``topic, second, messages, committed`` (messages of
    transactions)."""
    second = f.unix_seconds("stored").alias("second")
    return messages.groupBy("topic", second).agg(f.count("*").alias("messages"), f.count("state").alias("committed"))


def summarize_topics(seconds: DataFrame) -> DataFrame:
    """Convert counts by second → ``topic, messages, committed, first_s, last_s``."""
    sums = [f.sum(name).alias(name) for name in ("messages", "committed")]
    return seconds.groupBy("topic").agg(*sums, f.min("second").alias("first_s"), f.max("second").alias("last_s"))


def count_volumes(seconds: DataFrame, start_s: int, bucket_s: int) -> DataFrame:
    """Convert counts by second → ``topic, bucket, messages``; a bucket is ``bucket_s`` seconds, numbered from
    ``start_s`` on."""
    bucket = f.floor((f.col("second") - start_s) / bucket_s).cast("int").alias("bucket")
    return seconds.groupBy("topic", bucket).agg(f.sum("messages").alias("messages"))


def measure_latencies(transactions: DataFrame) -> DataFrame:
    """Convert transactions → ``state, transactions, p50_us, p95_us, p99_us, most_us``: from durable half message to
    durable decision, by outcome."""
    waited = f.greatest(f.col("decided_us") - f.col("stored_us"), f.lit(0))
    at = f.percentile_approx(waited, list(QUANTILES), 10_000)
    decided = transactions.where(f.col("decided_us").isNotNull()).groupBy("state")
    found = decided.agg(f.count("*").alias("transactions"), at.alias("at"), f.max(waited).alias("most_us"))
    named = [f.col("at")[n].alias(f"p{quantile * 100:g}_us") for n, quantile in enumerate(QUANTILES)]
    return found.select("state", "transactions", *named, "most_us")
