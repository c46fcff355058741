"""Creates a plan: reads the selected rows page by page, freezes them, and collects a summary for the operator; and
predicts the outcome of every unprocessed row (dry run)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import Code, error
from escrowmq.plans import frozen
from escrowmq.plans.outcomes import Counts, Outcome, Sample, add_counts, count_outcomes
from escrowmq.plans.plan import Plan
from escrowmq.plans.subjects.seam import Subject
from escrowmq.platform.failpoints import reach

DRY_RUN = "dry-run.json"
"""Name of the file with the result of the last dry run."""
SAMPLES = 10
"""Number of sample rows in a plan, spread over its set."""
MOST_VALUES = 1000
"""Maximum number of distinct values of a column that are counted separately."""
SHOWN_VALUES = 20
_OTHERS = "…"


def make(
    subject: Subject,
    folder: Path,
    selection: Mapping[str, Any],
    *,
    by: str,
    why: str | None,
    without_missing: bool,
    progress: Callable[[int], None],
) -> Plan:
    """Freeze the rows in ``folder``; return the plan."""
    missing = subject.missing()
    if missing and not without_missing:
        away = ", ".join(f"{one['broker']} ({one['reason']})" for one in missing)
        hint = "wait for it, or use --without-missing: then none of its rows are in the plan"
        raise error(Code.BROKER_AWAY, f"the set would be incomplete; unavailable: {away}", hint)
    digest = frozen.Digest(subject.act, subject.settings, subject.identity)
    values: dict[str, Counter[str]] = {column: Counter() for column in subject.counted}
    rows = 0
    for batch in frozen.write(folder, subject.schema, subject.pages()):
        digest.add(batch)
        rows += batch.num_rows
        for column, counter in values.items():
            _count(counter, batch.column(column))
        progress(rows)
    not_found = subject.not_found()
    if not rows:
        raise error(Code.NOT_FOUND, "the selection matches no rows", "list the rows, and change the selection")
    reach("plans.set-written")
    with frozen.open_set(folder) as found:
        at = sorted({number * rows // SAMPLES for number in range(SAMPLES)})
        samples = tuple({"row": row, **found.batch_from(row, 1).to_pylist()[0]} for row in at)
    return Plan(
        id=folder.name, act=subject.act, settings=dict(subject.settings), selection=_to_stored(selection),
        source=subject.source, missing=tuple(missing), by=by, why=why, made_us=time.time_ns() // 1000, rows=rows,
        digest=digest.hex(), file_hash=frozen.file_hash(folder), identity=tuple(subject.identity), samples=samples,
        counts={column: _largest(counter) for column, counter in values.items()}, not_found=len(not_found),
    )  # fmt: skip


def preview(
    subject: Subject, plan: Plan, rows: frozen.FrozenSet, samples: int, progress: Callable[[int, int], None]
) -> Counts:
    """Count the predicted outcome of each row, with ``samples`` rows of each outcome."""
    counts: dict[str, int] = {}
    shown = dict[Outcome, list[Sample]]()
    for first, batch in rows.batches(plan.next):
        outcomes = subject.preview(batch)
        counts = add_counts(counts, count_outcomes(outcomes))
        for outcome in map(Outcome, np.unique(outcomes).tolist()):
            of_it = shown.setdefault(outcome, [])
            for at in np.flatnonzero(outcomes == outcome)[: samples - len(of_it)].tolist():
                of_it.append(Sample(first + at, outcome.name.lower(), batch.slice(at, 1).to_pylist()[0]))
        progress(first + batch.num_rows - plan.next, plan.rows - plan.next)
    chosen = [sample for outcome in sorted(shown) for sample in shown[outcome]]
    return Counts(plan.id, plan.rows - plan.next, time.time_ns() // 1000, counts, chosen, plan.next)


def _to_stored(selection: Mapping[str, Any]) -> dict[str, Any]:
    """Return a selection as it is stored: long lists of ids or items become their number, because the set contains
    them."""
    return {
        name: f"{len(value):,} {name}" if isinstance(value, list | tuple) and len(value) > SHOWN_VALUES else value
        for name, value in selection.items()
        if value is not None
    }


def _count(counter: Counter[str], column: pa.Array) -> None:
    for entry in pc.value_counts(column).to_pylist():
        value = "" if entry["values"] is None else str(entry["values"])
        counter[value if value in counter or len(counter) < MOST_VALUES else _OTHERS] += entry["counts"]


def _largest(counter: Counter[str]) -> dict[str, int]:
    """Return the most frequent values, and the sum of the rest."""
    others = counter.pop(_OTHERS, 0)
    largest = dict(counter.most_common(SHOWN_VALUES))
    others += counter.total() - sum(largest.values())
    return largest | ({_OTHERS: others} if others else {})
