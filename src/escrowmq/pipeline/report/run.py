"""Measurement of a broker or a data folder: from a URL to a report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from escrowmq.connecting import connect
from escrowmq.pipeline import timeline
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.log import BrokerLog
from escrowmq.pipeline.report import measures
from escrowmq.pipeline.report.measures import BUCKETS, SECOND, Report, Rows
from escrowmq.pipeline.session import local_session
from escrowmq.pipeline.transactions import join_loose

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
    ``spark`` None starts a session for the report, here or on the cluster ``master``. ``progress`` is called with the
    current step. Raises the errors of connecting, and Misuse without PySpark or Java."""
    on_step = progress or (lambda _: None)
    folder = url.startswith("file:")
    with unwrap_errors(), ExitStack() as stack:
        bus = stack.enter_context(connect(url, read_only=True) if folder else connect(url))
        on_step("reading the topics and groups")
        topics = bus.admin.topics()
        producers, consumers = _list_producers(bus.admin), _list_consumers(bus.admin)
        incomplete = "; ".join(one["missing"] for one in bus.admin.health() if "missing" in one)
        if spark is None:
            on_step("starting Spark")
            rows = sum(queue["end"] - queue["head"] for topic in topics for queue in topic["queues"])
            spark = stack.enter_context(local_session("escrowmq report", rows=rows, master=master))
        on_step("measuring")
        log = BrokerLog(spark, url, whole=not incomplete)
        as_of_us = None if folder else time.time_ns() // 1000
        measured = measure(log, sorted({topic["name"] for topic in topics}), url, as_of_us)
        return replace(measured, producers=producers, consumers=consumers, incomplete=incomplete)


def measure(log: BrokerLog, topics: list[str], url: str, as_of_us: int | None) -> Report:
    """Compute the report of a log (see :mod:`escrowmq.pipeline.report.measures`): about one hundred numbers.
    ``as_of_us``: the time from which ages are counted; None: the newest time in the log."""
    with ExitStack() as stack:
        transactions = join_loose(log.transactions()).persist()
        stack.callback(transactions.unpersist)
        total = timeline.count_totals(transactions)
        found: Rows = []
        if topics:
            seconds = measures.count_by_second(log.topics(topics, ["topic", "stored", "state"])).persist()
            stack.callback(seconds.unpersist)
            found = [row.asDict() for row in measures.summarize_topics(seconds).collect()]
        silent = {"messages": 0, "committed": 0, "first_s": None, "last_s": None}
        found += [{"topic": name, **silent} for name in set(topics) - {row["topic"] for row in found}]
        moments = [total["first_us"], total["last_us"]]
        moments += [at and at * SECOND for row in found for at in (row["first_s"], row["last_s"])]
        known = [at for at in moments if at is not None]
        start_s, end_s = min(known, default=0) // SECOND, max(known, default=0) // SECOND
        bucket_s = (end_s - start_s) // BUCKETS + 1
        count = (end_s - start_s) // bucket_s + 1
        over_time, latency_steps = timeline.count_charts(
            transactions, start_s * SECOND, bucket_s * SECOND, ended_by="decided_by", latency_by="state"
        )
        ended = timeline.make_series(over_time, count)
        volumes = timeline.collect_counts(measures.count_volumes(seconds, start_s, bucket_s)) if topics else {}
        latencies = [row.asDict() for row in measures.measure_latencies(timeline.unpack(transactions)).collect()]
        return Report(
            url=url,
            as_of_us=max(known, default=0) if as_of_us is None else as_of_us,
            start_us=start_s * SECOND,
            bucket_us=bucket_s * SECOND,
            totals=total,
            topics=sorted(found, key=lambda row: (-row["messages"], row["topic"])),
            volumes=timeline.make_series(volumes, count),
            begun=ended.pop("prepared", [0] * count),
            ended=ended,
            latencies=sorted(latencies, key=lambda row: row["state"]),
            latency_steps=latency_steps,
        )


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
