"""A broker that dies at plan, read, prepare or commit time: a clear error on the driver if it stays away, nothing of
the batch visible, and every row once when it is back.

Spark's processes stand still at a failpoint while the broker is killed, so nothing here depends on time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_runs import (
    numbers,
    refused,
    refused_after,
    rows,
    send,
    standing,
    undecided,
    visible,
    write_batch,
    write_stream,
)
from killing import Broker
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

import escrowmq as mq

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

LARGE, SIZE = 4096, 1 << 14
"""Bodies, and the bytes of each: far more than the first batch, and what is on its way when the broker dies."""
PATIENT = 120
"""Seconds, where the broker is there again: a Python process that lived on may look for it only after a while."""
HASTY = 1
"""Seconds, where it stays away."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("down") / "data")
    try:
        send(made.url, 0, 40)
        with mq.connect(made.url) as bus:
            bus.admin.create_topic("large", 1)
            messages = [mq.Message("large", bytes(SIZE), key=str(number)) for number in range(LARGE)]
            assert bus.producer("filler").send_batch(messages).ok
        yield made
    finally:
        made.kill()


@pytest.fixture
def up(broker: Broker) -> Iterator[Broker]:
    """The broker, which is there again after the test."""
    yield broker
    if broker.process.poll() is not None:
        broker.start()


@pytest.mark.invariant("I42")
@pytest.mark.parametrize(
    ("point", "there"),
    [
        pytest.param("spark.before-prepare", False, marks=pytest.mark.long),
        ("spark.before-decision", False),
        ("spark.after-decision", True),
    ],
)
def test_a_stream_whose_broker_dies_and_stays_away_fails_and_is_written_once_when_it_is_back(
    spark: SparkSession, up: Broker, tmp_path: Path, point: str, there: bool
) -> None:
    """After the decision, it is the plan of the next batch that fails."""
    run = lambda **more: write_stream(spark, up.url, tmp_path / "check", point, source=more, sink=more)  # noqa: E731
    words = ("errors.Unknown: ", (f"no broker answers at {up.url}", f"{up.url}: the connection was lost"))
    refused_after(spark, tmp_path / "told", point, up.kill, lambda: run(timeout=HASTY), *words, stream=True)
    up.start()
    assert visible(up.url, point) == (numbers(0, 40) if there else [])
    run(timeout=PATIENT)
    assert visible(up.url, point) == numbers(0, 40)
    assert undecided(up.url) == 0  # the next commit rolls back what the failed attempt left


@pytest.mark.invariant("I42")
@pytest.mark.parametrize("point", ["spark.before-prepare", "spark.before-decision"])
def test_a_batch_write_whose_broker_dies_and_stays_away_fails_and_leaves_nothing_visible(
    spark: SparkSession, up: Broker, tmp_path: Path, point: str
) -> None:
    run = lambda **more: write_batch(rows(spark, 0, 40), up.url, f"b.{point}", {"write_id": point, **more})  # noqa: E731
    words = ("errors.Unknown: ", (f"no broker answers at {up.url}", f"{up.url}: the connection was lost"))
    refused_after(spark, tmp_path / "told", point, up.kill, lambda: run(timeout=HASTY), *words)
    up.start()
    assert visible(up.url, f"b.{point}") == []
    run(timeout=PATIENT)
    assert visible(up.url, f"b.{point}") == numbers(0, 40)
    assert undecided(up.url) == 0


def test_a_batch_read_in_whose_middle_the_broker_dies(spark: SparkSession, up: Broker, tmp_path: Path) -> None:
    large = lambda wait: spark.read.format("escrow").options(topic="large", timeout=wait).load(up.url)  # noqa: E731
    sizes = lambda wait=HASTY: [tuple(row) for row in large(wait).select("key", f.length("body")).collect()]  # noqa: E731
    words = (f"TIMED_OUT: {up.url}: reading large/", f"from 0 to {LARGE}")
    refused_after(spark, tmp_path / "away", "spark.read-some", up.kill, sizes, *words)
    refused(sizes, f"TIMED_OUT: {up.url}: no broker answers")  # and at plan time
    up.start()
    with standing(spark, tmp_path / "back", "spark.read-some", up.kill_and_start):
        assert sizes(PATIENT) == [(str(number), SIZE) for number in range(LARGE)]


def test_a_stream_read_in_whose_middle_the_broker_dies(spark: SparkSession, up: Broker, tmp_path: Path) -> None:
    run = lambda wait=HASTY: write_stream(  # noqa: E731
        spark,
        up.url,
        tmp_path / "check",
        "sizes",
        lambda frame: frame.withColumn("body", f.length("body").cast("string")),
        source={"topic": "large", "maxRowsPerTrigger": LARGE - 1, "timeout": wait},
        sink={"timeout": wait},
    )
    words = (f"TIMED_OUT: {up.url}: reading large/", f"from 0 to {LARGE - 1}")
    refused_after(spark, tmp_path / "away", "spark.read-some", up.kill, run, *words, stream=True)
    refused(run, f"TIMED_OUT: {up.url}: no broker answers", stream=True)  # at plan time
    up.start()
    assert visible(up.url, "sizes") == []
    with standing(spark, tmp_path / "back", "spark.read-some", up.kill_and_start):
        run(PATIENT)  # the sink does not stand still: it may look for the broker while that starts
    assert visible(up.url, "sizes") == numbers(0, LARGE)
