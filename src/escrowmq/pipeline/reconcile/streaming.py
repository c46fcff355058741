"""Streaming reconciliation: groups the messages of an id into sessions that a watermark closes, in Spark state. No
Python runs per row.

All sightings of an id that lie less than the grace time apart are one *session*, on either side and in any order. The
end of a session is its last sighting plus the grace time. When the watermark (the latest time seen on either side, less
``lateness``) has passed its end, the session is judged once and dropped:

===========  =============================================================================
missing      a session without a commit
alone        a session without an announcement. If the id was also reported as missing (before
             or after), it is *settled late*: its commit came more than the grace time away
             from its half. If not, it is unexpected
differing    a session with both, and content that is not the same everywhere
===========  =============================================================================

``settled`` sums up the findings: late commits remove their ids from the list. State holds the ids of about the last
``grace`` + ``lateness``. Spark drops a sighting that arrives after the watermark has passed its time by the grace time
(counted in the query's progress as ``numRowsDroppedByWatermark``). The time at which a broker stored a message is
practically never so late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.reconcile.frames import as_rows, judge, make_aggregates, together
from escrowmq.pipeline.shared import check_shared
from escrowmq.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

BODY = "kind STRING, id STRING, halves BIGINT, commits BIGINT, first_seen_us BIGINT, last_seen_us BIGINT"
"""The JSON fields of a message of the output topic."""


def stream_findings(
    half: DataFrame, commits: DataFrame, *, grace_seconds: float = 600.0, lateness_seconds: float = 60.0
) -> DataFrame:
    """Convert two streaming sides to a stream of findings: ``kind, id, halves, commits, first_seen, last_seen``
    (append). An id is judged when no side has had it for ``grace_seconds``, by the latest time seen on either side less
    ``lateness_seconds``. Both sides share this watermark: a side without messages, because every confirmation is lost,
    must not stop the clock. Raises Misuse for sides that lack columns, or times that are not positive."""
    for name, seconds in (("grace", grace_seconds), ("lateness", lateness_seconds)):
        if not seconds > 0:
            raise Misuse(Code.BAD_ARGUMENT, f"{name} = {seconds}", "a positive number of seconds")
    seen = together(half, commits).withWatermark("at", _format_interval(lateness_seconds))
    sessions = seen.groupBy("id", f.session_window("at", _format_interval(grace_seconds))).agg(*make_aggregates())
    return judge(sessions, f.lit(True)).replace("unexpected", "alone", ["kind"])


def start(
    found: DataFrame,
    *,
    checkpoint: str,
    url: str | None = None,
    topic: str | None = None,
    each: Callable[[DataFrame, int], None] | None = None,
    once: bool = False,
) -> StreamingQuery:
    """Start a stream of findings: exactly once into ``topic`` at ``url`` (key: the id; body: JSON, see BODY), or into
    ``each``. ``each(findings, batch)`` is called once per batch, and perhaps again with the same number and rows after
    a crash, so a function that writes should store the number. ``once`` stops the stream after all currently available
    messages. Raises Misuse(BAD_ARGUMENT) unless exactly one target is given, and for a ``checkpoint`` that workers of a
    cluster do not see, because Spark keeps its state there."""
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


def as_messages(found: DataFrame) -> DataFrame:
    """Convert findings to messages for the output topic: ``key`` (the id) and ``body`` (JSON, see BODY)."""
    rows = as_rows(found)
    body = f.to_json(f.struct(*rows.columns), {"ignoreNullFields": "false"}).cast("binary")
    return rows.select(f.col("id").alias("key"), body.alias("body"))


def from_messages(messages: DataFrame) -> DataFrame:
    """Convert messages of an output topic (``body``) back to the findings of :func:`stream_findings`."""
    found = messages.select(f.from_json(f.col("body").cast("string"), BODY).alias("finding")).select("finding.*")
    times = [f.timestamp_micros(f"{name}_us").alias(name) for name in ("first_seen", "last_seen")]
    return found.select("kind", "id", "halves", "commits", *times)


def settled(found: DataFrame) -> DataFrame:
    """Convert all findings of a stream to the current state of each id: ``id``, ``kind`` (missing, settled late,
    unexpected, differing, nameless), ``halves``, ``commits``, ``first_seen``, ``last_seen``."""
    was_missing, was_alone, was_differing = (f.bool_or(f.col("kind") == k) for k in ("missing", "alone", "differing"))
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


def _format_interval(seconds: float) -> str:
    return f"{round(seconds * 1000)} milliseconds"
