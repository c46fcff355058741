"""The comparison, as functions DataFrame → DataFrame: one row per id, in whatever order and however often it was seen.

A *side* has one row per sighting: ``id`` string, ``at`` timestamp, and, where content is compared, ``digest`` (any type
that can be compared; null: not known). *half* is what was announced, *commits* what became visible. Both become one
frame and are grouped once, so that all kinds cost one shuffle:

===========  ==========================================================================
missing      announced longer ago than the grace time, never committed
unexpected   committed longer ago than the grace time, never announced
differing    on both sides, with content that is not the same everywhere
repeated     with ``copies``: on both sides with the same contents, one of them more often on one
             side than on the other; ``differing`` are then ids with other contents
nameless     rows without an id (counted; nothing can be said about them)
uncovered    as missing or unexpected, but seen before both sides begin: what would match
             may have left its topic
===========  ==========================================================================

Sets are compared, never counts: one id lost and another repeated leave the counts equal, and are seen.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse

KINDS = ("missing", "unexpected", "differing", "repeated", "nameless", "uncovered")


def missing(half: DataFrame, commits: DataFrame, *, settled_before: datetime) -> DataFrame:
    """Return the ids in ``half``, first seen before ``settled_before``, that have no commit → ``id``, ``halves`` (the
    number of sightings), ``first_seen``, ``last_seen``. Raises Misuse(BAD_ARGUMENT) for a side that lacks a column."""
    return _find_kind("missing", half, commits, settled_before).drop("kind", "commits")


def unexpected(half: DataFrame, commits: DataFrame, *, settled_before: datetime) -> DataFrame:
    """Return the ids in ``commits``, first seen before ``settled_before``, that were never announced. The columns are
    those of :func:`missing`, with ``commits`` for ``halves``."""
    return _find_kind("unexpected", half, commits, settled_before).drop("kind", "halves")


def differing(half: DataFrame, commits: DataFrame) -> DataFrame:
    """Return the ids on both sides whose content is not the same everywhere → ``id, halves, commits, first_seen,
    last_seen``."""
    return _find_kind("differing", half, commits, datetime.max.replace(tzinfo=UTC)).drop("kind")


def _find_kind(kind: str, half: DataFrame, commits: DataFrame, settled_before: datetime) -> DataFrame:
    return findings(tally(half, commits), settled_before).where(f.col("kind") == kind)


def together(half: DataFrame, commits: DataFrame) -> DataFrame:
    """Return both sides as one frame, a row per sighting: ``id``, ``at``, ``digest``, ``half`` (1, or 0 for a commit).
    Raises Misuse(BAD_ARGUMENT) for a side that lacks a column."""
    return _prepare_side("half", half, 1).unionByName(_prepare_side("commits", commits, 0))


def _prepare_side(name: str, side: DataFrame, half: int) -> DataFrame:
    types = {field.name: field.dataType.simpleString() for field in side.schema.fields}
    if lacking := [column for column in ("id", "at") if column not in types]:
        what = f"the {name} side has no column {' and no '.join(lacking)}"
        raise Misuse(Code.BAD_ARGUMENT, what, f"id string, at timestamp, perhaps digest; it has {', '.join(types)}")
    if types["at"] != "timestamp":
        raise Misuse(Code.BAD_ARGUMENT, f"the {name} side's column at is {types['at']}", "make it a timestamp")
    digest = f.col("digest") if "digest" in types else f.lit(None).cast("bigint")
    # a streaming side's watermark is set on both together, see streaming.py
    return side.select(f.col("id").cast("string").alias("id"), "at", digest.alias("digest"), f.lit(half).alias("half"))


def tally(half: DataFrame, commits: DataFrame) -> DataFrame:
    """Convert both sides → one row per id: ``id, halves, commits`` (numbers of sightings), ``first_seen, last_seen,
    unlike`` (whether contents differ; null if no content is known)."""
    return together(half, commits).groupBy("id").agg(*make_aggregates())


def make_aggregates(*, copies: bool = False) -> list[Column]:
    """Return the columns of :func:`tally`, as aggregates over all sightings of one id. With ``copies`` an id may have
    several contents, and ``uneven`` states whether one is on one side more often than on the other."""
    digests = [f.array_sort(f.collect_list(f.when(f.col("half") == side, f.col("digest")))) for side in (1, 0)]
    here, there = (f.array_distinct(one) for one in digests)
    unlike = here != there if copies else f.min("digest") != f.max("digest")
    return [
        f.sum("half").alias("halves"),
        f.sum(1 - f.col("half")).alias("commits"),
        f.min("at").alias("first_seen"),
        f.max("at").alias("last_seen"),
        unlike.alias("unlike"),
        *([(digests[0] != digests[1]).alias("uneven")] if copies else []),
    ]


def findings(tallies: DataFrame, settled_before: datetime, covered_from: datetime | None = None) -> DataFrame:
    """Convert tallies → ``kind, id, halves, commits, first_seen, last_seen``: one row per finding. ``missing`` and
    ``unexpected`` are only ids first seen before ``settled_before``; those first seen before ``covered_from`` become
    ``uncovered``."""
    old = f.col("first_seen") < to_timestamp(settled_before)
    found = judge(tallies, old)
    if covered_from is None:
        return found
    beyond = f.col("kind").isin("missing", "unexpected") & (f.col("first_seen") < to_timestamp(covered_from))
    return found.withColumn("kind", f.when(beyond, "uncovered").otherwise(f.col("kind")))


def judge(tallies: DataFrame, due: Column) -> DataFrame:
    """Convert tallies to findings: ``kind, id, halves, commits, first_seen, last_seen``. ``missing`` and ``unexpected``
    are reported only where the condition ``due`` is true."""
    halves, commits = f.col("halves"), f.col("commits")
    kind = (
        f.when(f.col("id").isNull(), "nameless")
        .when((commits == 0) & due, "missing")
        .when((halves == 0) & due, "unexpected")
        .when((halves > 0) & (commits > 0) & f.col("unlike"), "differing")
    )
    if "uneven" in tallies.columns:
        kind = kind.when((halves > 0) & (commits > 0) & f.col("uneven"), "repeated")
    found = tallies.withColumn("kind", kind).where(f.col("kind").isNotNull())
    return found.select("kind", "id", "halves", "commits", "first_seen", "last_seen")


def to_timestamp(when: datetime) -> Column:
    """Return a time as a Spark timestamp, independent of the time zones of the machine and the session. A naive time is
    UTC."""
    aware = when if when.tzinfo else when.replace(tzinfo=UTC)
    return f.timestamp_micros(f.lit((aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)))


def as_rows(found: DataFrame) -> DataFrame:
    """Convert findings to columns of JSON types: times in microseconds since 1970."""
    times = [f.unix_micros(name).alias(f"{name}_us") for name in ("first_seen", "last_seen")]
    return found.select("kind", "id", "halves", "commits", *times)
