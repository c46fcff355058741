"""Format "escrow" on a real session: what is read is what the broker has, again and again the same; bad input is told
clearly.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from killing import Broker
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import escrowmq as mq
from damaging import FILLER, flip
from escrowmq.spark.source import EscrowSource

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ROWS = 300


def fill(bus: mq.Bus) -> None:
    """ROWS plain messages, ten committed and five open transactions, two dead letters."""
    messages = [
        mq.Message("t", b"body-%d" % n, key=f"k-{n}", tag="ab"[n % 2], properties={"n": str(n)}) for n in range(ROWS)
    ]
    assert bus.producer("plain").send_batch(messages).ok
    shop = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
    for number in range(15):
        receipt = shop.prepare("t", b"transaction", key=f"x-{number}")
        if number < 10:
            shop.commit(receipt.transaction_id)


def bury(bus: mq.Bus) -> None:
    with bus.consumer("g", ["t"], max_attempts=1) as consumer:
        for number, message in enumerate(consumer.messages(idle_timeout=60)):
            message.nack()
            if number == 1:
                break


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"file:{tmp_path_factory.mktemp('source') / 'data'}"
    with mq.connect(url) as bus:
        fill(bus)
        bury(bus)
    return url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two brokers."""
    base = tmp_path_factory.mktemp("served")
    with ExitStack() as stack:
        brokers = [Broker(base / str(number)) for number in range(2)]
        for broker in brokers:
            stack.callback(broker.kill)
        url = f"{brokers[0].url},{brokers[1].url.removeprefix('escrow://')}"
        with mq.connect(url) as bus:
            fill(bus)
        yield url


def read(spark: SparkSession, url: str, topic: str = "t", **options: Any) -> DataFrame:
    return spark.read.format("escrow").options(topic=topic, **options).load(url)


def told(problem: pytest.ExceptionInfo[BaseException]) -> str:
    return str(problem.value)


def content(frame: DataFrame) -> Counter[tuple[Any, ...]]:
    """Rows by id and content."""
    rows = frame.select("message_id", "key", "tag", f.to_json("properties"), "body", "queue", "offset").collect()
    return Counter(tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in rows)


def plain(url: str, source: str = "t") -> Counter[tuple[Any, ...]]:
    """The same by the admin face."""
    with mq.connect(url, read_only=True) if url.startswith("file:") else mq.connect(url) as bus:
        rows = bus.admin.read(source).read_all().to_pylist()
    return Counter(
        (
            row["message_id"],
            row["key"],
            row["tag"],
            json.dumps(dict(row["properties"]), separators=(",", ":")) if row["properties"] is not None else None,
            row["body"],
            row["queue"],
            row["offset"],
        )
        for row in rows
    )


@pytest.mark.parametrize("where", ["folder", "served"])
def test_a_topic_is_what_the_broker_has(spark: SparkSession, where: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(where)
    frame = read(spark, url)
    found = content(frame)
    assert found == plain(url)
    assert sum(found.values()) == ROWS + 10
    states = {row["state"]: row["count"] for row in frame.groupBy("state").count().collect()}
    assert states == {None: ROWS, "committed": 10}
    assert frame.select("shard").distinct().count() == (1 if where == "folder" else 2)


@pytest.mark.parametrize("where", ["folder", "served"])
def test_half_messages_and_decisions(spark: SparkSession, where: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(where)
    half = read(spark, url, "%half")
    assert {row["state"]: row["count"] for row in half.groupBy("state").count().collect()} == {
        "committed": 10,
        "open": 5,
    }
    joined = half.join(read(spark, url, "%op").select("transaction_id", "decided_by"), "transaction_id")
    assert {(row["key"], row["decided_by"]) for row in joined.collect()} == {(f"x-{n}", "producer") for n in range(10)}


def test_dead_letters(spark: SparkSession, folder: str) -> None:
    found = content(read(spark, folder, "%dead-letters.g"))
    assert found == plain(folder, "%dead-letters.g")
    assert sum(found.values()) == 2


def test_a_damaged_row_is_a_row_without_content_and_marked(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with mq.connect(url, segment_bytes=1 << 16, default_queues=2) as bus:
        fill(bus)
        bus.producer("plain").send_batch([mq.Message("filler", FILLER) for _ in range(120)]).check()
    segment, _ = flip(tmp_path / "data", b"body-123")
    with mq.connect(url) as bus, bus.consumer("g", "t") as consumer:
        whole = ROWS + 10 - 1
        assert len(list(itertools.islice(consumer.messages(idle_timeout=60), whole))) == whole
        assert consumer.receive(1, wait=1) == []
    topic = read(spark, url).cache()
    assert topic.count() == ROWS + 10
    (row,) = topic.where("damaged is not null").collect()
    assert (row["key"], row["body"], row["damaged"].startswith(segment)) == ("k-123", None, True)
    assert topic.where("body is null").count() == 1
    (letter,) = read(spark, url, "%dead-letters.g").collect()
    assert (letter["key"], letter["damaged"]) == ("k-123", row["damaged"])
    assert read(spark, url, "%half").where("damaged is null").count() == 15
    assert read(spark, url, columns="key").count() == ROWS + 10, "keys are whole"
    with pytest.raises(Exception) as problem:
        read(spark, url, columns="body").collect()
    assert "DAMAGED" in told(problem)


def test_filters_and_columns_go_to_the_broker(spark: SparkSession, folder: str) -> None:
    def sent(**options: str) -> list[pa.RecordBatch]:
        """What the broker sends for a reader of these options."""
        source = EscrowSource({"path": folder, "topic": "t", **options})
        reader = source.reader(read(spark, folder, **options).schema)
        return [batch for part in reader.partitions() for batch in reader.read(part)]

    wanted = Counter(row[1] for row in plain(folder).elements() if row[2] == "a" and row[5] == 1)
    few = sent(tags="a", queues="1", columns="offset,key")
    assert Counter(key for batch in few for key in batch["key"].to_pylist()) == wanted
    assert {tuple(batch.schema.names) for batch in few} == {("offset", "key")}
    assert sum(batch.num_rows for batch in sent(key="k-8", tags="a||c")) == 1
    assert sent(key="k-7", tags="a") == sent(storedUntil="2001-01-01") == []
    assert read(spark, folder, columns="key,offset,tag,queue").columns == ["key", "offset", "tag", "queue"]
    assert spark.read.format("escrow").schema("offset bigint").option("topic", "t").load(folder).count() == ROWS + 10


@pytest.mark.invariant("I41")
def test_the_same_range_gives_the_same_rows_in_the_same_partitions(spark: SparkSession, folder: str) -> None:
    def pieces() -> list[tuple[int, int, int]]:
        frame = read(spark, folder, maxRowsPerPartition=20)
        rows = frame.select(f.spark_partition_id(), "queue", "offset").collect()
        return [tuple(row) for row in rows]

    first = pieces()
    assert pieces() == first
    assert len({row[0] for row in first}) >= (ROWS + 10) / 20


def test_ends_by_offset_and_by_time(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with mq.connect(url) as bus:
        bus.admin.create_topic("t", 2)
        producer = bus.producer("p")
        assert producer.send_batch([mq.Message("t", b"old", key=str(n), queue=n % 2) for n in range(20)]).ok
        time.sleep(0.02)  # not a signal: two clocks' readings must differ
        middle = datetime.now(UTC)
        time.sleep(0.02)
        assert producer.send_batch([mq.Message("t", b"new", key=str(n), queue=n % 2) for n in range(10)]).ok
        shard = bus.admin.hello()[0]["shard"]
    assert {bytes(row["body"]) for row in read(spark, url, start=middle.isoformat()).collect()} == {b"new"}
    assert read(spark, url, end=middle.isoformat()).groupBy("body").count().collect()[0]["count"] == 20
    place = f"t/{shard:08x}/0"
    part = read(spark, url, start=json.dumps({place: 4}), end=json.dumps({place: 9}))
    assert sorted(row["offset"] for row in part.where("queue = 0").collect()) == [4, 5, 6, 7, 8]
    assert part.where("queue = 1").count() == 15
    with pytest.raises(Exception, match="there is no 't/00000000/7'"):
        read(spark, url, start='{"t/00000000/7": 1}').count()


@pytest.mark.parametrize(
    ("topic", "options", "words"),
    [
        ("nothing", {}, "UNKNOWN_TOPIC"),
        ("t", {"startingOffsets": "earliest"}, "did you mean 'start'"),
        ("t", {"maxRowsPerPartitions": "5"}, "did you mean 'maxRowsPerPartition'"),
        ("t", {"columns": "ofset"}, "did you mean 'offset'"),
        ("%halves", {}, "did you mean '%half'"),
        ("t", {"maxRowsPerTrigger": "5"}, "of streams"),
    ],
)
def test_bad_options_are_named(
    spark: SparkSession, folder: str, topic: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception) as problem:
        read(spark, folder, topic, **options).count()
    assert words.lower() in told(problem).lower()


def test_a_broker_that_is_away_is_told_of_at_plan_time(spark: SparkSession) -> None:
    with pytest.raises(Exception) as problem:
        read(spark, "escrow://127.0.0.1:9", timeout=0.5).count()
    assert "127.0.0.1:9" in told(problem)


@pytest.mark.invariant("I41")
def test_a_purged_range_raises(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with mq.connect(url, segment_bytes=1 << 12, snapshot_bytes=1 << 12, retention=1) as bus:
        bus.admin.create_topic("t", 1)
        upkeep = bus.router.links[0]._calls.engine.upkeep  # type: ignore[attr-defined]
        deadline = time.monotonic() + 200
        while not bus.admin.offsets("t")[0]["head"]:
            upkeep._retain_us = 0  # its next pass is due now
            assert bus.producer("p").send_batch([mq.Message("t", bytes(1000)) for _ in range(10)]).ok
            assert time.monotonic() < deadline
        shard = bus.admin.hello()[0]["shard"]
    with pytest.raises(Exception) as problem:
        read(spark, url, start=json.dumps({f"t/{shard:08x}/0": 0})).count()
    assert "RANGE_PURGED" in told(problem)


# Streams


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    made = Broker(tmp_path / "broker")
    yield made
    made.kill()


def send(url: str, count: int, first: int = 0, queue: int | None = None) -> None:
    with mq.connect(url) as bus:
        rows = [mq.Message("in", b"%d" % n, key=str(n), queue=queue) for n in range(first, first + count)]
        assert bus.producer("p").send_batch(rows).ok


def run(spark: SparkSession, url: str, checkpoint: Path, **options: Any) -> list[list[str]]:
    """Everything that is there now, as micro-batches of keys."""
    batches: list[list[str]] = []

    def each(frame: DataFrame, _: int) -> None:
        batches.append([row["key"] for row in frame.collect()])

    stream = spark.readStream.format("escrow").options(topic="in", **options).load(url)
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    return batches


def test_a_stream_in_pieces_goes_on_where_it_stopped_and_takes_new_queues(
    spark: SparkSession, broker: Broker, tmp_path: Path
) -> None:
    with mq.connect(broker.url) as bus:
        bus.admin.create_topic("in", 2)
    send(broker.url, 50)
    batches = run(spark, broker.url, tmp_path / "check", maxRowsPerTrigger=20)
    assert [len(batch) <= 20 for batch in batches] == [True] * len(batches)
    assert sorted(key for batch in batches for key in batch) == sorted(map(str, range(50)))
    with mq.connect(broker.url) as bus:
        bus.admin.create_topic("in", 3, may_exist=True)
    send(broker.url, 10, first=50, queue=2)
    assert sorted(key for batch in run(spark, broker.url, tmp_path / "check") for key in batch) == [
        str(n) for n in range(50, 60)
    ]


@pytest.mark.invariant("I41")
def test_a_checkpoint_of_another_cluster_is_refused(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    send(broker.url, 5)
    run(spark, broker.url, tmp_path / "check")
    other = Broker(tmp_path / "other")
    try:
        send(other.url, 5)
        send(other.url, 5)
        with pytest.raises(Exception, match="another cluster"):
            run(spark, other.url, tmp_path / "check")
    finally:
        other.kill()


# Batch writes


def rows(spark: SparkSession, count: int = 40) -> DataFrame:
    number = f.col("id").cast("string")
    return spark.range(count).select(number.alias("key"), f.concat(f.lit("b"), number).alias("body"))


def topic(url: str, name: str) -> list[str]:
    """The keys that are visible."""
    with mq.connect(url) as bus:
        if not any(one["name"] == name for one in bus.admin.topics()):
            return []
        return sorted(bus.admin.read(name, columns=["key"]).read_all()["key"].to_pylist())


def test_a_batch_is_written_once_and_with_a_write_id_whatever_often_it_runs(
    spark: SparkSession, broker: Broker
) -> None:
    writer = rows(spark).write.format("escrow").mode("append")
    writer.option("topic", "out").save(broker.url)
    assert topic(broker.url, "out") == sorted(map(str, range(40)))
    for _ in range(2):
        writer.option("topic", "once").option("write_id", "monday").save(broker.url)
    assert topic(broker.url, "once") == sorted(map(str, range(40)))


def test_a_task_that_fails_leaves_nothing_visible(spark: SparkSession, broker: Broker) -> None:
    bad = f.when(f.col("key") == "39", f.raise_error(f.lit("boom"))).otherwise(f.col("body")).cast("string")
    with pytest.raises(Exception, match="boom"):
        rows(spark).repartition(4, "key").withColumn("body", bad).write.format("escrow").mode("append").option(
            "topic", "out"
        ).save(broker.url)
    assert topic(broker.url, "out") == []
    nothing = rows(spark).withColumn("body", f.when(f.col("key") != "7", f.col("body")))
    with pytest.raises(Exception, match="column 'body' is null"):
        nothing.write.format("escrow").mode("append").option("topic", "out").save(broker.url)
    assert topic(broker.url, "out") == []


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda frame: frame.drop("body"), {}, "no column 'body'"),
        (lambda frame: frame.withColumn("bodi", f.col("body")), {}, "did you mean 'body'"),
        (lambda frame: frame.withColumn("key", f.lit(1)), {}, "is int, not string"),
        (lambda frame: frame, {"topik": "x"}, "did you mean 'topic'"),
        (lambda frame: frame, {"timeout": "0.5", "url": "escrow://127.0.0.1:9"}, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    spark: SparkSession, broker: Broker, change: Any, options: dict[str, str], words: str
) -> None:
    given = {"topic": "out", "url": broker.url} | options
    with pytest.raises(Exception) as problem:
        change(rows(spark, 3)).write.format("escrow").mode("append").options(**given).save()
    assert words.lower() in told(problem).lower()
