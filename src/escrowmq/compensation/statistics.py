"""Report of one scheduler run, counters of all runs, and both as Prometheus metrics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _number(kind: str, meaning: str, default: float = 0) -> Any:
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of one run, or their sums over all runs. The meaning of each is also that of its metric."""

    recovered: int = _number("counter", "suspensions that this scheduler ended")
    taken: int = _number("counter", "ids found in the difference of the two sets")
    adopted: int = _number("counter", "ids adopted, or resumed, from runs with an expired lease")
    retried: int = _number("counter", "ids retried at the request of an operator")
    effects: int = _number("counter", "messages handled by the scheduler")
    committed: int = _number("counter", "transactions committed because their confirm was lost")
    resent: int = _number("counter", "messages that the application sent again")
    early: int = _number("counter", "ids already visible: still in consumption, or without an entry")
    away: int = _number("counter", "look-ups and commits deferred because a broker was unavailable")
    failed: int = _number("counter", "failed tries that will be repeated")
    waiting: int = _number("counter", "ids that became a case for an operator")
    settled: int = _number("counter", "completed ids")

    def as_dict(self) -> dict[str, Any]:
        """Return names and values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Counts):
    """Results of one run."""

    suspended: str | None = None
    """Reason why the set store was not used; None if it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics(Counts):
    """Counts since the start of this scheduler, and the state of its compensation after the last run."""

    runs: int = _number("counter", "completed runs of the scheduler")
    broken_off: int = _number("counter", "runs aborted by an error")
    suspended_runs: int = _number("counter", "runs that could not use the set store")
    suspended: int = _number("gauge", "1: the set store is not used")
    half_set: int = _number("gauge", "ids announced but not taken")
    commit_set: int = _number("gauge", "ids handled, with an announcement not yet taken")
    in_runs: int = _number("gauge", "ids taken but not settled")
    cases: int = _number("gauge", "cases waiting for an operator")
    settled_age: float = _number("gauge", "age in seconds of the first key that a recovery would read", 0.0)
    idle: float = _number("gauge", "seconds since the last completed run", 0.0)


class Counters:
    """Counters for :class:`Statistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._levels: dict[str, Any] = {}
        self._last_completed: float | None = None

    def add_run(self, report: Report, **levels: float) -> None:
        """Count a completed run; ``levels`` are the current gauges."""
        counts = report.as_dict()
        suspended = int(counts.pop("suspended") is not None)
        with self._lock:
            self._counts.update(counts, runs=1, suspended_runs=suspended)
            self._levels.update(levels, suspended=suspended)
            self._last_completed = time.monotonic()

    def add_aborted_run(self) -> None:
        """Count a run aborted by an error."""
        with self._lock:
            self._counts["broken_off"] += 1

    def snapshot(self) -> Statistics:
        """Return the current numbers."""
        with self._lock:
            idle = 0.0 if self._last_completed is None else time.monotonic() - self._last_completed
            return Statistics(**self._counts, **self._levels, idle=idle)


METRICS: dict[str, tuple[str, str]] = {
    one.name: (one.metadata["kind"], one.metadata["meaning"]) for one in fields(Statistics)
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
