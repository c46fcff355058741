"""The messages of a topic that a consumer group was to handle: without those that operators discarded for it, and with
those that they edited replaced.

The topic itself never changes. What operators did for one group is in the view ``%group-acts``:

1. Of two acts on one place the later one counts. *retry* changes nothing: the same message is delivered again.
2. *discard* counts until a *reset* moves the group back to the place or before it: then the message is delivered again,
   edited if it was.
3. *edit* counts until the next edit of the place.

Each step is a join by place (shard, topic, queue, offset), so the number of acts is not limited. Few acts are broadcast
to the workers, so that the messages need not be shuffled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.pipeline.log import BrokerLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACE = ("shard", "topic", "queue", "offset")
CONTENT = ("key", "tag", "properties", "body", "message_id")
"""The columns of a message that an edit replaces. An edited message belongs to no transaction."""
ACT, INSTEAD = "_act", "_instead"
"""Columns of :func:`find_places`."""
FEW_PLACES = 100_000
FEW_BYTES = 32 << 20
"""Up to this many places, and bytes of bodies in them, are broadcast to every worker instead of sorting the
messages."""


def find_places(log: BrokerLog, group: str) -> DataFrame:
    """Return the places (shard, topic, queue, offset) whose message operators discarded or edited for a group → PLACE,
    ``_act`` (``discard`` or ``edit``), ``_instead`` (a struct of CONTENT: the edited message)."""
    acts = log.group_acts(group, [*PLACE, "position", "act", *CONTENT])
    edited = f.when(f.col("act") == "edit", f.col("position"))
    by_place = acts.where(f.col("act").isin("discard", "edit")).groupBy(*PLACE)
    settled = by_place.agg(
        f.max_by("act", "position").alias(ACT),
        f.max("position").alias("_at"),
        f.max_by(f.struct(*CONTENT), edited).alias(INSTEAD),
    )
    resets = f.collect_list(f.struct("position", "offset")).alias("_resets")
    came_back = acts.where(f.col("act") == "reset").groupBy(*PLACE[:3]).agg(resets)
    again = f.exists("_resets", lambda one: (one["position"] > f.col("_at")) & (one["offset"] <= f.col("offset")))
    standing = settled.join(f.broadcast(came_back), list(PLACE[:3]), "left")
    brought_back = (f.col(ACT) == "discard") & f.coalesce(again, f.lit(False))
    act = f.when(~brought_back, f.col(ACT)).when(f.col(INSTEAD).isNotNull(), f.lit("edit"))
    return standing.withColumn(ACT, act).where(f.col(ACT).isNotNull()).select(*PLACE, ACT, INSTEAD)


def broadcast_if_few(found: DataFrame) -> DataFrame:
    """Return the places, marked for broadcast to every worker if they are few and small. Counts them, so persist them
    first."""
    size = found.agg(f.count("*").alias("rows"), f.sum(f.length(f.col(INSTEAD)["body"])).alias("bytes")).collect()[0]
    return f.broadcast(found) if size["rows"] <= FEW_PLACES and (size["bytes"] or 0) <= FEW_BYTES else found


def apply_edits(messages: DataFrame, found: DataFrame) -> DataFrame:
    """Convert messages (with PLACE) to those the group gets, with the same columns: without discarded ones, edited ones
    replaced. ``found``: of :func:`find_places`."""
    at_places = messages.join(found, list(PLACE), "left").where(f.col(ACT).isNull() | (f.col(ACT) == "edit"))
    return at_places.select(*[_replace_column(name) for name in messages.columns])


def _replace_column(name: str) -> Column:
    edited = f.col(ACT) == "edit"  # null where nothing was done
    if name == "transaction_id":
        return f.when(edited.isNull(), f.col(name)).alias(name)
    if name in CONTENT:
        return f.when(edited, f.col(INSTEAD)[name]).otherwise(f.col(name)).alias(name)
    return f.col(name)


def read_messages(log: BrokerLog, topics: Sequence[str], columns: Collection[str], found: DataFrame) -> DataFrame:
    """Return the ``columns`` of the messages of some topics as a group gets them. ``found``: its places, of
    :func:`find_places`."""
    return apply_edits(log.topics(topics, {*PLACE, *columns}), found).select(*columns)


def delivered_to(
    spark: SparkSession, url: str, group: str, topic: str, columns: Collection[str] = ("key", "message_id", "body")
) -> DataFrame:
    """Return the messages of ``topic`` that consumer group ``group`` was to handle: all visible ones, including its
    pending messages and dead letters. Use it with :func:`escrowmq.pipeline.audit.compare`, against the effects of the
    group. ``columns`` are those of format "escrow"."""
    log = BrokerLog(spark, url)
    return read_messages(log, [topic], list(columns), find_places(log, group))
