"""Measurement of a broker or a data folder: from a URL to a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from escrowmq.connecting import connect
from escrowmq.pipeline import timeline
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.log import BrokerLog, Log
from escrowmq.pipeline.report import measures
from escrowmq.pipeline.report.measures import BUCKETS, Report, Rows
from escrowmq.pipeline.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from escrowmq.client.admin import Admin


def report(
    url: str,
    *,
    spark: SparkSession | None = None,
    master: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure brokers (one report for all) or a data folder, ``file:FOLDER``, which is only read and may be in use.

    ``spark`` None starts a session for the report, here or on the cluster ``master``. Raises the errors of connecting,
    and Misuse without PySpark or Java.
    """
    tell = progress or (lambda _: None)
    folder = url.startswith("file:")
    with unwrap_errors(), ExitStack() as stack:
        bus = stack.enter_context(connect(url, read_only=True) if folder else connect(url))
        tell("asking what there is")
        names = sorted({topic["name"] for topic in bus.admin.topics()})
        producers, consumers = _list_producers(bus.admin), _list_consumers(bus.admin)
        incomplete = "; ".join(one["missing"] for one in bus.admin.health() if "missing" in one)
        rows = sum(q["end"] - q["head"] for topic in bus.admin.topics() for q in topic["queues"])
        if spark is None:
            tell("starting Spark")
            spark = stack.enter_context(local_session("escrowmq report", rows=rows, master=master))
        tell("measuring")
        log = BrokerLog(spark, url, whole=not incomplete)
        as_of = None if folder else time.time_ns() // 1000
        measured = measure(log, names, url=url, as_of_us=as_of, producers=producers, consumers=consumers)
        return replace(measured, incomplete=incomplete)


def measure(log: Log, topics: list[str], *, url: str, as_of_us: int | None, producers: Rows, consumers: Rows) -> Report:
    """Collect the measures of a log (see :mod:`escrowmq.pipeline.report.measures`): some hundred numbers."""
    half = timeline.select_half(log.half(timeline.HALF_COLUMNS))
    transactions = timeline.unpack(timeline.pack(half, timeline.read_decisions(log))).persist()
    seconds = measures.count_by_second(log.topics(topics, ["topic", "stored", "state"])).persist() if topics else None
    try:
        total = timeline.compute_totals(transactions).collect()[0].asDict()
        found = [] if seconds is None else [row.asDict() for row in measures.summarize_topics(seconds).collect()]
        found += [_make_empty_topic(name) for name in set(topics) - {row["topic"] for row in found}]
        moments = [at for at in (total["first_us"], total["last_us"]) if at is not None]
        moments += [
            row[name] * measures.SECOND for row in found for name in ("first_s", "last_s") if row[name] is not None
        ]
        start = min(moments, default=0) // measures.SECOND * measures.SECOND
        span_s = (max(moments, default=start) - start) // measures.SECOND
        bucket_s = span_s // BUCKETS + 1
        count = span_s // bucket_s + 1
        bucket_us = bucket_s * measures.SECOND
        counts = timeline.collect_counts(timeline.count_over_time(transactions, "decided_by", start, bucket_us))
        ended = timeline.make_series(counts, count)
        begun = ended.pop("prepared", [0] * count)
        sent = None if seconds is None else measures.count_volumes(seconds, start // measures.SECOND, bucket_s)
        return Report(
            url=url,
            as_of_us=max(moments, default=0) if as_of_us is None else as_of_us,
            start_us=start,
            bucket_us=bucket_us,
            totals=total,
            topics=sorted(found, key=lambda row: (-row["messages"], row["topic"])),
            volumes={} if sent is None else timeline.make_series(timeline.collect_counts(sent), count),
            begun=begun,
            ended=ended,
            latencies=sorted(
                (row.asDict() for row in measures.measure_latencies(transactions).collect()), key=lambda r: r["state"]
            ),
            latency_steps=timeline.collect_counts(timeline.count_latencies(transactions, "state")),
            producers=producers,
            consumers=consumers,
        )
    finally:
        for frame in (transactions, seconds):
            if frame is not None:
                frame.unpersist()


def _make_empty_topic(topic: str) -> dict[str, Any]:
    return {"topic": topic, "messages": 0, "committed": 0, "first_s": None, "last_s": None}


def _list_producers(admin: Admin) -> Rows:
    wanted = ("group", "transactional", "open", "parked", "oldest_us", "broker")
    found = [{name: group.get(name) for name in wanted} for group in admin.producers()]
    return sorted(found, key=lambda group: (group["group"], group["broker"]))


def _list_consumers(admin: Admin) -> Rows:
    found = []
    for group in admin.groups():
        sums = {name: sum(queue[name] for queue in group["queues"]) for name in ("waiting", "leased", "retrying")}
        counts = {**sums, "dead": group["dead_letters"], "lag": sum(sums.values())}
        found.append({"group": group["name"], "topics": group["topics"], **counts, "broker": group["broker"]})
    return sorted(found, key=lambda group: (group["group"], group["broker"]))
