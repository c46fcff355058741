"""Transactions over time: one row per transaction, and aggregated counts for the report's charts.

Computed in Spark from the log's own times.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.model import DecidedBy, TransactionState
from escrowmq.pipeline.log import BrokerLog

LATENCY_STEPS = 8
"""Bars of a latency histogram per factor of ten."""

HALF_COLUMNS = ("transaction_id", "checks", "stored")
"""Columns of half messages that :func:`select_half` needs."""

_STATES = [state.name.lower() for state in TransactionState]
_DECIDERS = [by.name.lower() for by in DecidedBy]
_CODES = 8
"""At least the number of states, and of deciders."""


def select_half(half: DataFrame, *more: Column) -> DataFrame:
    """Convert half messages of :meth:`BrokerLog.half` → ``transaction, checks, stored_us`` and the columns ``more``."""
    checks, stored = f.col("checks").cast("long").alias("checks"), f.unix_micros("stored").alias("stored_us")
    return half.select(f.col("transaction_id").alias("transaction"), checks, stored, *more)


def read_decisions(log: BrokerLog) -> DataFrame:
    """Read all decisions of a log → ``transaction, state, decided_by, decided_us``."""
    frame = log.decisions(["transaction_id", "state", "decided_by", "decided"])
    decided = f.unix_micros("decided").alias("decided_us")
    return frame.select(f.col("transaction_id").alias("transaction"), "state", "decided_by", decided)


def pack(half: DataFrame, decisions: DataFrame) -> DataFrame:
    """Join half messages and decisions → one row per transaction with three numbers (``stored_us``, ``checks``,
    ``end``), which :func:`unpack` decodes. Both become one frame of numbers, which Spark shuffles once and groups
    without sorting. ``end`` is the first decision as one number, made of its time and two codes, so the smallest is the
    earliest."""
    nothing = f.lit(None).cast("bigint")
    begun = half.select("transaction", "stored_us", "checks", nothing.alias("end"))
    end = (f.col("decided_us") * _CODES + _encode("state", _STATES)) * _CODES + _encode("decided_by", _DECIDERS)
    ended = decisions.select("transaction", nothing.alias("stored_us"), nothing.alias("checks"), end.alias("end"))
    every = begun.unionByName(ended).groupBy("transaction")
    least = every.agg(f.min("stored_us").alias("stored_us"), f.max("checks").alias("checks"), f.min("end").alias("end"))
    return least.where(f.col("stored_us").isNotNull()).select("stored_us", "checks", "end")


def unpack(packed: DataFrame) -> DataFrame:
    """Convert packed transactions → ``stored_us, checks, state, decided_us, decided_by`` (the last three null while
    undecided)."""
    codes = f.shiftright("end", 3)
    return packed.select(
        "stored_us",
        "checks",
        _decode(codes % _CODES, _STATES).alias("state"),
        f.shiftright("end", 6).alias("decided_us"),
        _decode(f.col("end") % _CODES, _DECIDERS).alias("decided_by"),
    )


def _encode(name: str, words: list[str]) -> Column:
    return (f.array_position(f.lit(words), f.col(name)) - 1).cast("bigint")


def _decode(code: Column, words: list[str]) -> Column:
    return f.get(f.lit(words), code.cast("int"))


def count_over_time(every: DataFrame, by: str, start_us: int, bucket_us: int) -> DataFrame:
    """Convert transactions → ``event, bucket, number``: how many began (event ``prepared``) and ended (event: the value
    of column ``by``) in each bucket of ``bucket_us`` microseconds, numbered from ``start_us`` on."""
    moments = f.array(
        f.struct(f.col("stored_us").alias("at"), f.lit("prepared").alias("event")),
        f.struct(f.col("decided_us").alias("at"), f.col(by).alias("event")),
    )
    bucket = ((f.col("moment.at") - start_us) / bucket_us).cast("int").alias("bucket")
    return (
        every.select(f.explode(moments).alias("moment"))
        .where(f.col("moment.at").isNotNull())
        .groupBy(f.col("moment.event").alias("event"), bucket)
        .agg(f.count("*").alias("number"))
    )


def count_latencies(every: DataFrame, by: str) -> DataFrame:
    """Convert transactions → ``by, step, number``: counts of decisions by the value of column ``by``, and by the time
    from half message to decision. Step s holds latencies from 10^(s / LATENCY_STEPS) microseconds to the next."""
    waited = f.greatest(f.col("decided_us") - f.col("stored_us"), f.lit(1))
    step = f.floor(f.log10(waited) * LATENCY_STEPS).cast("int").alias("step")
    return every.where(f.col("decided_us").isNotNull()).groupBy(by, step).agg(f.count("*").alias("number"))


def compute_totals(every: DataFrame) -> DataFrame:
    """Convert transactions → one row: ``transactions, committed, rolled_back, expired, undecided, asked``
    (check-backs), ``asked_about`` (transactions), ``first_us, last_us, oldest_us`` (oldest undecided). The last three
    are null if there are none."""
    state = f.col("state")
    return every.agg(
        f.count("*").alias("transactions"),
        *[f.count_if(state == word).alias(word) for word in ("committed", "rolled_back", "expired")],
        f.count_if(state.isNull()).alias("undecided"),
        f.coalesce(f.sum("checks"), f.lit(0)).alias("asked"),
        f.count_if(f.col("checks") > 0).alias("asked_about"),
        f.min("stored_us").alias("first_us"),
        f.max(f.greatest("stored_us", "decided_us")).alias("last_us"),
        f.min(f.when(state.isNull(), f.col("stored_us"))).alias("oldest_us"),
    )


def collect_counts(counts: DataFrame) -> dict[str, dict[int, int]]:
    """Collect a frame of three columns: a name, a number (such as a bucket or step) and a count. Returns the counts by
    name and number, in order of both."""
    found: dict[str, dict[int, int]] = {}
    for name, number, count in sorted(map(tuple, counts.collect())):
        found.setdefault(name, {})[number] = count
    return found


def make_series(counts: Mapping[str, Mapping[int, int]], size: int) -> dict[str, list[int]]:
    """Convert counts by name and bucket to lists of ``size`` values by name, with 0 for empty buckets."""
    return {name: [by.get(bucket, 0) for bucket in range(size)] for name, by in counts.items()}
