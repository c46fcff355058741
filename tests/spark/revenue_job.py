"""A streaming job as a user would write it: orders in, revenue per country and minute out, exactly once.

Run as a program, ``revenue_job.py SPEC.json``, it does legs one after the other in one session, and each of them until
it succeeds, as a supervisor would. SPEC: ``{"url", "folder", "master", "settings", "legs": [{"topic", "points", "told",
"what", "once"}]}``; ``points`` is where the processes of a leg stand still (see escrowmq.platform.failpoints), ``what``
is one of WHATS.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from escrowmq.spark.source import EscrowSource, register
from escrowmq.spark.writing import EscrowStreamWriter, stream_writer
from standing import PLACES, Stage

ROWS_PER_BATCH = 80
TABLE = 400
"""Rows that a batch write writes."""
MOST_TRIES = 12
NO_PROCESS = "connect back"
"""What Spark says of a Python process that took more than 10 s to start, as one does on a busy machine."""
PATIENCE = 120
"""Seconds in which a broker that is started again answers."""


def revenue(orders: DataFrame) -> DataFrame:
    """Orders (JSON bodies) → a message for every country and minute that is over: key, body."""
    order = f.from_json(f.col("body").cast("string"), "country STRING, at TIMESTAMP, cents BIGINT")
    sums = (
        orders.select(order.alias("o"))
        .select("o.*")
        .withWatermark("at", "1 minute")
        .groupBy(f.window("at", "1 minute"), "country")
        .agg(f.sum("cents").alias("cents"), f.count("*").alias("orders"))
    )
    key = f.concat_ws("|", "country", f.date_format("window.start", "HH:mm"))
    return sums.select(key.alias("key"), f.to_json(f.struct("country", "cents", "orders")).alias("body"))


def stream(spark: SparkSession, url: str, checkpoint: str, topic: str, most: int = ROWS_PER_BATCH) -> None:
    """The query, until everything that is there now is done."""
    orders = (
        spark.readStream.format("escrow")
        .option("topic", "orders")
        .option("columns", "body")
        .option("timeout", PATIENCE)
        .option("maxRowsPerTrigger", most)
        .load(url)
    )
    query = (
        revenue(orders)
        .writeStream.format("escrow")
        .option("topic", topic)
        .option("immunity", 1)
        .option("timeout", PATIENCE)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start(url)
    )
    query.awaitTermination()


def copy(spark: SparkSession, url: str, checkpoint: str, topic: str) -> None:
    """A query with all options that choose what a batch has: first as it comes, then until all of it is done."""
    options = {"topicPattern": rf"{topic}\..*", "onPurged": "skip", "maxBytesPerTrigger": 200}
    options |= {"minRowsPerTrigger": 5, "maxTriggerDelay": "200ms", "timeout": PATIENCE}
    rows = spark.readStream.format("escrow").options(**options).load(url)
    keyed = rows.select(f.concat_ws("/", "topic", "key").alias("key"), "body")
    writer = keyed.writeStream.format("escrow").options(topic=topic, immunity=1, timeout=PATIENCE)
    writer = writer.option("checkpointLocation", checkpoint)
    query = writer.start(url)
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    writer.trigger(availableNow=True).start(url).awaitTermination()


def table(spark: SparkSession, url: str, checkpoint: str, topic: str) -> None:
    """A batch write under a name."""
    writer = rows(spark).write.format("escrow").mode("append").options(topic=topic, write_id=topic, timeout=PATIENCE)
    writer.save(url)


def nameless(spark: SparkSession, url: str, checkpoint: str, topic: str) -> None:
    """A batch write without a name."""
    rows(spark).write.format("escrow").mode("append").options(topic=topic, timeout=PATIENCE).save(url)


def rows(spark: SparkSession) -> DataFrame:
    """Rows of a table: key, body."""
    number = f.col("id").cast("string")
    return spark.range(0, TABLE, numPartitions=2).select(
        number.alias("key"), f.concat(f.lit("row "), number).alias("body")
    )


class Watched(EscrowStreamWriter):
    """The real one; each attempt of a task notes that it begins and what it prepared. One more failpoint,
    ``spark.committed``: the sink's commit has returned, and Spark does not know it yet."""

    def write(self, iterator: Any) -> Any:
        """As the real one."""
        from pyspark import TaskContext

        told = told_here()
        at = TaskContext.get()
        mine = {"batch": int(at.getLocalProperty("streaming.sql.batchId")), "partition": at.partitionId()}
        mine |= {
            "stage": at.stageId(),
            "attempt": at.attemptNumber(),
            "pid": os.getpid(),
        }
        note(told, {**mine, "standing": standing(told)})
        prepared = super().write(iterator)
        note(told, {**mine, "ids": [identity.hex() for identity in prepared.ids]})
        return prepared

    def commit(self, messages: Any, batchId: int) -> None:
        """As the real one."""
        from escrowmq.platform.failpoints import reach

        super().commit(messages, batchId)
        if any(message.ids for message in messages):
            reach("spark.committed")


def told_here() -> Path:
    """The folder of the leg that runs now."""
    return Path(os.environ["ESCROWMQ_FAILPOINT_TELL"]).resolve()


def note(told: Path, entry: dict[str, Any]) -> None:
    """A line more in attempts.jsonl: one write at its end, so that processes do not mix theirs."""
    with (told / "attempts.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")


def standing(told: Path) -> list[int]:
    """The processes that stand still in the middle of their rows now, and live."""
    try:
        pid = int((told / "spark.prepared-some").read_text())
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid]


# Planted bugs: each is caught by the comparison with a clean run, or that comparison is worth nothing.


class Hasty(EscrowStreamWriter):
    """Commits on the executors, each task what it prepared."""

    def write(self, iterator: Any) -> Any:
        """As the real one, and too much."""
        prepared = super().write(iterator)
        publish(self.options.url, prepared.query, prepared.ids)
        return prepared

    def commit(self, messages: Any, batchId: int) -> None:
        """The real one would find everything decided."""
        from escrowmq.platform.failpoints import reach

        if any(message.ids for message in messages):
            reach("spark.before-decision")


class Forgetful(EscrowStreamWriter):
    """Commits what the tasks prepared, and does not say as which batch."""

    def commit(self, messages: Any, batchId: int) -> None:
        """The decision without its number."""
        from escrowmq.platform.failpoints import reach

        ids = [identity for message in messages for identity in message.ids]
        if ids:
            publish(self.options.url, messages[0].query, ids)
            reach("spark.after-decision")


def publish(url: str, query: str, ids: list[bytes]) -> None:
    """Commit transactions one by one."""
    with mq.connect(url) as bus:
        producer = bus.producer(f"spark.{query}")
        producer.checker(lambda check: mq.UNKNOWN)
        for identity in ids:
            producer.commit(identity)


class WatchedSource(EscrowSource):
    """The format, watched."""

    def streamWriter(self, schema: Any, overwrite: bool) -> Watched:
        """Watched."""
        return Watched(stream_writer(self.options, schema, overwrite).options)


class HastySource(EscrowSource):
    """The format, with a planted bug."""

    def streamWriter(self, schema: Any, overwrite: bool) -> Hasty:
        """With the bug."""
        return Hasty(stream_writer(self.options, schema, overwrite).options)


class ForgetfulSource(EscrowSource):
    """The format, with another planted bug."""

    def streamWriter(self, schema: Any, overwrite: bool) -> Forgetful:
        """With the bug."""
        return Forgetful(stream_writer(self.options, schema, overwrite).options)


WHATS = {
    "stream": (stream, EscrowSource),
    "watched": (stream, WatchedSource),
    "copy": (copy, WatchedSource),
    "table": (table, EscrowSource),
    "nameless": (nameless, EscrowSource),
    "hasty": (stream, HastySource),
    "forgetful": (stream, ForgetfulSource),
}


def run(spark: SparkSession, url: str, folder: Path, leg: dict[str, Any]) -> int:
    """One leg; how often it was tried, without those times when Spark had no Python process."""
    from escrowmq.platform.failpoints import reach

    act, source = WHATS[leg["what"]]
    Stage.of(spark).open(Path(leg["told"]), leg["points"])
    register(spark)
    spark.dataSource.register(source)
    tries = 1
    for _ in range(1, MOST_TRIES):
        try:
            act(spark, url, str(folder / f"checkpoint-{leg['topic']}"), leg["topic"])
        except Exception as problem:  # whatever it was: the next try shows what is left of it
            print(f"{leg['topic']}, try {tries}: {str(problem)[:2000]}", flush=True)
            if NO_PROCESS in str(problem):
                continue
            reach("job.failed")
            if leg["once"]:
                return tries
            tries += 1
        else:
            return tries
    raise RuntimeError(f"{leg['topic']} does not end")


def main() -> None:
    """As SPEC says."""
    from escrowmq.pipeline.session import local_session
    from escrowmq.platform.failpoints import arm, parse

    spec = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(spec["folder"])
    with local_session("revenue", master=spec["master"], rows=1000, settings=spec["settings"]) as spark:
        stage = Stage(folder)
        stage.prepare(spark)
        os.environ |= stage.environment
        arm(*map(parse, PLACES))  # in this process, too
        for leg in spec["legs"]:
            tries = run(spark, spec["url"], folder, leg)
            (folder / f"tries-{leg['topic']}").write_text(str(tries))


if __name__ == "__main__":
    main()
