"""The thin command around the comparison: read a run folder, compare, write the verdict and its page."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from escrowmq.pipeline.audit import frames, timeline
from escrowmq.pipeline.audit.events import Events
from escrowmq.pipeline.audit.exporting import export_log
from escrowmq.pipeline.audit.manifest import Manifest
from escrowmq.pipeline.audit.page import write_page
from escrowmq.pipeline.audit.pictures import Pictures
from escrowmq.pipeline.audit.readings import Readings
from escrowmq.pipeline.audit.verdict import Finding, Side, Verdict
from escrowmq.pipeline.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_FINDINGS = 500
"""Findings that are named; all are counted."""


def run(
    folder: Path,
    *,
    spark: SparkSession | None = None,
    progress: Callable[[str], None] | None = None,
    page: bool = True,
) -> Verdict:
    """Audit a run folder (see :mod:`escrowmq.pipeline.audit.manifest`); writes ``verdict.json`` and ``report.html`` there.

    ``spark`` None starts a local session for the time of the audit. ``progress`` hears what is being done. Raises
    Misuse when the folder, one of its databases or Java is missing; a disagreement is a verdict, not an error.
    """
    tell = progress or (lambda _: None)
    manifest = Manifest.read(folder)
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="escrowmq-audit-")))
        tell("reading the broker's log")
        rows = export_log(manifest, log)
        if spark is None:
            tell("starting Spark")
            spark = stack.enter_context(local_session("escrowmq audit", rows=rows))
        tell("comparing by id and content")
        events = Events.read(folder / manifest.events if manifest.events else None)
        verdict, pictures = audit(manifest, Readings(spark, manifest, log), events)
    verdict.write(folder)
    if page:
        tell("drawing the report")
        write_page(folder, verdict, pictures, events)
    return verdict


def audit(manifest: Manifest, readings: Readings, events: Events) -> tuple[Verdict, Pictures]:
    """Compare all sides and measure the run. Only frames of a bounded size are collected."""
    tallies = frames.tally(_witnesses(manifest, readings)).persist()
    half = readings.half().drop("body").persist()
    wrong = (
        frames.findings(tallies, [c.judges for c in manifest.comparisons]).unionByName(frames.undecided(half)).persist()
    )
    transactions = timeline.transactions(half, readings.decisions()).persist()
    try:
        kinds = {row["kind"]: row["ids"] for row in frames.ids_by_kind(wrong).collect()}
        sides = _sides(manifest, tallies, wrong)
        total = timeline.totals(transactions).collect()[0]
        places = [_place(manifest, table) for table in manifest.consumers.values()]
        verdict = Verdict(
            orders=half.select("id").distinct().count(),
            transactions=total["transactions"],
            committed=total["committed"],
            rolled_back=total["rolled_back"],
            consumed=frames.found_in_all(tallies, places).count() if places else 0,
            lost=kinds.get("lost", 0),
            repeated=kinds.get("repeated", 0),
            altered=kinds.get("altered", 0),
            leaked=kinds.get("leaked", 0),
            orphaned=kinds.get("orphaned", 0),
            kills=len(events.kills),
            checks=total["checks"],
            consumers={name: sides[place].found_rows for name, place in zip(manifest.consumers, places, strict=True)},
            comparisons=sides,
            findings=_named(manifest, wrong),
            findings_in_all=wrong.count(),
        )
        return verdict, Pictures.of(transactions, total["first_us"], total["last_us"])
    finally:
        for frame in (tallies, half, wrong, transactions):
            frame.unpersist()


def _witnesses(manifest: Manifest, readings: Readings) -> list[DataFrame]:
    """What every side says in the comparisons that it takes part in; the database tables in one frame, read once."""
    roles: dict[str, list[frames.Role]] = {}
    for number, c in enumerate(manifest.comparisons):
        roles.setdefault(c.expected, []).append(frames.Role(number, True, c.columns))
        roles.setdefault(c.found, []).append(frames.Role(number, False, c.columns))
    columns = {side: sorted({name for role in its for name in role.columns}) for side, its in roles.items()}
    tables = [side for side in roles if side.startswith("table:")]
    found = [
        frames.witnesses(readings.side(side, columns[side]), f.col("id"), frames.says(roles[side]))
        for side in roles
        if side not in tables
    ]
    if tables:
        said = [_said_by_table(side, roles[side], columns[side]) for side in tables]
        rows = readings.tables({side: columns[side] for side in tables})
        found.append(frames.witnesses(rows, f.col("cells")[0], f.coalesce(*said)))
    return found


def _said_by_table(side: str, roles: list[frames.Role], columns: list[str]) -> Column:
    """What a row says if it is of this table: its cells are the id and then ``columns``."""
    return f.when(f.col("name") == side, frames.says(roles, lambda name: f.col("cells")[columns.index(name) + 1]))


def _place(manifest: Manifest, table: str) -> int:
    """The number of the comparison that looks for effects in ``table``."""
    return next(n for n, c in enumerate(manifest.comparisons) if c.found == f"table:{table}")


def _named(manifest: Manifest, wrong: DataFrame) -> tuple[Finding, ...]:
    """The first findings, in the order of kind and id."""
    rows = wrong.orderBy("kind", "id", "comparison").limit(MOST_FINDINGS).collect()
    return tuple(
        Finding(row["kind"], row["id"], _between(manifest, row["comparison"]), row["expected"], row["found"])
        for row in rows
    )


def _between(manifest: Manifest, number: int) -> str:
    if number < 0:
        return "still in escrow"
    comparison = manifest.comparisons[number]
    return f"{manifest.label(comparison.expected)} → {manifest.label(comparison.found)}"


def _sides(manifest: Manifest, tallies: DataFrame, wrong: DataFrame) -> tuple[Side, ...]:
    counted = {row["comparison"]: row for row in frames.sides(tallies).collect()}
    bad = {row["comparison"]: row["ids"] for row in frames.ids_by_comparison(wrong).collect()}
    result = []
    for number, comparison in enumerate(manifest.comparisons):
        row = counted.get(number)
        ids, expected, found = (row["ids"], row["expected"], row["found"]) if row else (0, 0, 0)
        labels = manifest.label(comparison.expected), manifest.label(comparison.found)
        result.append(Side(*labels, ids, expected, found, bad.get(number, 0)))
    return tuple(result)
