"""From a URL to ``report.json`` and ``report.html``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from escrowmq.connecting import connect
from escrowmq.pipeline.audit import timeline
from escrowmq.pipeline.audit.log import BrokerLog, Log
from escrowmq.pipeline.failures import told_plainly
from escrowmq.pipeline.report import measures
from escrowmq.pipeline.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from escrowmq.client.admin import Admin

BUCKETS = 80
"""Bars of a picture over time, at most."""
LATENCY_STEPS = 8
"""Bars per factor of ten."""
JSON, PAGE = "report.json", "report.html"

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the page shows. Times are microseconds since 1970, of the brokers' clocks; null where there is nothing."""

    url: str
    as_of_us: int
    """Ages are counted up to here: now, or for a folder the newest thing in its log."""
    start_us: int
    bucket_us: int
    """Series have up to BUCKETS values, one for each stretch of ``bucket_us`` from ``start_us`` on."""
    totals: dict[str, int | None]
    """transactions, committed, rolled_back, expired, undecided, asked, asked_about, first_us, last_us, oldest_us; see measures.totals"""
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

    def write(self, folder: Path) -> None:
        """Write ``report.json`` and ``report.html`` into ``folder``, which is made if need be."""
        from escrowmq.pipeline.report.page import page

        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=2)
        series = re.sub(r"\[[\d,\s]+\]", lambda found: " ".join(found[0].split()), text)  # numbers side by side
        (folder / JSON).write_text(series + "\n", encoding="utf-8")
        (folder / PAGE).write_text(page(self), encoding="utf-8")


def report(
    url: str,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure a broker (several: one report) or a data folder, ``file:FOLDER``, which is only read, in use or not.

    ``spark`` None starts a session for the time of it, here or on the cluster ``master``. Raises what connecting does, and
    Misuse without PySpark or a Java.
    """
    tell = progress or (lambda _: None)
    folder = url.startswith("file:")
    with told_plainly(), ExitStack() as stack:
        bus = stack.enter_context(connect(url, read_only=True) if folder else connect(url))
        tell("asking what there is")
        names = sorted({topic["name"] for topic in bus.admin.topics()})
        producers, consumers = _producers(bus.admin), _consumers(bus.admin)
        rows = sum(q["end"] - q["head"] for topic in bus.admin.topics() for q in topic["queues"])
        if spark is None:
            tell("starting Spark")
            spark = stack.enter_context(local_session("escrowmq report", rows=rows, master=master))
        tell("measuring")
        log = BrokerLog(spark, url)
        as_of = None if folder else time.time_ns() // 1000
        return measure(log, names, url=url, as_of_us=as_of, producers=producers, consumers=consumers)


def measure(log: Log, topics: list[str], *, url: str, as_of_us: int | None, producers: Rows, consumers: Rows) -> Report:
    """The measures of a log (see :mod:`escrowmq.pipeline.report.measures`), collected: some hundred numbers."""
    transactions = _transactions(log).persist()
    seconds = measures.by_second(log.topics(topics, ["topic", "stored", "state"])).persist() if topics else None
    try:
        total = measures.totals(transactions).collect()[0].asDict()
        found = [] if seconds is None else [row.asDict() for row in measures.topics(seconds).collect()]
        found += [_none(name) for name in set(topics) - {row["topic"] for row in found}]
        moments = [at for at in (total["first_us"], total["last_us"]) if at is not None]
        moments += [
            row[name] * measures.SECOND for row in found for name in ("first_s", "last_s") if row[name] is not None
        ]
        start = min(moments, default=0) // measures.SECOND * measures.SECOND
        span_s = (max(moments, default=start) - start) // measures.SECOND
        bucket_s = span_s // BUCKETS + 1
        count = span_s // bucket_s + 1
        volumes: dict[str, list[int]] = {}
        if seconds is not None:
            for row in measures.volumes(seconds, start // measures.SECOND, bucket_s).collect():
                volumes.setdefault(row["topic"], [0] * count)[row["bucket"]] = row["messages"]
        begun, ended = _over_time(transactions, start, bucket_s * measures.SECOND, count)
        steps: dict[str, dict[int, int]] = {}
        for row in measures.steps(transactions, LATENCY_STEPS).collect():
            steps.setdefault(row["state"], {})[row["step"]] = row["transactions"]
        return Report(
            url=url,
            as_of_us=max(moments, default=0) if as_of_us is None else as_of_us,
            start_us=start,
            bucket_us=bucket_s * measures.SECOND,
            totals=total,
            topics=sorted(found, key=lambda row: (-row["messages"], row["topic"])),
            volumes=dict(sorted(volumes.items())),
            begun=begun,
            ended=dict(sorted(ended.items())),
            latencies=sorted(
                (row.asDict() for row in measures.latencies(transactions).collect()), key=lambda r: r["state"]
            ),
            latency_steps={state: dict(sorted(by.items())) for state, by in sorted(steps.items())},
            producers=producers,
            consumers=consumers,
        )
    finally:
        for frame in (transactions, seconds):
            if frame is not None:
                frame.unpersist()


def _transactions(log: Log) -> DataFrame:
    from pyspark.sql import functions as f

    half = log.half(["transaction_id", "checks", "stored"]).select(
        f.col("transaction_id").alias("transaction"),
        f.col("checks").cast("long").alias("checks"),
        f.unix_micros("stored").alias("stored_us"),
    )
    decisions = log.decisions(["transaction_id", "state", "decided_by", "decided"]).select(
        f.col("transaction_id").alias("transaction"),
        "state",
        "decided_by",
        f.unix_micros("decided").alias("decided_us"),
    )
    return timeline.transactions(half, decisions)


def _over_time(
    transactions: DataFrame, start_us: int, bucket_us: int, count: int
) -> tuple[list[int], dict[str, list[int]]]:
    begun, ended = [0] * count, dict[str, list[int]]()
    for row in timeline.over_time(transactions, start_us, bucket_us).where("event = 'prepared'").collect():
        begun[row["bucket"]] = row["number"]
    for row in measures.deciders(transactions, start_us, bucket_us).collect():
        ended.setdefault(row["decided_by"], [0] * count)[row["bucket"]] = row["transactions"]
    return begun, ended


def _none(topic: str) -> dict[str, Any]:
    return {"topic": topic, "messages": 0, "committed": 0, "first_s": None, "last_s": None}


def _producers(admin: Admin) -> Rows:
    wanted = ("group", "transactional", "open", "parked", "oldest_us", "broker")
    found = [{name: group.get(name) for name in wanted} for group in admin.producers()]
    return sorted(found, key=lambda group: (group["group"], group["broker"]))


def _consumers(admin: Admin) -> Rows:
    found = []
    for group in admin.groups():
        sums = {name: sum(queue[name] for queue in group["queues"]) for name in ("waiting", "leased", "retrying")}
        counts = {**sums, "dead": group["dead_letters"], "lag": sum(sums.values())}
        found.append({"group": group["name"], "topics": group["topics"], **counts, "broker": group["broker"]})
    return sorted(found, key=lambda group: (group["group"], group["broker"]))
