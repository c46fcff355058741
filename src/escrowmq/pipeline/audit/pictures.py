"""The numbers behind the audit's charts: a few hundred, collected from Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from escrowmq.pipeline import timeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BUCKETS = 160
"""Points in time that a chart shows."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """Counts by event and bucket of ``bucket_us`` from ``start_us`` (the first half message), and latencies by decider and step."""

    start_us: int
    bucket_us: int
    over_time: dict[str, list[int]]
    latencies: dict[str, dict[int, int]]

    @classmethod
    def of(cls, transactions: DataFrame, first_us: int | None, last_us: int | None) -> Pictures:
        """Collect the numbers of :func:`timeline.transactions`; empty when there are none."""
        if first_us is None or last_us is None:
            return cls(0, 1, {}, {})
        bucket_us = max((last_us - first_us) // BUCKETS + 1, 1)
        counts = timeline.collected(timeline.over_time(transactions, "state", first_us, bucket_us))
        latencies = timeline.collected(timeline.latencies(transactions, "decided_by"))
        return cls(first_us, bucket_us, timeline.series(counts, BUCKETS), latencies)
