"""A driver that runs one query for each option that chooses what a micro-batch has, all at the same time.

Run as a program, ``option_streams.py URL FOLDER [finish]``: with ``finish`` the queries end when all rows are copied.
Each query copies the topics whose names begin with its own into topic ``QUERY-copy``, and reaches a failpoint
``STEP.QUERY`` at each step of a batch (see escrowmq.platform.failpoints).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from escrowmq.spark.source import EscrowSource, arrow_schema
from escrowmq.spark.streaming import EscrowStreamReader
from escrowmq.spark.writing import EscrowStreamWriter, stream_writer

QUERIES: dict[str, dict[str, Any]] = {
    "pattern": {"topicPattern": r"pattern\..*"},
    "rows": {"topic": "rows.in", "minRowsPerTrigger": 5, "maxTriggerDelay": "300ms"},
    "bytes": {"topic": "bytes.in", "maxBytesPerTrigger": 50},
    "purged": {"topic": "purged.in", "onPurged": "skip"},
}
"""The options of each query."""
STEPS = ("planned", "reading", "prepared", "deciding", "decided", "planning", "chosen")
"""Of a batch, in their order: ``planned`` is after Spark has written offsets/N, ``decided`` before commits/N,
``planning`` after commits/N, ``chosen`` before offsets/N+1."""


def pass_step(step: str, query: str) -> None:
    """Reach the failpoint of a step of a query."""
    from escrowmq.platform.failpoints import reach

    reach(f"{step}.{query}")


class SteppedReader(EscrowStreamReader):
    """The real one, with failpoints."""

    @property
    def query(self) -> str:
        """The name of its query."""
        return (self.options.pattern or self.options.first_source).split(".")[0].rstrip("\\")

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        pass_step("planning", self.query)
        end = super().latestOffset(start, limit)
        if end != start:
            pass_step("chosen", self.query)
        return end

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Any:
        pass_step("planned", self.query)
        return super().partitions(start, end)

    def read(self, partition: Any) -> Iterator[Any]:
        for batch in super().read(partition):
            yield batch
            pass_step("reading", self.query)


class SteppedWriter(EscrowStreamWriter):
    """The real one, with failpoints."""

    def write(self, iterator: Any) -> Any:
        prepared = super().write(iterator)
        if prepared.ids:
            pass_step("prepared", self.query)
        return prepared

    def commit(self, messages: Any, batchId: int) -> None:
        has_rows = any(message.ids for message in messages)
        if has_rows:
            pass_step("deciding", self.query)
        super().commit(messages, batchId)
        if has_rows:
            pass_step("decided", self.query)

    @property
    def query(self) -> str:
        """The name of its query."""
        return str(self.options.topic).removesuffix("-copy")


class SteppedSource(EscrowSource):
    """The format, with failpoints."""

    def streamReader(self, schema: Any) -> SteppedReader:
        from escrowmq.spark.options import read_options

        options = read_options(self.options, streaming=True)
        return SteppedReader(options, arrow_schema(options, schema))

    def streamWriter(self, schema: Any, overwrite: bool) -> SteppedWriter:
        return SteppedWriter(stream_writer(self.options, schema, overwrite).options)


def start(spark: SparkSession, url: str, folder: Path, name: str, **trigger: Any) -> StreamingQuery:
    """Start a query, or go on with it."""
    rows = spark.readStream.format("escrow").options(**QUERIES[name]).load(url)
    keyed = rows.select(f.concat_ws("/", "topic", "key").alias("key"), "body")
    writer = keyed.writeStream.format("escrow").options(topic=f"{name}-copy", immunity=1)
    writer = writer.option("checkpointLocation", str(folder / name)).queryName(name)
    return (writer.trigger(**trigger) if trigger else writer).start(url)


def main(url: str, folder: Path, finish: bool) -> None:
    from escrowmq.pipeline.session import local_session

    with local_session("options", master="local[16]", rows=1000) as spark:  # each query may stand still in a task
        spark.dataSource.register(SteppedSource)
        trigger = {"availableNow": True} if finish else {}
        for query in [start(spark, url, folder, name, **trigger) for name in QUERIES]:
            query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "finish" in sys.argv)
