"""What happened when, for the pictures: computed from the log's own times, in Spark, down to some hundred rows."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.model import DecidedBy, TransactionState

BUCKETS = 160
"""Points in time that a picture shows."""

LATENCY_STEPS = 8
"""Histogram bars per factor of ten."""


_STATES = [state.name.lower() for state in TransactionState]
_DECIDERS = [by.name.lower() for by in DecidedBy]
_CODES = 8
"""At least as many as there are states, or deciders."""


def transactions(half: DataFrame, decisions: DataFrame) -> DataFrame:
    """Half messages and decisions → one row a transaction: ``stored_us, checks, state, decided_us, decided_by`` (the last three
    null while it is undecided)."""
    return spelled(packed(half, decisions))


def packed(half: DataFrame, decisions: DataFrame) -> DataFrame:
    """Half messages and decisions → one row a transaction, to be kept: three numbers, which :func:`spelled` makes words of.

    Both become one frame of numbers, which Spark shuffles once and groups without sorting. A decision is one of them, its time
    and two codes: the least is the earliest.
    """
    nothing = f.lit(None).cast("bigint")
    begun = half.select("transaction", "stored_us", "checks", nothing.alias("end"))
    end = (f.col("decided_us") * _CODES + _code("state", _STATES)) * _CODES + _code("decided_by", _DECIDERS)
    ended = decisions.select("transaction", nothing.alias("stored_us"), nothing.alias("checks"), end.alias("end"))
    every = begun.unionByName(ended).groupBy("transaction")
    least = every.agg(f.min("stored_us").alias("stored_us"), f.max("checks").alias("checks"), f.min("end").alias("end"))
    return least.where(f.col("stored_us").isNotNull()).select("stored_us", "checks", "end")


def spelled(packed: DataFrame) -> DataFrame:
    """Transactions in words: see :func:`transactions`."""
    codes = f.shiftright("end", 3)
    return packed.select(
        "stored_us",
        "checks",
        _word(codes % _CODES, _STATES).alias("state"),
        f.shiftright("end", 6).alias("decided_us"),
        _word(f.col("end") % _CODES, _DECIDERS).alias("decided_by"),
    )


def _code(name: str, words: list[str]) -> Column:
    return (f.array_position(f.lit(words), f.col(name)) - 1).cast("bigint")


def _word(code: Column, words: list[str]) -> Column:
    return f.get(f.lit(words), code.cast("int"))


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
