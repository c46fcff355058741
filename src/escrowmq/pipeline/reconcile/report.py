"""Batch reconciliation: compare, count, write all findings. Only the first few reach the driver."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.reconcile.frames import KINDS, as_rows, findings, make_aggregates, together
from escrowmq.pipeline.shared import check_shared, local_folder, on_cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_NAMED = 100
"""Maximum number of findings in the report. All are counted, and written to ``out`` if it is given."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One id that differs between the sides: how often each side has it, and when (µs since 1970)."""

    kind: str
    id: str | None
    halves: int
    commits: int
    first_seen_us: int
    last_seen_us: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a reconciliation. ``missing`` … ``differing`` count distinct ids, ``nameless`` counts rows.
    ``uncovered`` counts ids that are on one side only and were seen before ``covered_from``: their counterpart may have
    left its topic, so they are not differences. ``named`` has the first findings, in order of kind, time, id."""

    settled_before: str
    ids: int
    half_rows: int
    commit_rows: int
    missing: int
    unexpected: int
    differing: int
    nameless: int
    uncovered: int
    named: tuple[Finding, ...]
    covered_from: str | None = None
    repeated: int = 0
    incomplete: str = ""
    """What a side may lack at its end, and why; empty if nothing is known to be missing."""

    @property
    def agrees(self) -> bool:
        """Return whether both sides have the same ids, with the same content. ``uncovered`` ids do not count."""
        return not (self.missing or self.unexpected or self.differing or self.repeated or self.nameless)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"verdict": "agree" if self.agrees else "disagree", **asdict(self)}


@unwrap_errors()
def reconcile(
    half: DataFrame,
    commits: DataFrame,
    *,
    settled_before: datetime,
    covered_from: datetime | None = None,
    incomplete: str = "",
    copies: bool = False,
    out: str | None = None,
    most: int = MOST_NAMED,
) -> Report:
    """Compare two sides (see :mod:`escrowmq.pipeline.reconcile.frames`). The report counts all findings and names
    ``most`` of them.

    ``out`` is a folder, on any file system that Spark can write to, that gets ``findings`` as Parquet with every
    finding, and ``report.json``; earlier content is replaced. On a cluster all workers must see it; this is checked
    before and after writing. ``covered_from`` is the time from which both sides are complete (None: from their
    beginning). ``incomplete`` is copied to the report: what a side may lack at its end. With ``copies`` each content of
    an id should be on both sides equally often. The same sides and ``settled_before`` give the same report. Raises
    Misuse for sides that lack columns.
    """
    from pyspark.sql import Observation

    if out is not None:
        check_shared(half.sparkSession, out, "what is found")
    totals = Observation("totals")
    tallies = (
        _add_empty_row(together(half, commits))
        .groupBy("id")
        .agg(*make_aggregates(copies=copies))
        .observe(
            totals,
            f.count("id").alias("ids"),  # without the null id
            f.coalesce(f.sum("halves"), f.lit(0)).alias("half_rows"),
            f.coalesce(f.sum("commits"), f.lit(0)).alias("commit_rows"),
        )
    )
    found = findings(tallies, settled_before, covered_from).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        sightings = f.col("halves") + f.col("commits")
        rows, real = f.sum(f.when(f.col("id").isNull(), sightings).otherwise(1)), found.where(sightings > 0)
        counts = {row["kind"]: row["rows"] for row in found.groupBy("kind").agg(rows.alias("rows")).collect()}
        by_kind = f.array_position(f.array(*map(f.lit, KINDS)), f.col("kind"))
        ordered = real.orderBy(by_kind, "first_seen", "id")
        report = Report(
            settled_before=_format_iso(settled_before),
            **totals.get,
            **{kind: counts.get(kind) or 0 for kind in KINDS},
            named=tuple(Finding(*row) for row in as_rows(ordered.limit(most)).collect()),
            covered_from=None if covered_from is None else _format_iso(covered_from),
            incomplete=incomplete,
        )
        if out is not None:
            real.orderBy("kind", "first_seen", "id").write.mode("overwrite").parquet(f"{out}/findings")
            _check_written(real, f"{out}/findings")
            _write_text(real, f"{out}/report.json", json.dumps(report.to_json(), indent=2) + "\n")
        return report
    finally:
        found.unpersist()


def _add_empty_row(sightings: DataFrame) -> DataFrame:
    """Return the sightings with a row of nulls added, which no count includes. Without rows Spark would skip the work
    and never report the totals."""
    nothing = [f.lit(None).cast(field.dataType).alias(field.name) for field in sightings.schema.fields]
    return sightings.unionByName(sightings.sparkSession.range(1).select(*nothing))


def _format_iso(when: datetime) -> str:
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


def _check_written(found: DataFrame, folder: str) -> None:
    """Raise Misuse(BAD_ARGUMENT) if not all findings are in a folder of this machine, because a worker has written into
    a folder of its own."""
    spark = found.sparkSession
    if not on_cluster(spark) or (here := local_folder(spark, folder)) is None:
        return
    from pyarrow import parquet

    there = sum(parquet.read_metadata(file).num_rows for file in here.glob("*.parquet"))
    if there != (rows := found.count()):
        what = f"{there} of {rows} findings are in {here}: workers of the cluster have written into other folders"
        raise Misuse(Code.BAD_ARGUMENT, what, "a folder that every worker sees under this path, or hdfs://HOST/...")


def _write_text(frame: DataFrame, path: str, text: str) -> None:
    """Write a text file through Spark, on any file system that it knows; replaces an existing one."""
    spark = frame.sparkSession
    jvm: Any = spark._jvm
    target = jvm.org.apache.hadoop.fs.Path(path)
    with closing(target.getFileSystem(spark._jsc.hadoopConfiguration()).create(target, True)) as stream:
        stream.write(text.encode())
