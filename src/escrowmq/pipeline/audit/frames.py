"""The comparison itself, as functions DataFrame → DataFrame: by id and content, never by count.

1. A *witness* is one row of an id: ``comparison, id, expected (1 or 0), digest``. Both sides of every comparison become
   witnesses of one frame, so that all comparisons together cost one shuffle.
2. A *tally* sums up the witnesses of one id in one comparison: the number of rows on either side, and the lowest and
   the highest digest of their content.
3. A *finding* is an error in a tally:

   ========  =============================================================
   lost      expected, not found
   leaked    found, not expected
   repeated  more than one row on a side
   altered   on both sides, with content that is not the same everywhere
   ========  =============================================================

One id lost and another repeated leave the counts equal and are still two findings.

Columns whose values may differ (``near`` of a role) are not in the digest. A witness has their values as ``near0`` ...,
and the content of an id is the same if the greatest minus the least value is within the limit. Texts that are no values
are compared exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from escrowmq.pipeline.audit.manifest import KINDS
from escrowmq.pipeline.audit.rows import Cell, Role, Rows, digest
from escrowmq.pipeline.sql.canonical import AMOUNT, to_amount
from escrowmq.pipeline.sql.id_windows import NO_ID
from escrowmq.pipeline.timeline import UNDECIDED

Limits = Mapping[int, Sequence[Decimal]]
"""By comparison: how much the values of its ``near`` columns may differ."""


def find_limits(every: Sequence[Rows]) -> Limits:
    """Return by comparison how much the values of its ``near`` columns may differ; without those that have none."""
    roles = [role for rows in every for speaker in rows.speakers for role in speaker.roles]
    return {role.comparison: [limit for _, limit in role.near] for role in roles if role.near}


def make_witness(role: Role, cell: Cell = f.col, width: int = 0) -> Column:
    """Return a struct that stands for a row in one comparison: ``comparison`` int, ``expected`` bigint (1 or 0),
    ``digest`` bigint of its columns, and ``width`` values of ``near`` columns, decimals. ``cell`` finds a column of the
    row."""
    amounts = {name: to_amount(cell(name), name.partition(" ")[0]) for name, _ in role.near}
    exact: list[Column] = []
    for name in role.columns:
        no_value = amounts[name].isNull() if name in amounts else None
        exact += [cell(name)] if no_value is None else [f.when(no_value, cell(name)), no_value]
    near = [*amounts.values(), *[f.lit(None).cast(AMOUNT)] * (width - len(amounts))]
    return f.struct(
        f.lit(role.comparison).alias("comparison"),
        f.lit(int(role.expected)).cast("bigint").alias("expected"),
        digest(exact).alias("digest"),
        *[amount.alias(f"near{n}") for n, amount in enumerate(near)],
    )


def witnesses(side: DataFrame, id: Column, said: Column) -> DataFrame:
    """Convert rows of a side → ``id`` and the fields of a witness, one row per role. ``said``: an array of
    :func:`make_witness`, one per role."""
    rows = side.select(f.coalesce(id, f.lit(NO_ID)).alias("id"), f.explode(said).alias("said"))
    return rows.select("id", "said.*")


def find_witnesses(rows: Rows, some: DataFrame, width: int = 0) -> DataFrame:
    """Convert ``some`` rows of the frame of ``rows`` to witnesses, one per row and role. ``width`` as in
    :func:`make_witness`."""
    return witnesses(rows.open(some), rows.id, rows.map_roles(partial(make_witness, width=width)))


def make_no_witnesses(spark: SparkSession) -> DataFrame:
    """Return a frame of witnesses that has no rows."""
    return spark.createDataFrame([], "id STRING, comparison INT, expected BIGINT, digest BIGINT")


def tally(frames: Sequence[DataFrame], limits: Limits = MappingProxyType({})) -> DataFrame:
    """Convert witnesses → ``comparison, id, expected, found`` (rows on either side), ``same`` (bool: one content, apart
    from ``near`` values that differ within their ``limits``)."""
    together = reduce(DataFrame.unionByName, frames)
    names = [name for name in together.columns if name.startswith("near")]
    same = f.min("digest") == f.max("digest")
    for n, name in enumerate(names):
        mine = [
            f.when(f.col("comparison") == c, f.lit(its[n]).cast(AMOUNT)) for c, its in limits.items() if n < len(its)
        ]
        same &= f.coalesce(f.max(name) <= f.min(name) + f.coalesce(*mine), f.lit(True))
    sums = [f.sum("expected").alias("expected"), f.sum(1 - f.col("expected")).alias("found")]
    return together.groupBy("comparison", "id").agg(*sums, same.alias("same"))


def findings(tallies: DataFrame, judges: Sequence[Sequence[str]]) -> DataFrame:
    """Convert tallies → one row per finding: ``kind, id, comparison, expected, found``. ``judges[c]`` are the kinds
    that comparison c reports."""
    expected, found = f.col("expected"), f.col("found")
    wrong = {
        "lost": (expected > 0) & (found == 0),
        "leaked": (expected == 0) & (found > 0),
        "repeated": (expected > 1) | (found > 1),
        "altered": (expected > 0) & (found > 0) & ~f.col("same"),
    }
    verdicts = [
        f.when(wrong[kind] & f.col("comparison").isin(judging), f.lit(kind))
        for kind in KINDS
        if (judging := [c for c, kinds in enumerate(judges) if kind in kinds])
    ]
    kind = f.explode(f.array_compact(f.array(*verdicts))).alias("kind")
    return tallies.select("id", "comparison", "expected", "found", kind)


def undecided(half: DataFrame) -> DataFrame:
    """Convert half messages (``id``, ``state`` text) → findings of kind ``orphaned``: the ids whose transaction is
    undecided (open or parked), once each, with their number of half messages as ``found``."""
    found = half.where(f.col("state").isin(*UNDECIDED)).groupBy("id").agg(f.count("*").alias("found"))
    comparison, expected = f.lit(-1).alias("comparison"), f.lit(0).cast("long").alias("expected")
    return found.select("id", comparison, expected, "found", f.lit("orphaned").alias("kind"))


def count_ids(found: DataFrame, by: str) -> dict[Any, int]:
    """Count the distinct ids of findings by ``kind`` or ``comparison``; one id with several findings counts once."""
    counted = found.groupBy(by).agg(f.countDistinct("id").alias("ids")).collect()
    return {row[by]: row["ids"] for row in counted}


def count_sides(tallies: DataFrame) -> DataFrame:
    """Convert tallies → one row per comparison: ``comparison, ids, expected, found`` (ids, and rows of either side)."""
    sums = [f.sum(name).alias(name) for name in ("expected", "found")]
    return tallies.groupBy("comparison").agg(f.count("*").alias("ids"), *sums)


def find_common_ids(tallies: DataFrame, comparisons: Sequence[int]) -> DataFrame:
    """Convert tallies → the ids that the found sides of all these comparisons have (``id``)."""
    found = tallies.where(f.col("comparison").isin(*comparisons) & (f.col("found") > 0))
    return found.groupBy("id").agg(f.count("*").alias("sides")).where(f.col("sides") == len(comparisons)).select("id")
