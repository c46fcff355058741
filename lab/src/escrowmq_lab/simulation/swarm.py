"""Runs of many seeds, over several processes, or of one seed for inspection."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing import get_context

from escrowmq_lab.simulation.plan import Scale, draw
from escrowmq_lab.simulation.run import Result, Run

SEEDS_AT_ONCE = 4
"""Seeds per batch of a process."""


@dataclass(slots=True)
class Summary:
    """The results of many runs. ``failed``: the failed results; ``counts``: events of all histories, by "act kind"."""

    runs: int = 0
    failed: list[Result] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Virtual time of all runs."""
    took: float = 0.0
    """Wall time in seconds."""

    @property
    def ok(self) -> bool:
        """Return whether every promise held in every run."""
        return not self.failed

    def add(self, result: Result) -> None:
        """Add a result."""
        self.runs += 1
        self.seconds += result.seconds
        self.counts.update(result.counts)
        if not result.ok:
            self.failed.append(result)


def simulate(seed: int, scale: Scale = Scale(), *, keep: bool = False) -> Result:
    """Run one seed. ``keep``: with its whole trace."""
    return Run(draw(seed, scale), keep=keep).result()


def simulate_many(
    seeds: int | None,
    first: int = 0,
    *,
    jobs: int | None = None,
    scale: Scale = Scale(),
    minutes: float | None = None,
    on_progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Run ``seeds`` seeds from ``first`` on (None: until the time is over), in ``jobs`` processes (None: one per core);
    none starts after ``minutes``. ``on_progress`` is called from time to time."""
    began, summary = time.monotonic(), Summary()
    until = None if minutes is None else began + 60 * minutes
    batches = _batches(first, seeds)
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        for batch in batches:
            if until is not None and time.monotonic() >= until:
                break
            for result in _run_batch(batch, scale):
                summary.add(result)
            on_progress(summary)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(_run_batch, batch, scale) for batch in islice(batches, 2 * jobs)}
            while running:
                done = next(as_completed(running))
                running.discard(done)
                for result in done.result():
                    summary.add(result)
                on_progress(summary)
                if until is None or time.monotonic() < until:
                    running |= {pool.submit(_run_batch, batch, scale) for batch in islice(batches, 1)}
    summary.failed.sort(key=lambda result: result.seed)
    summary.took = time.monotonic() - began
    return summary


def _batches(first: int, seeds: int | None) -> Iterator[range]:
    for start in count(first, SEEDS_AT_ONCE):
        end = start + SEEDS_AT_ONCE if seeds is None else min(start + SEEDS_AT_ONCE, first + seeds)
        if start >= end:
            return
        yield range(start, end)


def _run_batch(batch: range, scale: Scale) -> list[Result]:
    return [simulate(seed, scale) for seed in batch]
