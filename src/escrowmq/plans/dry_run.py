"""Dry run: predicts the outcome of every unprocessed row without changing anything."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from escrowmq.plans.frozen import FrozenSet
from escrowmq.plans.outcomes import Counts, Outcome, Sample, Tally
from escrowmq.plans.plan import Plan
from escrowmq.plans.subjects.seam import Subject

NAME = "dry-run.json"


def preview(
    subject: Subject, plan: Plan, rows: FrozenSet, samples: int, progress: Callable[[int, int], None]
) -> Counts:
    """Count the predicted outcome of each row, with ``samples`` rows of each outcome."""
    tally, shown = Tally(), dict[Outcome, list[Sample]]()
    for first, batch in rows.batches(plan.next):
        outcomes = subject.preview(batch)
        tally.add(outcomes)
        for outcome in map(Outcome, np.unique(outcomes).tolist()):
            of_it = shown.setdefault(outcome, [])
            for at in np.flatnonzero(outcomes == outcome)[: samples - len(of_it)].tolist():
                of_it.append(Sample(first + at, outcome.name.lower(), batch.slice(at, 1).to_pylist()[0]))
        progress(first + batch.num_rows - plan.next, plan.rows - plan.next)
    return Counts(
        plan=plan.id,
        rows=plan.rows - plan.next,
        at_us=time.time_ns() // 1000,
        by_outcome=tally.by_outcome,
        samples=tuple(sample for outcome in sorted(shown) for sample in shown[outcome]),
        handled=plan.next,
    )
