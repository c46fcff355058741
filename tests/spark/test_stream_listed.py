"""A running query in ``escrowmq status``, by its name, with its lag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_runs import send
from killing import Broker
from pyspark.sql import SparkSession

import escrowmq as mq
from escrowmq.overview import status

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.mark.parametrize("name", ["sums of orders", None])
def test_a_query_is_a_reader_with_its_lag(spark: SparkSession, tmp_path: Path, name: str | None) -> None:
    broker = Broker(tmp_path / "data")
    try:
        send(broker.url, 0, 7)

        def start() -> Any:
            rows = spark.readStream.format("escrow").options(topic="in", maxRowsPerPartition=2).load(broker.url)
            writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "check"))
            return (writer.queryName(name) if name else writer).trigger(availableNow=True).start()

        query = start()
        query.awaitTermination()
        with mq.connect(broker.url) as bus:
            assert [(one.reader, one.topic, one.lag) for one in status(bus).readers] == [(name or query.id, "in", 0)]
            send(broker.url, 7, 10)
            assert [one.lag for one in status(bus).readers] == [3]
            start().awaitTermination()
            assert [one.lag for one in status(bus).readers] == [0]
            spark.read.format("escrow").option("topic", "in").load(broker.url).count()
            assert len(status(bus).readers) == 1, "a batch read is none"
    finally:
        broker.kill()
