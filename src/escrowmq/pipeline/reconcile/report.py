"""Reconcile as a batch: compare, count, write all findings. Only the first few come to the driver."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.reconcile.frames import KINDS, by_id, findings, together
from escrowmq.pipeline.shared import check_shared, local_folder, on_cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_NAMED = 100
"""Findings that are named in the report; all are counted, and written where asked for."""
_TOTALS = "totals"


@dataclass(frozen=True, slots=True)
class Finding:
    """One id that both sides do not agree on; how often each side has it, and when (µs since 1970)."""

    kind: str
    id: str | None
    halves: int
    commits: int
    first_seen_us: int
    last_seen_us: int


@dataclass(frozen=True, slots=True)
class Report:
    """``missing`` … ``differing`` count distinct ids, ``nameless`` rows. ``uncovered``: ids that are on one side alone
    and were seen before ``covered_from``, where what would match may have left its topic; they are no difference.
    ``named`` has the first findings, in order of kind, time, id."""

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
    incomplete: str = ""
    """What a side may lack at its end, and why; empty: nothing that is known."""

    @property
    def agrees(self) -> bool:
        """Whether both sides have the same ids, with the same content."""
        return not (self.missing or self.unexpected or self.differing or self.nameless)

    def to_json(self) -> dict[str, Any]:
        """Return the result in JSON's values."""
        return {"verdict": "agree" if self.agrees else "disagree", **asdict(self)}


@unwrap_errors()
def reconcile(
    half: DataFrame,
    commits: DataFrame,
    *,
    settled_before: datetime,
    covered_from: datetime | None = None,
    incomplete: str = "",
    out: str | None = None,
    most: int = MOST_NAMED,
) -> Report:
    """Compare two sides (see :mod:`escrowmq.pipeline.reconcile.frames`).

    ``out``: a folder (any that Spark can write to) that gets ``findings`` as Parquet with every finding, and
    ``report.json``; what was there is replaced; on a cluster its workers must see it, or it is refused before and
    after. ``covered_from``: from when on both sides hold all that there was (None: from their beginning).
    ``incomplete``: for the report, what a side may lack at its end. The same sides and ``settled_before`` give the same
    report. Raises Misuse for sides that lack columns.
    """
    from pyspark.sql import Observation

    if out is not None:
        check_shared(half.sparkSession, out, "what is found")
    totals = Observation(_TOTALS)
    tallies = by_id(_never_empty(together(half, commits))).observe(
        totals,
        f.count("id").alias("ids"),  # without the null id
        f.coalesce(f.sum("halves"), f.lit(0)).alias("half_rows"),
        f.coalesce(f.sum("commits"), f.lit(0)).alias("commit_rows"),
    )
    found = findings(tallies, settled_before, covered_from).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        rows = f.sum(f.when(f.col("id").isNull(), (f.col("halves") + f.col("commits"))).otherwise(1))
        real = found.where((f.col("halves") + f.col("commits")) > 0)
        counts = {row["kind"]: row["rows"] for row in found.groupBy("kind").agg(rows.alias("rows")).collect()}
        report = Report(
            settled_before=_iso(settled_before),
            **totals.get,
            **{kind: counts.get(kind) or 0 for kind in KINDS},
            named=tuple(Finding(*row) for row in _first(real, most).collect()),
            covered_from=None if covered_from is None else _iso(covered_from),
            incomplete=incomplete,
        )
        if out is not None:
            real.orderBy("kind", "first_seen", "id").write.mode("overwrite").parquet(f"{out}/findings")
            _check_written(real, f"{out}/findings")
            _write_text(real, f"{out}/report.json", json.dumps(report.to_json(), indent=2) + "\n")
        return report
    finally:
        found.unpersist()


def _never_empty(sightings: DataFrame) -> DataFrame:
    """With one row of nulls, which counts nowhere: where nothing is found Spark would skip the work and never tell the
    totals."""
    nothing = [f.lit(None).cast(field.dataType).alias(field.name) for field in sightings.schema.fields]
    return sightings.unionByName(sightings.sparkSession.range(1).select(*nothing))


def _first(found: DataFrame, most: int) -> DataFrame:
    by_kind = f.array_position(f.array(*map(f.lit, KINDS)), f.col("kind"))
    ordered = found.orderBy(by_kind, "first_seen", "id").limit(most)
    times = [f.unix_micros(name) for name in ("first_seen", "last_seen")]
    return ordered.select("kind", "id", "halves", "commits", *times)


def _iso(when: datetime) -> str:
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


def _check_written(found: DataFrame, folder: str) -> None:
    """Raise Misuse(BAD_ARGUMENT) if not all of it is in a folder of this machine: a worker that came late has written
    into one of its own."""
    spark = found.sparkSession
    if not on_cluster(spark) or (here := local_folder(spark, folder)) is None:
        return
    from pyarrow import parquet

    there = sum(parquet.read_metadata(file).num_rows for file in here.glob("*.parquet"))
    if there != (rows := found.count()):
        what = f"{there} of {rows} findings are in {here}: workers of the cluster have written into other folders"
        raise Misuse(Code.BAD_ARGUMENT, what, "a folder that every worker sees under this path, or hdfs://HOST/...")


def _write_text(frame: DataFrame, path: str, text: str) -> None:
    """Write one file where Spark writes: a folder of this machine, or any file system that its Java knows."""
    spark = frame.sparkSession
    hadoop = spark._jsc.hadoopConfiguration()
    assert spark._jvm is not None  # a session has one
    target = spark._jvm.org.apache.hadoop.fs.Path(path)
    stream = target.getFileSystem(hadoop).create(target, True)
    try:
        stream.write(text.encode())
    finally:
        stream.close()
