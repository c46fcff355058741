"""Report of one scheduler run, counters of all runs, and both as Prometheus metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """Results of one run; counts are of ids unless stated otherwise."""

    suspended: str | None = None
    """Reason why the set store was not used; None if it was."""
    recovered: int = 0
    """1 if this run ended a suspension."""
    taken: int = 0
    """Found in the difference."""
    adopted: int = 0
    """Adopted, or resumed, from runs whose lease had expired."""
    retried: int = 0
    """Retried at the request of an operator."""
    effects: int = 0
    """Messages whose handler completed for the first time."""
    committed: int = 0
    """Transactions committed by the scheduler because their confirm was lost."""
    resent: int = 0
    """Sent again by the application."""
    early: int = 0
    """Already visible, with their effect or soon to have it: still in consumption, or without an entry."""
    away: int = 0
    """Deferred because a broker was unavailable."""
    failed: int = 0
    """Failed tries that will be repeated."""
    waiting: int = 0
    """New cases for an operator: stuck or a conflict."""
    settled: int = 0
    """Completed: settled in the set store."""

    def as_dict(self) -> dict[str, Any]:
        """Return names and values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the start of this scheduler, and the state of its compensation after the last run."""

    runs: int = 0
    """Completed runs."""
    broken_off: int = 0
    """Runs aborted by an error."""
    suspended_runs: int = 0
    """Runs that could not use the set store."""
    recovered: int = 0
    taken: int = 0
    adopted: int = 0
    retried: int = 0
    effects: int = 0
    committed: int = 0
    resent: int = 0
    early: int = 0
    away: int = 0
    failed: int = 0
    waiting: int = 0
    settled: int = 0
    """Sums of the fields of :class:`Report`."""
    suspended: int = 0
    """1 if it was suspended after the last run."""
    half_set: int = 0
    commit_set: int = 0
    in_runs: int = 0
    """Ids in the store after the last run."""
    cases: int = 0
    """Cases waiting for an operator after the last run."""
    settled_age: float = 0.0
    """Seconds between the brokers' clock and ``settled_us`` after the last run: the range of keys to recover."""
    idle: float = 0.0
    """Seconds since the last completed run; 0 if there was none."""

    def as_dict(self) -> dict[str, Any]:
        """Return names and numbers, for JSON."""
        return asdict(self)


class Counters:
    """Counters for :class:`Statistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._levels: dict[str, Any] = {}
        self._last_completed: float | None = None

    def add_run(self, report: Report, **levels: float) -> None:
        """Count a completed run; ``levels`` are the current gauges."""
        counts = {name: value for name, value in asdict(report).items() if name != "suspended"}
        counts |= {"runs": 1, "suspended_runs": int(report.suspended is not None)}
        with self._lock:
            self._add(counts)
            self._levels.update(levels, suspended=int(report.suspended is not None))
            self._last_completed = time.monotonic()

    def add_aborted_run(self) -> None:
        """Count a run aborted by an error."""
        with self._lock:
            self._add({"broken_off": 1})

    def _add(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def snapshot(self) -> Statistics:
        """Return the current numbers."""
        with self._lock:
            idle = 0.0 if self._last_completed is None else time.monotonic() - self._last_completed
            return Statistics(**self._counts, **self._levels, idle=idle)


# For Prometheus

METRICS: dict[str, tuple[str, str]] = {
    "runs": ("counter", "completed runs of the scheduler"),
    "broken_off": ("counter", "runs aborted by an error"),
    "suspended_runs": ("counter", "runs that could not use the set store"),
    "recovered": ("counter", "suspensions that this scheduler ended"),
    "taken": ("counter", "ids found in the difference of the two sets"),
    "adopted": ("counter", "ids adopted, or resumed, from runs with an expired lease"),
    "retried": ("counter", "ids retried at the request of an operator"),
    "effects": ("counter", "messages handled by the scheduler"),
    "committed": ("counter", "transactions committed because their confirm was lost"),
    "resent": ("counter", "messages that the application sent again"),
    "early": ("counter", "ids already visible: still in consumption, or without an entry"),
    "away": ("counter", "look-ups and commits deferred because a broker was unavailable"),
    "failed": ("counter", "failed tries that will be repeated"),
    "waiting": ("counter", "ids that became a case for an operator"),
    "settled": ("counter", "completed ids"),
    "suspended": ("gauge", "1: the set store is not used"),
    "half_set": ("gauge", "ids announced but not taken"),
    "commit_set": ("gauge", "ids handled, with an announcement not yet taken"),
    "in_runs": ("gauge", "ids taken but not settled"),
    "cases": ("gauge", "cases waiting for an operator"),
    "settled_age": ("gauge", "age in seconds of the first key that a recovery would read"),
    "idle": ("gauge", "seconds since the last completed run"),
}
"""Kind and meaning by name of a :class:`Statistics` number; exported as ``escrowmq_compensation_NAME``, in seconds."""


def metric_name(number: str) -> str:
    """Return the Prometheus name of a number of :class:`Statistics` (counters also get the suffix ``_total``)."""
    seconds = "_seconds" if number in ("settled_age", "idle") else ""
    return f"escrowmq_compensation_{number}{seconds}"


def collector(name: str, statistics: Callable[[], Statistics]) -> Any:
    """Return a ``prometheus_client`` collector, with the label ``name``, for ``registry.register(collector(...))``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    class SchedulerCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            numbers = statistics().as_dict()
            for number, (kind, meaning) in METRICS.items():
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                metric = family(metric_name(number), meaning, labels=["compensation"])
                metric.add_metric([name], numbers[number])
                yield metric

        def describe(self) -> Iterator[Metric]:
            return iter(())

    return SchedulerCollector()
