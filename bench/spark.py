"""Spark: a topic beside the same rows in Parquet, batch and stream writes, the audit and reconciliation as they
grow."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _harness import Report, arguments, served
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from escrowmq.pipeline.audit import compare
from escrowmq.pipeline.audit.windows import WINDOWS, window
from escrowmq.pipeline.session import local_session
from escrowmq.spark.source import register

STEP = 20_000
"""Rows of one batch that is sent."""
FILES = 4
"""Parquet files: about as many partitions as the topic has."""
DISTINCT = 4096
"""Different bodies; random, so that no codec has an easy time."""
TOPIC = "bench-spark"


def batches(rows: int, body: int) -> Iterator[pa.RecordBatch]:
    """``key``, ``body``: keys are ``o-0``, ``o-1``, ...; bodies begin with their key's number."""
    some = pa.array([os.urandom(body) for _ in range(DISTINCT)], pa.binary())
    for start in range(0, rows, STEP):
        numbers = np.arange(start, min(start + STEP, rows))
        keys = pa.array(np.char.add("o-", numbers.astype(str)), pa.utf8())
        yield pa.RecordBatch.from_pydict({"key": keys, "body": some.take(pa.array(numbers % DISTINCT))})


def fill(bus: mq.Bus, rows: int, body: int, topic: str = TOPIC) -> None:
    """Put the rows into a topic, by columns."""
    producer = bus.producer("bench-fill")
    for batch in batches(rows, body):
        named = batch.append_column("topic", pa.repeat(pa.scalar(topic), batch.num_rows))
        producer.send_batch(named).check()


def rate(rows: int, act: Callable[[], Any]) -> float:
    """Rows a second of one run."""
    start = time.perf_counter()
    act()
    return rows / (time.perf_counter() - start)


def noop(frame: DataFrame) -> None:
    """All columns of all rows, into nothing."""
    frame.write.format("noop").mode("overwrite").save()


def reads(report: Report, spark: SparkSession, folder: Path, url: str, rows: int) -> None:
    """A topic from its folder and from a served broker, beside the same columns in Parquet."""
    topic = spark.read.format("escrow").option("topic", TOPIC)
    away = folder / "read.parquet"
    topic.load(f"file:{folder / 'data'}").write.option("compression", "lz4").parquet(str(away))
    sources = {
        "Parquet": spark.read.parquet(str(away)),
        "topic, folder": topic.load(f"file:{folder / 'data'}"),
        "topic, served": topic.load(url),
    }
    parquet = 0.0
    for name, frame in sources.items():
        goal = "" if name == "Parquet" else ">= 500,000; >= half of Parquet"
        whole = report.measure(
            f"{name}: all columns", "rows/s", goal, lambda frame=frame: rate(rows, lambda: noop(frame))
        )
        if name == "Parquet":
            parquet = whole
        elif whole and parquet:
            report.add(f"{name}: share of Parquet's rate, all columns", "%", ">= 50", [100 * whole / parquet])
        report.measure(f"{name}: count", "rows/s", "", lambda frame=frame: rate(rows, lambda: frame.count()))
    shutil.rmtree(away)


def writes(report: Report, spark: SparkSession, url: str, rows: int, body: int, folder: Path) -> None:
    """A DataFrame into a topic, as a batch and as a stream; sync before every answer, exactly once."""
    source = folder / "write.parquet"
    source.mkdir()
    schema = pa.schema([("key", pa.utf8()), ("body", pa.binary())])
    every = list(batches(rows, body))
    for number in range(FILES):
        with pq.ParquetWriter(source / f"part-{number}.parquet", schema, compression="lz4") as writer:
            for batch in every[number::FILES]:
                writer.write_batch(batch)
    numbers = iter(range(1000))

    def batch() -> float:
        frame = spark.read.parquet(str(source))
        writer = frame.write.format("escrow").mode("append").option("topic", f"bench-write-{next(numbers)}")
        return rate(rows, lambda: writer.save(url))

    def stream() -> float:
        number = next(numbers)
        frame = spark.readStream.schema("key string, body binary").parquet(str(source))
        writer = frame.writeStream.format("escrow").option("topic", f"bench-write-{number}")
        writer = writer.option("checkpointLocation", str(folder / f"checkpoint-{number}")).trigger(availableNow=True)
        return rate(rows, lambda: writer.start(url).awaitTermination())

    report.measure("batch write, served", "rows/s", "", batch)
    report.measure("stream write, served, exactly once", "rows/s", "", stream)


@dataclass(frozen=True, slots=True)
class Sides:
    """What was produced and what was consumed: ids and amounts, with one lost, one repeated, one altered and one
    leaked, all of them ids of one window.

    One lost and one leaked cancel out in rows, one altered changes none, and one repeated is a row too many: with an
    expected side that is unique the window's distinct ids agree, and its rows but for one (a lost row more would be a
    fifth finding). ``twice``: the expected side with the repeated id twice as well, as a producer would have it that
    put one message two times: then rows, too, agree in every window.
    """

    expected: DataFrame
    twice: DataFrame
    found: DataFrame
    planted: dict[str, str]
    """The id of each kind."""


def sides(spark: SparkSession, rows: int, folder: Path) -> Sides:
    """Both sides as Parquet, the found one in another order."""
    number = f.col("id")
    every = spark.range(rows).select(
        f.concat(f.lit("o-"), number.cast("string")).alias("order"), (number * 7919 % 10_007).alias("amount")
    )
    planted = _of_one_window(every.select("order"), spark.range(100 * WINDOWS))
    order = f.col("order")
    amount = f.when(order == planted["altered"], -1).otherwise(f.col("amount"))
    repeated = every.where(order == planted["repeated"])
    leaked = every.where(order == planted["lost"]).withColumn("order", f.lit(planted["leaked"]))
    found = every.where(order != planted["lost"]).withColumn("amount", amount)
    found = found.unionByName(repeated).unionByName(leaked).orderBy(f.xxhash64("order", f.lit(1)))
    paths = {name: str(folder / f"{name}.parquet") for name in ("produced", "again", "consumed")}
    for name, frame in (("produced", every), ("again", repeated), ("consumed", found)):
        frame.write.mode("overwrite").parquet(paths[name])
    read = spark.read.parquet
    made = Sides(read(paths["produced"]), read(paths["produced"], paths["again"]), read(paths["consumed"]), planted)
    _same_counts(made)
    return made


def _of_one_window(orders: DataFrame, numbers: DataFrame) -> dict[str, str]:
    """Three ids of a window that has them, and one that is not there."""
    number = window(f.lit("o-17"), WINDOWS)
    inside = orders.where(window(f.col("order"), WINDOWS) == number).orderBy("order").limit(3).collect()
    others = numbers.select(f.concat(f.lit("none-"), "id").alias("order"))
    none = others.where(window(f.col("order"), WINDOWS) == number).orderBy("order").limit(1).collect()
    ids = [row["order"] for row in (*inside, *none)]
    return dict(zip(("lost", "repeated", "altered", "leaked"), ids, strict=True))


def _same_counts(made: Sides) -> None:
    """The planted ids share a window, and its counts are what they were made to be."""
    place = window(f.col("order"), WINDOWS)
    spark = made.found.sparkSession
    ids = spark.createDataFrame([(one,) for one in made.planted.values()], "order string")
    [row] = ids.select(place.alias("window")).distinct().collect()
    counts = [
        frame.where(place == row["window"]).agg(f.count("*"), f.countDistinct("order")).collect()[0]
        for frame in (made.expected, made.twice, made.found)
    ]
    (rows, ids_there), twice, found = map(tuple, counts)
    assert twice == found == (rows + 1, ids_there), counts


def audited(expected: DataFrame, found: DataFrame, unique: str | None, planted: dict[str, str]) -> str:
    """One audit, which must name the four, as a document."""
    compared = compare(expected, found, id="order", columns=["amount"], unique=unique)
    findings = sorted(tuple(row) for row in compared.findings.collect())
    compared.close()
    assert {(kind, name) for kind, name, *_ in findings} == set(planted.items()), findings
    assert len(findings) == len(planted), findings
    assert compared.kinds == dict.fromkeys(planted, 1), compared.kinds
    told = {name: getattr(compared, name) for name in ("ids", "expected_rows", "found_rows", "wrong_ids", "kinds")}
    return json.dumps({**told, "findings": findings})


def jobs(report: Report, spark: SparkSession, rows: int, folder: Path) -> None:
    """Audit and reconciliation at 10^6, 10^7, ... up to ``rows`` ids: seconds, and what a row costs."""
    sizes = [10**power for power in range(6, 10) if 10**power < rows] + [rows]
    for size in sizes:
        made = sides(spark, size, folder)
        goal = "< 40" if size == 10**7 else ""
        audits = {"one side unique": (made.expected, "expected"), "nothing known": (made.twice, None)}
        for name, (expected, unique) in audits.items():
            audit = partial(audited, expected, made.found, unique, made.planted)
            _same_told(report, f"audit, {name}, {size:,} ids against {size:,}", size, goal, audit)
        if (reconciled := _reconcile()) is not None:
            name = f"reconcile, {size:,} ids against {size:,}"
            seconds(report, name, size, goal, lambda r=reconciled, m=made: r(m.expected, m.found))


def _same_told(report: Report, name: str, rows: int, goal: str, audit: Callable[[], str]) -> None:
    """The seconds of an audit, which says the same again, however often it was measured."""
    if report.wants(name):
        told: set[str] = set()
        seconds(report, name, rows, goal, lambda: told.add(audit()))
        told.add(audit())
        assert len(told) == 1, "another audit says something else"


def seconds(report: Report, name: str, rows: int, goal: str, act: Callable[[], None]) -> None:
    """Add the seconds of an act, and microseconds a row."""
    if not report.wants(name):
        return
    values = []
    for _ in range(report.repeats):
        start = time.perf_counter()
        act()
        values.append(time.perf_counter() - start)
    report.add(name, "s", goal, values)
    report.add(f"{name}: a row", "us", "", [statistics.median(values) * 1e6 / rows])


def _reconcile() -> Callable[[DataFrame, DataFrame], None] | None:
    try:
        from escrowmq.pipeline.reconcile import reconcile
    except ImportError:
        return None
    from datetime import UTC, datetime

    now = datetime.now(UTC)

    def act(expected: DataFrame, found: DataFrame) -> None:
        at = f.lit(datetime(2020, 1, 1, tzinfo=UTC)).alias("at")
        half, commits = (
            frame.select(f.col("order").alias("id"), at, f.col("amount").alias("digest")) for frame in (expected, found)
        )
        told = reconcile(half, commits, settled_before=now)
        assert (told.missing, told.unexpected, told.differing) == (1, 1, 1), told

    return act


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=10**6, help="ids of the largest audit")
    parser.add_argument(
        "--messages", type=lambda text: int(float(text)), default=10**6, help="messages of reads and writes"
    )
    options = parser.parse_args()
    report = Report("spark", options)
    report.begin()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder)))
        url = None
        if any(map(report.wants, ("Parquet: all columns", "topic", "write"))):
            with mq.connect(f"file:{folder / 'data'}") as bus:
                fill(bus, options.messages, options.body)
            url = stack.enter_context(served(folder / "data"))  # outlives the session, whose processes stay connected
        spark = stack.enter_context(local_session("bench", rows=max(options.rows, options.messages)))
        register(spark)
        if url is not None:
            reads(report, spark, folder, url, options.messages)
            if report.wants("write"):
                writes(report, spark, url, options.messages // 2, options.body, folder)
        jobs(report, spark, options.rows, folder)
    report.end()


if __name__ == "__main__":
    main()
