"""Repeated audits, whose last result is a metric."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from escrowmq.errors import EscrowError, Misuse
from escrowmq.pipeline.audit.manifest import KINDS
from escrowmq.pipeline.audit.verdict import Verdict

METRICS: dict[str, tuple[str, str]] = {
    "runs": ("counter", "completed audits, by result: agree or disagree"),
    "broken_off": ("counter", "audits aborted by an error; the other metrics are then those of the audit before"),
    "wrong_ids": ("gauge", "ids that the last audit named, by kind"),
    "differing_ids": ("gauge", "ids that differ in the last audit, by comparison"),
    "compared_ids": ("gauge", "ids that the last audit compared, by comparison"),
    "completed_seconds": ("gauge", "end of the last completed audit, in seconds since 1970"),
    "took_seconds": ("gauge", "duration of the last completed audit, in seconds"),
}
"""Kind and meaning of each metric. Exported as ``escrowmq_audit_NAME``."""

_log = logging.getLogger(__name__)
Samples = dict[tuple[str, ...], float]


class Watched:
    """The audits of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: Counter[str] = Counter(agree=0, disagree=0)
        self._broken_off = 0
        self._last: tuple[Verdict, float, float] | None = None

    def add(self, verdict: Verdict | None, took: float) -> None:
        """Add an audit of ``took`` seconds; None for one that an error aborted."""
        with self._lock:
            if verdict is None:
                self._broken_off += 1
                return
            self._runs["agree" if verdict.agrees else "disagree"] += 1
            self._last = verdict, time.time(), took

    def list_samples(self) -> dict[str, tuple[tuple[str, ...], Samples]]:
        """Return, by metric, its label names and its values by label values. Gauges are left out before the first
        completed audit."""
        with self._lock:
            runs, broken_off, last = dict(self._runs), self._broken_off, self._last
        found: dict[str, tuple[tuple[str, ...], Samples]] = {
            "runs": (("result",), {(result,): count for result, count in runs.items()}),
            "broken_off": ((), {(): broken_off}),
        }
        if last is not None:
            verdict, completed, took = last
            sides = {(f"{side.expected} → {side.found}",): side for side in verdict.comparisons}
            found["wrong_ids"] = ("kind",), {(kind,): getattr(verdict, kind) for kind in (*KINDS, "orphaned")}
            found["differing_ids"] = ("comparison",), {name: side.wrong_ids for name, side in sides.items()}
            found["compared_ids"] = ("comparison",), {name: side.ids for name, side in sides.items()}
            found["completed_seconds"] = (), {(): completed}
            found["took_seconds"] = (), {(): took}
        return found


def keep_auditing(
    audit: Callable[[], Verdict],
    every: float,
    stop: threading.Event,
    watched: Watched,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> None:
    """Call ``audit`` at once, and then every ``every`` seconds from begin to begin, until ``stop`` is set; add each
    result to ``watched``, and pass it to ``on_verdict``. An audit that takes longer is followed by the next at once.
    Errors are logged and counted. Raises only errors of the first audit, and of these not the ones that pass (a broker
    is away): what is wrong with the manifest, the options or the program."""
    is_first = True
    while not stop.is_set():
        begun = time.monotonic()
        try:
            verdict = audit()
            watched.add(verdict, time.monotonic() - begun)
            on_verdict(verdict)
        except Exception as problem:  # a database that is away is an error of its driver, or of Spark
            if stop.is_set():  # the signal to stop also ended Spark's Java process
                _log.info("stopped during an audit: %s", problem)
                return
            known = isinstance(problem, EscrowError | OSError)
            if is_first and (isinstance(problem, Misuse) or not known):
                raise
            watched.add(None, time.monotonic() - begun)
            text = "the audit was aborted; it is repeated in its turn: %s"
            _log.error(text, problem, exc_info=None if known else problem)
        is_first = False
        stop.wait(max(every - (time.monotonic() - begun), 0))


def collector(watched: Watched) -> Any:
    """Return a collector of ``prometheus_client``: ``registry.register(collector(watched))``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    class AuditCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            for name, (labels, samples) in watched.list_samples().items():
                kind, meaning = METRICS[name]
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                metric = family(f"escrowmq_audit_{name}", meaning, labels=labels)
                for values, sample in samples.items():
                    metric.add_metric(values, sample)
                yield metric

        def describe(self) -> Iterator[Metric]:
            return iter(())

    return AuditCollector()
