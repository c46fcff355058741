"""Reconcile as a stream: groups the messages of an id into sessions that a watermark closes, in Spark state. No
Python runs per row.

All sightings of an id that lie less than the grace time apart are one *session*, whichever side they come from and in
whatever order and batch they arrive. When the watermark (the latest time seen on either side, less ``lateness``) has
passed its end, which is its last sighting plus the grace time, the session is judged once and forgotten:

===========  ============================================================================= missing      a session
without a commit alone        a session without an announcement. If the id was also reported as missing (before or
after), it is *settled late*:
             its commit came more than the grace time away from its half. If not, it is unexpected
differing    a session with both, and content that is not the same everywhere
===========  =============================================================================

``settled`` sums up what was reported: late commits take their ids off the list. State holds the ids of about the last
``grace`` + ``lateness``. A sighting that arrives when the watermark has passed its own time by the grace time is
dropped by Spark (counted in the query's progress as ``numRowsDroppedByWatermark``): the time at which a broker stored a
message is as good as never so late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.reconcile.frames import aggregates, judged, together
from escrowmq.pipeline.shared import check_shared
from escrowmq.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

BODY = "kind STRING, id STRING, halves BIGINT, commits BIGINT, first_seen_us BIGINT, last_seen_us BIGINT"
"""The body of a message of the output topic: JSON of these."""


def stream_findings(
    half: DataFrame, commits: DataFrame, *, grace_seconds: float = 600.0, lateness_seconds: float = 60.0
) -> DataFrame:
    """Two streaming sides → a stream of findings: ``kind, id, halves, commits, first_seen, last_seen`` (append).

    One watermark for both sides together: a side on which nothing happens, because every confirm is lost, must not stop
    the clock. Raises Misuse for sides that lack columns, or times that are not positive.
    """
    for name, seconds in (("grace", grace_seconds), ("lateness", lateness_seconds)):
        if not seconds > 0:
            raise Misuse(Code.BAD_ARGUMENT, f"{name} = {seconds}", "a positive number of seconds")
    seen = together(half, commits).withWatermark("at", _interval(lateness_seconds))
    sessions = seen.groupBy("id", f.session_window("at", _interval(grace_seconds))).agg(*aggregates())
    found = judged(sessions, f.lit(True))
    alone = f.when(f.col("kind") == "unexpected", "alone").otherwise(f.col("kind"))
    return found.withColumn("kind", alone)


def start(
    found: DataFrame,
    *,
    checkpoint: str,
    url: str | None = None,
    topic: str | None = None,
    each: Callable[[DataFrame, int], None] | None = None,
    once: bool = False,
) -> StreamingQuery:
    """Run a stream of findings: exactly once into ``topic`` at ``url`` (key: the id; body: JSON, see BODY), or into
    ``each``.

    ``each(findings, batch)`` is called once per batch, and after a crash perhaps again with the same number and rows: a
    function that writes should remember the number. ``once``: until what is there now has been read. Raises
    Misuse(BAD_ARGUMENT) unless just one goal is given, and for a ``checkpoint`` that workers of a cluster do not see:
    Spark keeps there what is yet to be judged.
    """
    if (topic is None) == (each is None) or (topic is not None and url is None):
        raise Misuse(Code.BAD_ARGUMENT, "findings go either to a topic at a URL or to a function")
    check_shared(found.sparkSession, checkpoint, "the checkpoint")
    register(found.sparkSession)
    writer = as_messages(found).writeStream.format("escrow") if each is None else found.writeStream.foreachBatch(each)
    writer = writer.option("checkpointLocation", checkpoint).outputMode("append")
    writer = writer.trigger(availableNow=True) if once else writer
    if each is not None:
        return writer.start()
    return writer.option("topic", str(topic)).start(str(url))


def as_rows(found: DataFrame) -> DataFrame:
    """Convert findings to the columns of BODY, times in microseconds since 1970."""
    times = [f.unix_micros(name).alias(f"{name}_us") for name in ("first_seen", "last_seen")]
    return found.select("kind", "id", "halves", "commits", *times)


def as_messages(found: DataFrame) -> DataFrame:
    """Convert findings → ``key``, ``body`` for a topic."""
    rows = as_rows(found)
    body = f.to_json(f.struct(*rows.columns), {"ignoreNullFields": "false"}).cast("binary")
    return rows.select(f.col("id").alias("key"), body.alias("body"))


def from_messages(messages: DataFrame) -> DataFrame:
    """Return messages of an output topic (``body``) → findings, as :func:`stream_findings` made them."""
    found = messages.select(f.from_json(f.col("body").cast("string"), BODY).alias("finding")).select("finding.*")
    times = [f.timestamp_micros(f"{name}_us").alias(name) for name in ("first_seen", "last_seen")]
    return found.select("kind", "id", "halves", "commits", *times)


def settled(found: DataFrame) -> DataFrame:
    """Return all findings of a stream → how each id stands now: ``id``, ``kind`` (missing, settled late,
    unexpected, differing, nameless), ``halves``, ``commits``, ``first_seen``, ``last_seen``."""
    kinds = [f.max((f.col("kind") == kind).cast("int")) == 1 for kind in ("missing", "alone", "differing")]
    was_missing, was_alone, was_differing = kinds
    kind = (
        f.when(was_missing & was_alone, "settled late")
        .when(was_missing, "missing")
        .when(was_alone, "unexpected")
        .when(was_differing, "differing")
        .otherwise("nameless")
    )
    sums = [f.sum(name).alias(name) for name in ("halves", "commits")]
    times = [f.min("first_seen").alias("first_seen"), f.max("last_seen").alias("last_seen")]
    return found.groupBy("id").agg(kind.alias("kind"), *sums, *times)


def _interval(seconds: float) -> str:
    return f"{round(seconds * 1000)} milliseconds"
