"""Where streams begin: once and for all with their first batch, with topics that come later, over several topics and
views.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_runs import numbers, read_stream, send
from killing import Broker
from pyspark.sql import DataFrame, SparkSession

import escrowmq as mq

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Broker]]:
    folder = tmp_path_factory.mktemp("starts")
    made: list[Broker] = []
    try:
        made += [Broker(folder / "0"), Broker(folder / "1")]
        yield made
    finally:
        for broker in made:
            broker.kill()


@pytest.mark.invariant("I41")
def test_a_first_batch_that_runs_again_begins_where_it_began(
    spark: SparkSession, brokers: list[Broker], tmp_path: Path
) -> None:
    """Option "start" is of the moment when a query was first started."""
    url = brokers[0].url
    send(url, 0, 5, "once")

    def fail(frame: DataFrame, _: int) -> None:
        raise OSError(f"no disk for {frame.count()} rows")

    stream = spark.readStream.format("escrow").option("topic", "once").load(url)
    query = stream.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path / "check")).start()
    with pytest.raises(Exception, match="no disk for 5 rows"):
        query.awaitTermination()
    send(url, 5, 7, "once")
    assert read_stream(spark, url, tmp_path / "check", topic="once", start="latest") == [list("01234"), list("56")]


def test_topics_of_several_brokers_and_one_that_comes_later(
    spark: SparkSession, brokers: list[Broker], tmp_path: Path
) -> None:
    url = f"{brokers[0].url},{brokers[1].url.removeprefix('escrow://')}"
    one, two = (f"{name}.{tmp_path.name}" for name in ("one", "two"))  # others when the test is run once more
    send(brokers[0].url, 0, 10, one)
    for number, broker in enumerate(brokers):
        send(broker.url, 10 + 5 * number, 15 + 5 * number, two)

    def run() -> list[str]:
        batches = read_stream(spark, url, tmp_path / "check", topic=f"{one},{two}", maxRowsPerTrigger=9)
        assert max(len(batch) for batch in batches) <= 9
        return sorted(key for batch in batches for key in batch)

    assert run() == numbers(0, 20)
    send(brokers[1].url, 20, 24, one)
    send(brokers[1].url, 24, 26, two)
    assert run() == numbers(20, 26)


def test_half_messages_as_a_stream(spark: SparkSession, brokers: list[Broker], tmp_path: Path) -> None:
    url = brokers[0].url
    found = []
    with mq.connect(url) as bus:
        shop = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
        for first in (0, 5):
            for number in range(first, first + 5):
                shop.prepare("orders", b"x", key=str(number))
            run = read_stream(spark, url, tmp_path / "check", topic="%half")
            found.append(sorted(key for batch in run for key in batch))
    assert found == [numbers(0, 5), numbers(5, 10)]
