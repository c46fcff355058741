"""The audit of a run folder: reads the manifest, compares all sides, writes the verdict and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline import timeline
from escrowmq.pipeline.audit import frames
from escrowmq.pipeline.audit.comparing import Tallied, tally_sides
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.explained.differing import find_differing
from escrowmq.pipeline.audit.explained.reasons import explain_findings
from escrowmq.pipeline.audit.manifest import KINDS, Comparison, Manifest
from escrowmq.pipeline.audit.page import Pictures, write_page
from escrowmq.pipeline.audit.parts.sample import parse_sample, show_sample
from escrowmq.pipeline.audit.parts.state import State, make_key
from escrowmq.pipeline.audit.readings import Readings
from escrowmq.pipeline.audit.verdict import Finding, Side, Verdict
from escrowmq.pipeline.audit.windows import WINDOWS
from escrowmq.pipeline.coverage import Coverage, read_coverage
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.log import BrokerLog, log_rows
from escrowmq.pipeline.session import local_session
from escrowmq.pipeline.transactions import count_ids, join_loose
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
    windows: int | None = None,
    sample: str | None = None,
    state: Path | None = None,
    keeps_classes: bool = False,
) -> Verdict:
    """Audit a run folder (see :mod:`escrowmq.pipeline.audit.manifest`), and write ``verdict.json`` and ``report.html``
    there.

    The log is read from the broker that the manifest names, or from its data folder, which may be in use. ``spark``
    None starts a session for the audit: on this machine, or on the cluster ``master`` (``spark://HOST:PORT``), whose
    workers must see the run folder under the same path. ``progress`` is called with the current step. ``windows`` is
    the number of hash windows whose checksums are compared first; 0 reads all rows at once, None chooses by the size of
    the log. It does not change the verdict. ``sample`` (``"1%"``) compares only that share of the ids, chosen by their
    hash. ``state`` is a file that remembers the sums of the log, so that the next audit reads only new messages.
    ``keeps_classes``: Java keeps the classes of a session on this machine, so that later ones start faster. A
    disagreement is a verdict, not an error. Raises Misuse if the folder, one of its databases or Java is missing, and
    if classes cannot be kept.
    """
    if keeps_classes and (spark is not None or not (master or "local").startswith("local")):
        raise Misuse(Code.BAD_ARGUMENT, "only an audit with Spark on this machine keeps classes")
    on_step = progress or (lambda _: None)
    parts = None if sample is None else parse_sample(sample)
    if state is not None and windows == 0:
        raise Misuse(Code.BAD_ARGUMENT, "an audit that reads all rows has no state", "leave out one of the two")
    remembered = None if state is None else State.read(state)
    manifest = Manifest.read(folder)
    for name in manifest.tables:  # a variable that is missing is named before Spark starts
        manifest.table_url(name)
    with unwrap_errors(), ExitStack() as stack:
        on_step("reading the limits of the log")
        rows = log_rows(manifest.log_url, manifest.topics)
        covered = read_coverage(manifest.log_url, (*manifest.topics, HALF_VIEW_NAME))
        if spark is None:
            on_step("starting Spark")
            spark = stack.enter_context(
                local_session("escrowmq audit", rows=rows, master=master, keeps_classes=keeps_classes)
            )
        on_step("planning")
        events = Events.read(folder / manifest.events if manifest.events else None)
        log = BrokerLog(spark, manifest.log_url, whole=not covered.incomplete)
        readings = Readings(spark, manifest, log, parts)
        if windows is None:
            windows = WINDOWS if rows > FEW_ROWS or state is not None else 0
        verdict, pictures = audit(
            manifest, readings, events, covered, windows=windows, state=remembered, progress=on_step
        )
        on_step("keeping Java's classes" if keeps_classes else "stopping Spark")
    verdict.write(folder)
    if remembered is not None:
        remembered.write()
    if page:
        on_step("drawing the report")
        write_page(folder, verdict, pictures, events)
    return verdict


def audit(
    manifest: Manifest,
    readings: Readings,
    events: Events,
    covered: Coverage = Coverage(),
    *,
    windows: int = WINDOWS,
    state: State | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Verdict, Pictures]:
    """Compare all sides and measure the transactions; return the verdict and the numbers of the charts. Only frames of
    a bounded size are collected. ``covered``: what the log no longer contains. ``windows`` (see
    :func:`escrowmq.pipeline.audit.comparing.tally_sides`) and ``state`` do not change the verdict."""
    every = [*manifest.comparisons, *_list_consumer_comparisons(manifest)]
    tied = list(range(len(manifest.comparisons), len(every)))
    judges = [comparison.judges for comparison in every]
    labels = {number: " → ".join(map(manifest.label, c.sides)) for number, c in enumerate(manifest.comparisons)}
    with ExitStack() as stack:
        stack.callback(readings.close)
        sides = readings.read_rows(every)
        if state is not None:
            sides = state.attach(
                sides, make_key(manifest, every, sides, windows, readings.sample), manifest, readings.log
            )
        stack.enter_context(_without_compression(readings.spark))
        begun = stack.enter_context(_persist(readings.read_transactions()))
        beside = stack.enter_context(ThreadPoolExecutor(1))  # Spark plans one with a core, and runs the other meanwhile
        measuring = beside.submit(_measure, begun)
        progress("comparing checksums" if windows else "comparing all rows")
        done = stack.enter_context(tally_sides(sides, windows, tied, keep=True))
        wrong = frames.findings(done.tallies, judges).unionByName(frames.undecided(begun))
        wrong = stack.enter_context(_persist(wrong))
        progress("comparing the rows of windows that differ")
        kinds, sides_found = frames.count_ids(wrong, "kind"), _count_sides(manifest, done, wrong)
        found_rows = {c.found: side.found_rows for c, side in zip(manifest.comparisons, sides_found, strict=True)}
        progress("measuring transactions")
        total, ids, pictures = measuring.result()
        progress("naming what differs")
        verdict = Verdict(
            title=manifest.title,
            ids=ids,
            transactions=total["transactions"],
            committed=total["committed"],
            rolled_back=total["rolled_back"],
            consumed=_find_consumed(done, tied),
            **{kind: kinds.get(kind, 0) for kind in (*KINDS, "orphaned")},
            kills=len(events.kills),
            checks=total["asked"],
            consumers={name: found_rows[f"table:{table}"] for name, table in manifest.consumers.items()},
            comparisons=sides_found,
            findings=_name_findings(manifest, readings, covered, wrong, labels),
            findings_in_all=wrong.count(),
            beginnings=covered.beginnings,
            incomplete=covered.incomplete,
            differing=find_differing(done.rows, labels, wrong),
            sample=show_sample(readings.sample),
        )
        return verdict, pictures.add_differences(begun, wrong)


def _measure(begun: DataFrame) -> tuple[dict[str, Any], int, Pictures]:
    """Return the totals of all transactions, the number of distinct ids, and the counts for the charts. ``begun``: of
    :meth:`Readings.read_transactions`."""
    with _persist(join_loose(begun)) as transactions:
        total = timeline.count_totals(transactions)
        pictures = Pictures.of(transactions, begun, total["first_us"], total["last_us"])
        return total, count_ids(begun), pictures


@contextmanager
def _persist(frame: DataFrame) -> Iterator[DataFrame]:
    """Context manager: keep a frame in memory or on disk until the end of the block."""
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


def _list_consumer_comparisons(manifest: Manifest) -> list[Comparison]:
    """Return additional comparisons, by id alone and without findings, that find the ids in every consumer's table."""
    first, *others = [f"table:{table}" for table in manifest.consumers.values()] or [""]
    return [Comparison(first, other, (), ()) for other in others or [first]] if first else []


def _find_consumed(done: Tallied, numbers: Sequence[int]) -> int:
    """Return how many ids are in every consumer's table. ``numbers``: those of the comparisons of
    :func:`_list_consumer_comparisons`."""
    if not numbers:
        return 0
    return done.proven.get(numbers[0], 0) + frames.find_common_ids(done.tallies.where("expected > 0"), numbers).count()


def _name_findings(
    manifest: Manifest, readings: Readings, covered: Coverage, wrong: DataFrame, labels: Mapping[int, str]
) -> tuple[Finding, ...]:
    """Return the first MOST_FINDINGS findings, ordered by kind and id, with their explanations. ``labels``: names of
    the comparisons by number."""
    rows = [row.asDict() for row in wrong.orderBy("kind", "id", "comparison").limit(MOST_FINDINGS).collect()]
    reasons = explain_findings(manifest, readings, covered, rows)
    return tuple(
        Finding(r["kind"], r["id"], labels.get(r["comparison"], "still in escrow"), r["expected"], r["found"], reason)
        for r, reason in zip(rows, reasons, strict=True)
    )


def _count_sides(manifest: Manifest, done: Tallied, wrong: DataFrame) -> tuple[Side, ...]:
    counted = {row["comparison"]: row for row in frames.count_sides(done.tallies).collect()}
    bad = frames.count_ids(wrong, "comparison")
    result = []
    for number, comparison in enumerate(manifest.comparisons):
        row, proven = counted.get(number), done.proven.get(number, 0)
        ids, expected, found = (row["ids"], row["expected"], row["found"]) if row else (0, 0, 0)
        side, other = map(manifest.label, comparison.sides)
        result.append(Side(side, other, proven + ids, proven + expected, proven + found, bad.get(number, 0)))
    return tuple(result)
