"""The numbers behind the pictures: a few hundred rows, collected from Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from escrowmq.pipeline.audit import timeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Pictures:
    """``start_us``: the first half message. Series are per bucket of ``bucket_us``; latencies per step (see timeline)."""

    start_us: int
    bucket_us: int
    over_time: dict[str, list[int]]
    latencies: dict[str, dict[int, int]]

    @classmethod
    def of(cls, transactions: DataFrame, first_us: int | None, last_us: int | None) -> Pictures:
        """From :func:`timeline.transactions`; empty when there are none."""
        if first_us is None or last_us is None:
            return cls(0, 1, {}, {})
        bucket_us = max((last_us - first_us) // timeline.BUCKETS + 1, 1)
        series: dict[str, list[int]] = {}
        for row in timeline.over_time(transactions, first_us, bucket_us).collect():
            series.setdefault(row["event"], [0] * timeline.BUCKETS)[row["bucket"]] = row["number"]
        steps: dict[str, dict[int, int]] = {}
        for row in timeline.latencies(transactions).collect():
            steps.setdefault(row["decided_by"], {})[row["step"]] = row["number"]
        return cls(first_us, bucket_us, series, steps)
