"""``%acks`` in Spark: batches and streams have what the broker has, and filters on a view keep what they say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killing import Broker
from pyspark.sql import DataFrame, SparkSession

import escrowmq as mq

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "broker")
    with mq.connect(made.url) as bus:
        bus.admin.create_topic("t", 2)
        assert bus.producer("p").send_batch([mq.Message("t", b"%d" % n, queue=n % 2) for n in range(40)]).ok
        shop = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        for number in range(4):
            shop.prepare("t", b"half", queue=number % 2)
    yield made
    if made.process.poll() is None:
        made.kill()


def consume(url: str, group: str, count: int) -> None:
    with mq.connect(url) as bus, bus.consumer(group, ["t"]) as consumer:
        for message in itertools.islice(consumer, count):
            message.ack()
            consumer.flush()  # many small runs


def expected(url: str) -> list[tuple[Any, ...]]:
    with mq.connect(url, read_only=True) if url.startswith("file:") else mq.connect(url) as bus:
        table = bus.admin.read("%acks").read_all()
    return [tuple(row.values()) for row in table.to_pylist()]


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """As ``expected`` has them: times as microseconds."""
    micros = "unix_micros(acked) AS acked_us"
    names = ["position", micros, "`group`", "topic", "queue", "start", "count", "attempt", "lease"]
    return [tuple(row) for row in frame.selectExpr(*names).orderBy("position").collect()]


def load(spark: SparkSession, url: str, topic: str = "%acks") -> DataFrame:
    return spark.read.format("escrow").option("topic", topic).load(url)


def stream(spark: SparkSession, url: str, checkpoint: Path) -> list[list[tuple[Any, ...]]]:
    """Everything that is there now, as micro-batches."""
    batches: list[list[tuple[Any, ...]]] = []
    options = {"topic": "%acks", "maxRowsPerTrigger": 80}  # of a view, positions are counted
    writer = spark.readStream.format("escrow").options(**options).load(url).writeStream
    writer = writer.foreachBatch(lambda frame, _: batches.append(rows(frame)))
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return batches


@pytest.mark.invariant("I41")
def test_acknowledgements_in_batches_and_streams(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    consume(broker.url, "g", 30)
    first = expected(broker.url)
    assert sum(row[6] for row in first) == 30
    batches = stream(spark, broker.url, tmp_path / "check")
    assert len(batches) > 1
    assert list(itertools.chain(*batches)) == first
    consume(broker.url, "h", 10)
    whole = expected(broker.url)
    assert list(itertools.chain(*stream(spark, broker.url, tmp_path / "check"))) == whole[len(first) :]
    acks = load(spark, broker.url)
    assert rows(acks) == whole
    assert rows(acks.where("group = 'h' AND acked >= '2026-01-01T00:00:00Z'")) == whole[len(first) :]
    few = spark.read.format("escrow").options(topic="%acks", group="h", storedFrom="2026-01-01").load(broker.url)
    assert rows(few) == whole[len(first) :]
    broker.kill()
    assert rows(load(spark, f"file:{broker.folder}")) == whole


def test_filters_on_queues_and_offsets_of_views_are_not_lost(spark: SparkSession, broker: Broker) -> None:
    consume(broker.url, "g", 40)
    for name in ("%acks", "%half"):
        found = load(spark, broker.url, name)
        queues = [row["queue"] for row in found.select("queue").collect()]
        for number in (0, 1):
            assert found.where(f"queue = {number}").count() == queues.count(number) > 0
    with mq.connect(broker.url) as bus, bus.consumer("d", ["t"], max_attempts=1) as consumer:
        for message in itertools.islice(consumer, 40):
            message.nack()
    dead = load(spark, broker.url, "%dead-letters.d")
    assert dead.where("offset >= 15").count() == 2 * 5
    assert dead.where("queue = 1").count() == 20
