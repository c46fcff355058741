"""The audit of a run folder: reads the manifest, compares all sides, writes the verdict and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from escrowmq.pipeline import timeline
from escrowmq.pipeline.audit import frames
from escrowmq.pipeline.audit.comparing import Tallied, tally_sides
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.manifest import KINDS, Comparison, Manifest
from escrowmq.pipeline.audit.page import Pictures, write_page
from escrowmq.pipeline.audit.readings import Readings
from escrowmq.pipeline.audit.reasons import Explain, explain_findings
from escrowmq.pipeline.audit.verdict import Finding, Side, Verdict
from escrowmq.pipeline.audit.windows import WINDOWS
from escrowmq.pipeline.coverage import Coverage, read_coverage
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.log import BrokerLog, log_rows
from escrowmq.pipeline.session import local_session
from escrowmq.wire import HALF_VIEW_NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST_FINDINGS = 500
"""Maximum number of findings that are named. All are counted."""

FEW_ROWS = 300_000
"""With fewer rows in the log, all rows are compared at once; a pass over windows would cost more than it saves."""


def run(
    folder: Path,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    progress: Callable[[str], None] | None = None,
    page: bool = True,
) -> Verdict:
    """Audit a run folder (see :mod:`escrowmq.pipeline.audit.manifest`), and write ``verdict.json`` and ``report.html``
    there.

    The log is read from the broker that the manifest names, or from its data folder, which may be in use. ``spark``
    None starts a session for the audit: on this machine, or on the cluster ``master`` (``spark://HOST:PORT``), whose
    workers must see the run folder under the same path. ``progress`` is called with the current step. A disagreement is
    a verdict, not an error. Raises Misuse if the folder, one of its databases or Java is missing.
    """
    tell = progress or (lambda _: None)
    manifest = Manifest.read(folder)
    with unwrap_errors(), ExitStack() as stack:
        tell("looking at the broker's log")
        rows = log_rows(manifest.log_url, manifest.topics)
        covered = read_coverage(manifest.log_url, (*manifest.topics, HALF_VIEW_NAME))
        if spark is None:
            tell("starting Spark")
            spark = stack.enter_context(local_session("escrowmq audit", rows=rows, master=master))
        tell("comparing by id and content")
        events = Events.read(folder / manifest.events if manifest.events else None)
        readings = Readings(spark, manifest, BrokerLog(spark, manifest.log_url, whole=not covered.incomplete))
        verdict, pictures = audit(manifest, readings, events, covered, windows=WINDOWS if rows > FEW_ROWS else 0)
    verdict.write(folder)
    if page:
        tell("drawing the report")
        write_page(folder, verdict, pictures, events)
    return verdict


def audit(
    manifest: Manifest,
    readings: Readings,
    events: Events,
    covered: Coverage = Coverage(),
    *,
    windows: int = WINDOWS,
) -> tuple[Verdict, Pictures]:
    """Compare all sides and measure the run. Only frames of a bounded size are collected.

    ``covered``: what the log no longer contains. ``windows`` (see
    :func:`escrowmq.pipeline.audit.comparing.tally_sides`) does not change the verdict.
    """
    together = _list_consumer_comparisons(manifest)
    judges = [c.judges for c in (*manifest.comparisons, *together)]
    with ExitStack() as stack:
        stack.callback(readings.close)
        sides = readings.read_rows([*manifest.comparisons, *together])
        stack.enter_context(_without_compression(readings.spark))
        half = stack.enter_context(_persist(readings.read_half()))
        packed = stack.enter_context(_persist(timeline.pack(half, timeline.read_decisions(readings.log))))
        done = stack.enter_context(tally_sides(sides, windows, tied=_number_consumer_comparisons(manifest)))
        wrong = frames.findings(done.tallies, judges).unionByName(frames.undecided(half))
        wrong = stack.enter_context(_persist(wrong))
        told = partial(explain_findings, manifest, readings, covered)
        return _make_verdict(manifest, told, covered, done, wrong, half, timeline.unpack(packed), events)


@contextmanager
def _persist(frame: DataFrame) -> Iterator[DataFrame]:
    """Context manager: keep a frame in memory or on disk."""
    try:
        yield frame.persist()
    finally:
        frame.unpersist()


@contextmanager
def _without_compression(spark: SparkSession) -> Iterator[None]:
    """Context manager: turn off compression of cached frames. They are hashes and times, which no dictionary makes
    smaller, and trying costs more than the rest of caching."""
    name = "spark.sql.inMemoryColumnarStorage.compressed"
    before = spark.conf.get(name)
    spark.conf.set(name, "false")
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def _make_verdict(
    manifest: Manifest,
    told: Explain,
    covered: Coverage,
    done: Tallied,
    wrong: DataFrame,
    half: DataFrame,
    transactions: DataFrame,
    events: Events,
) -> tuple[Verdict, Pictures]:
    kinds = {row["kind"]: row["ids"] for row in frames.count_ids_by_kind(wrong).collect()}
    sides = _count_sides(manifest, done, wrong)
    total = timeline.compute_totals(transactions).collect()[0]
    numbers = [_find_effect_comparison(manifest, table) for table in manifest.consumers.values()]
    verdict = Verdict(
        orders=half.select("hashed").distinct().count(),
        transactions=total["transactions"],
        committed=total["committed"],
        rolled_back=total["rolled_back"],
        consumed=_find_consumed(manifest, done),
        **{kind: kinds.get(kind, 0) for kind in (*KINDS, "orphaned")},
        kills=len(events.kills),
        checks=total["asked"],
        consumers={name: sides[number].found_rows for name, number in zip(manifest.consumers, numbers, strict=True)},
        comparisons=sides,
        findings=_name_findings(manifest, told, wrong),
        findings_in_all=wrong.count(),
        beginnings=covered.beginnings,
        incomplete=covered.incomplete,
    )
    return verdict, Pictures.of(transactions, total["first_us"], total["last_us"])


def _list_consumer_comparisons(manifest: Manifest) -> list[Comparison]:
    """Return additional comparisons, by id alone and without findings, that find the ids in every consumer's table."""
    first, *others = [f"table:{table}" for table in manifest.consumers.values()] or [""]
    return [Comparison(first, other, (), ()) for other in others or [first]] if first else []


def _find_consumed(manifest: Manifest, done: Tallied) -> int:
    """Return the number of ids that every consumer's table has."""
    if not manifest.consumers:
        return 0
    numbers = _number_consumer_comparisons(manifest)
    return done.proven.get(numbers[0], 0) + frames.find_common_ids(done.tallies.where("expected > 0"), numbers).count()


def _number_consumer_comparisons(manifest: Manifest) -> list[int]:
    """Return the numbers of :func:`_list_consumer_comparisons`, which follow the manifest's own."""
    first = len(manifest.comparisons)
    return [first + n for n in range(len(_list_consumer_comparisons(manifest)))]


def _find_effect_comparison(manifest: Manifest, table: str) -> int:
    """Return the number of the comparison whose found side is ``table``."""
    return next(n for n, c in enumerate(manifest.comparisons) if c.found == f"table:{table}")


def _name_findings(manifest: Manifest, told: Explain, wrong: DataFrame) -> tuple[Finding, ...]:
    """Return the first findings, ordered by kind and id, with their explanations."""
    rows = [row.asDict() for row in wrong.orderBy("kind", "id", "comparison").limit(MOST_FINDINGS).collect()]
    reason = told(rows)
    return tuple(
        Finding(
            row["kind"],
            row["id"],
            _label_comparison(manifest, row["comparison"]),
            row["expected"],
            row["found"],
            reason.get((row["comparison"], row["id"], row["kind"]), ""),
        )
        for row in rows
    )


def _label_comparison(manifest: Manifest, number: int) -> str:
    if number < 0:
        return "still in escrow"
    comparison = manifest.comparisons[number]
    return f"{manifest.label(comparison.expected)} → {manifest.label(comparison.found)}"


def _count_sides(manifest: Manifest, done: Tallied, wrong: DataFrame) -> tuple[Side, ...]:
    counted = {row["comparison"]: row for row in frames.count_sides(done.tallies).collect()}
    bad = {row["comparison"]: row["ids"] for row in frames.count_ids_by_comparison(wrong).collect()}
    result = []
    for number, comparison in enumerate(manifest.comparisons):
        row, proven = counted.get(number), done.proven.get(number, 0)
        ids, expected, found = (row["ids"], row["expected"], row["found"]) if row else (0, 0, 0)
        labels = manifest.label(comparison.expected), manifest.label(comparison.found)
        result.append(Side(*labels, proven + ids, proven + expected, proven + found, bad.get(number, 0)))
    return tuple(result)
