"""The floors of a served read for Spark: a plain client that reads the same rows, and the way from Python to Java with
rows that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from escrowmq.spark.brokers import open_links
from escrowmq.spark.source import EscrowSource


def plain(url: str, topic: str) -> int:
    """Read all columns of a topic over the product's own link, each queue on a thread; how many rows."""
    [link] = open_links(url)
    try:
        queues = link.action("topics.offsets", {"topic": topic}, 10.0)["queues"]

        def read(queue: Any) -> int:
            return sum(batch.num_rows for batch in link.read({"source": topic, "queue": queue["queue"]}))

        with ThreadPoolExecutor(len(queues)) as pool:
            return sum(pool.map(read, queues))
    finally:
        link.close()


def register_made(spark: SparkSession, url: str, topic: str, path: Path, rows: int) -> None:
    """Format "made": ``rows`` rows like those of the topic, in as many partitions, out of one batch in a file that
    every worker maps into its memory."""
    source = EscrowSource({"path": url, "topic": topic})
    fields = spark.read.format("escrow").option("topic", topic).load(url).schema
    reader = source.reader(fields)
    places = reader.partitions()
    batch = next(iter(reader.read(places[0])))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    parts, place = len(places), str(path)
    whole, left = divmod(rows // parts, batch.num_rows)

    class Reader(DataSourceReader):
        def partitions(self) -> Sequence[InputPartition]:
            return [InputPartition(number) for number in range(parts)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            made = pa.ipc.open_file(pa.memory_map(place)).get_batch(0)
            for _ in range(whole):
                yield made
            if left:
                yield made.slice(0, left)

    class Made(DataSource):
        @classmethod
        def name(cls) -> str:
            return "made"

        def schema(self) -> StructType:
            return fields

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

    spark.dataSource.register(Made)
