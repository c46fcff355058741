"""Runs that are to fail: batches and streams of format "escrow", what the driver is told, and standing still where a
broker dies.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from standing import Stage

Change = Callable[[DataFrame], DataFrame]
Act = Callable[[], object]
PATIENT = 60
"""Seconds for a broker that is there."""


def numbers(first: int, last: int) -> list[str]:
    """The keys of these rows, as ``visible`` gives them."""
    return sorted(str(number) for number in range(first, last))


def send(url: str, first: int, last: int, topic: str = "in") -> None:
    """Rows with their number as key and body, into one queue."""
    with mq.connect(url) as bus:
        bus.admin.create_topic(topic, 1, may_exist=True)
        messages = [mq.Message(topic, b"%d" % number, key=str(number)) for number in range(first, last)]
        assert bus.producer("filler").send_batch(messages).ok


def visible(url: str, topic: str) -> list[str]:
    """The keys in a topic; none if it is not there."""
    with mq.connect(url) as bus:
        if not any(one["name"] == topic for one in bus.admin.topics()):
            return []
        return sorted(bus.admin.read(topic, columns=["key"]).read_all()["key"].to_pylist())


def undecided(url: str) -> int:
    """How many transactions are open."""
    with mq.connect(url) as bus:
        return len(bus.admin.transactions(state="undecided"))


def rows(spark: SparkSession, first: int, last: int) -> DataFrame:
    """Rows as ``send`` sends them, to be written by one task."""
    number = f.col("id").cast("string")
    return spark.range(first, last, numPartitions=1).select(number.alias("key"), number.alias("body"))


def read_batch(spark: SparkSession, url: str, **options: Any) -> int:
    """Read a topic; how many rows."""
    return spark.read.format("escrow").options(**{"topic": "in", "url": url} | options).load().count()


def read_stream(spark: SparkSession, url: str, checkpoint: Path, **options: Any) -> list[list[str]]:
    """Read all there is as a stream: the keys of its batches."""
    batches: list[list[str]] = []

    def each(frame: DataFrame, _: int) -> None:
        batches.append([row["key"] for row in frame.select("key").collect()])

    stream = spark.readStream.format("escrow").options(**{"topic": "in", "url": url} | options).load()
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    return batches


def write_batch(frame: DataFrame, url: str, topic: str | None, sink: Mapping[str, Any] | None = None) -> None:
    """Write a table; ``topic`` None: the rows have a column."""
    given = {"url": url, "timeout": PATIENT} | ({"topic": topic} if topic else {})
    frame.write.format("escrow").mode("append").options(**given | dict(sink or {})).save()


def write_stream(
    spark: SparkSession,
    url: str,
    checkpoint: Path,
    topic: str | None = "out",
    change: Change = lambda frame: frame,
    *,
    source: Mapping[str, Any] | None = None,
    sink: Mapping[str, Any] | None = None,
) -> None:
    """Stream all there is of topic "in", changed, into another topic. ``source`` and ``sink``: options."""
    asked: dict[str, Any] = {"topic": "in", "url": url, "timeout": PATIENT} | dict(source or {})
    stream = spark.readStream.format("escrow").options(**asked).load().select("key", "body")
    writer = change(stream).writeStream.format("escrow").option("checkpointLocation", str(checkpoint))
    given = {"url": url, "timeout": PATIENT} | ({"topic": topic} if topic else {})
    writer.options(**given | dict(sink or {})).trigger(availableNow=True).start().awaitTermination()


def refused(act: Act, *words: str, stream: bool = False) -> None:
    """``act`` fails on the driver, with an error that says all these words (a stream's: in its
    StreamingQueryException)."""
    with pytest.raises(StreamingQueryException if stream else Exception) as problem:
        act()
    said = str(problem.value)
    assert not [word for word in words if word not in said], said


def refused_after(
    spark: SparkSession,
    folder: Path,
    point: str,
    kill: Act,
    act: Act,
    *words: str | tuple[str, ...],
    stream: bool = False,
) -> None:
    """:func:`refused`, because of ``kill`` at a failpoint. An ``act`` that has little patience may fail before it comes
    there, on a machine that stands still: then it is done again. Of a tuple of words, one is said."""
    reached = threading.Event()
    for number in itertools.count():
        with (
            pytest.raises(StreamingQueryException if stream else Exception) as problem,
            standing(spark, folder / str(number), point, kill, reached),
        ):
            act()
        if reached.is_set():
            break
    said = str(problem.value)
    every = [(word,) if isinstance(word, str) else word for word in words]
    assert all(any(one in said for one in either) for either in every), said


@contextlib.contextmanager
def standing(
    spark: SparkSession, folder: Path, point: str, act: Act, reached: threading.Event | None = None
) -> Iterator[None]:
    """While inside, the first of Spark's Python processes that comes to the failpoint stands still until ``act`` is
    done. That none comes is an error, unless ``reached`` is given, to be set."""
    stage = Stage.of(spark)
    stage.open(folder, [point])
    problems: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        try:
            while not (folder / point).exists():
                if over.wait(0.01) and not (folder / point).exists():
                    assert reached is not None, f"never reached: {point}"
                    return
            if reached is not None:
                reached.set()
            act()
        except BaseException as problem:
            problems.append(problem)
        finally:
            (folder / point).unlink(missing_ok=True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        stage.close()
        assert not problems, problems
