"""The numbers of a report, as ``report.json`` has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

BUCKETS = 80
"""Bars of a chart over time, at most."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The numbers of a report. Times are microseconds since 1970, of the brokers' clocks; null where there is nothing."""

    url: str
    as_of_us: int
    """Ages are counted up to here: now, or for a folder the newest thing in its log."""
    start_us: int
    bucket_us: int
    """Series have up to BUCKETS values, one per ``bucket_us`` from ``start_us`` on."""
    totals: dict[str, int | None]
    """transactions, committed, rolled_back, expired, undecided, asked, asked_about, first_us, last_us, oldest_us; see timeline.totals"""
    topics: Rows
    """name, messages, committed, first_s, last_s; by volume"""
    volumes: dict[str, list[int]]
    """messages by topic"""
    begun: list[int]
    ended: dict[str, list[int]]
    """transactions by who decided them: producer, check, operator, exhausted, retention"""
    latencies: Rows
    """state, transactions, p50_us, p95_us, p99_us, most_us"""
    latency_steps: dict[str, dict[int, int]]
    """transactions by outcome and step: LATENCY_STEPS for each factor of ten above a microsecond"""
    producers: Rows
    """group, transactional, open, parked, oldest_us, broker"""
    consumers: Rows
    """group, topics, waiting, leased, retrying, dead, lag (all not yet acknowledged), broker"""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
