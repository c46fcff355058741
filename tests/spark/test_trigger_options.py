"""What chooses the messages of a micro-batch: patterns of topics, limits of rows and bytes, and purged ranges."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_runs import numbers, read_batch, read_stream, refused, send, standing
from killing import Broker
from pyspark.sql import SparkSession

import escrowmq as mq

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("triggers") / "data")
    try:
        yield made
    finally:
        made.kill()


def send_each(url: str, first: int, last: int, topic: str) -> None:
    """Send rows one after the other: what came at one time leaves together."""
    for number in range(first, last):
        send(url, number, number + 1, topic)


def purge(url: str, topic: str) -> int:
    """Let all messages of a topic's only queue leave, but the newest; returns its offset."""
    with mq.connect(url) as bus:
        bus.admin.alter_topic(topic, retention_size=1)
        bus.admin.alter_topic(topic, retention_size="broker")
        [queue] = bus.admin.offsets(topic)
        assert queue["head"] == queue["end"] - 1
        return int(queue["head"])


def name_of(url: str, topic: str) -> str:
    """The name of a topic's queue 0 in offsets."""
    with mq.connect(url) as bus:
        [hello] = bus.admin.hello()
        return f"{topic}/{hello['shard']:08x}/0"


def last_end(checkpoint: Path) -> dict[str, int]:
    """The end of the newest batch, as the checkpoint has it."""
    newest = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    return dict(json.loads(newest.read_text().splitlines()[-1]))


def skipped(end: dict[str, int]) -> dict[str, int]:
    return {name: at for name, at in end.items() if " skipped" in name}


def keys(batches: list[list[str]]) -> list[str]:
    return sorted(key for batch in batches for key in batch)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_topics_that_match_and_new_ones_from_their_beginning(
    spark: SparkSession, broker: Broker, tmp_path: Path, t: str, start: str
) -> None:
    """Also if none matched when the query was started for the first time."""
    url, pattern = broker.url, rf"{t}\.(north|south)"

    def run() -> list[str]:
        options: dict[str, Any] = {"topic": "", "topicPattern": pattern, "start": start}
        return keys(read_stream(spark, url, tmp_path / "check", **options))

    send(url, 0, 2, f"{t}.north.old")  # the whole name must match
    assert run() == []
    send(url, 2, 5, f"{t}.north")
    assert run() == numbers(2, 5)
    send(url, 5, 7, f"{t}.south")
    send(url, 7, 8, f"{t}.north")
    assert run() == numbers(5, 8)
    assert read_batch(spark, url, topic="", topicPattern=pattern) == 6
    refused(lambda: read_batch(spark, url, topic="", topicPattern=f"{t}.none"), "UNKNOWN_TOPIC", f"{t}.none")


def test_a_deleted_topic_of_a_pattern(spark: SparkSession, broker: Broker, tmp_path: Path, t: str) -> None:
    url, check = broker.url, tmp_path / "check"
    options: dict[str, Any] = {"topic": "", "topicPattern": rf"{t}\..*"}
    send(url, 0, 3, f"{t}.a")
    send(url, 3, 5, f"{t}.b")
    assert keys(read_stream(spark, url, check, **options)) == numbers(0, 5)
    with mq.connect(url) as bus:
        bus.admin.delete_topic(f"{t}.a")
    send(url, 5, 6, f"{t}.b")
    refused(lambda: read_stream(spark, url, check, **options), f"{t}.a/", stream=True)
    assert read_stream(spark, url, check, **options, onPurged="skip") == [["5"]]


def test_purged_messages_fail_a_query_or_are_skipped_counted_and_named(
    spark: SparkSession, broker: Broker, tmp_path: Path, t: str
) -> None:
    url, check = broker.url, tmp_path / "check"
    send_each(url, 0, 4, t)
    name = name_of(url, t)
    assert read_stream(spark, url, check, topic=t) == [list("0123")]
    send_each(url, 4, 9, t)
    assert purge(url, t) == 8
    refused(lambda: read_stream(spark, url, check, topic=t), "RANGE_PURGED", stream=True)
    assert read_stream(spark, url, check, topic=t, onPurged="skip") == [["8"], []], "it was planned already"
    assert skipped(last_end(check)) == {f"{name} skipped 4": 8, " skipped": 4}
    send_each(url, 9, 12, t)
    purge(url, t)
    assert read_stream(spark, url, check, topic=t, onPurged="skip") == [["11"]]
    assert skipped(last_end(check)) == {f"{name} skipped 9": 11, " skipped": 6}
    send_each(url, 12, 13, t)
    assert read_stream(spark, url, check, topic=t) == [["12"]], "as before, without the option"
    options = {"topic": t, "start": json.dumps({name: 2})}
    refused(lambda: read_batch(spark, url, **options), "RANGE_PURGED")
    assert read_batch(spark, url, **options, onPurged="skip") == 2


def test_a_batch_whose_messages_left_after_it_was_planned(
    spark: SparkSession, broker: Broker, tmp_path: Path, t: str
) -> None:
    """It failed, retention went on, and it runs again: what is left of it comes, and the next batch notes the rest."""
    url, check = broker.url, tmp_path / "check"
    send_each(url, 0, 5, t)
    name = name_of(url, t)

    def fail(*_: object) -> None:
        raise OSError("no disk")

    stream = spark.readStream.format("escrow").options(topic=t, onPurged="skip").load(url)
    query = stream.writeStream.foreachBatch(fail).option("checkpointLocation", str(check)).start()
    with pytest.raises(Exception, match="no disk"):
        query.awaitTermination()
    purge(url, t)
    refused(lambda: read_stream(spark, url, check, topic=t), "RANGE_PURGED", stream=True)
    assert read_stream(spark, url, check, topic=t, onPurged="skip")[0] == ["4"]
    assert skipped(last_end(check)) == {f"{name} skipped 0": 4, " skipped": 4}


def test_fewer_rows_than_the_least_wait_until_there_are_enough_or_the_delay_is_over(
    spark: SparkSession, broker: Broker, tmp_path: Path, t: str, eventually: Any
) -> None:
    url, check = broker.url, tmp_path / "check"
    batches: list[list[str]] = []
    send(url, 0, 1, t)

    def start(delay: str) -> Any:
        options = {"topic": t, "minRowsPerTrigger": 4, "maxTriggerDelay": delay}
        stream = spark.readStream.format("escrow").options(**options).load(url)
        each = lambda frame, _: batches.append(sorted(row["key"] for row in frame.select("key").collect()))  # noqa: E731
        return stream.writeStream.foreachBatch(each).option("checkpointLocation", str(check)).start()

    patient = functools.partial(eventually, timeout=120.0)
    query = start("1h")
    patient((check / "commits" / "0").exists)  # the first at once: it notes where the query begins
    for number in range(1, 7):
        send(url, number, number + 1, t)
    patient((check / "commits" / "1").exists)
    query.stop()
    rest = numbers(int(batches[1][-1]) + 1, 7)
    assert batches[1] == numbers(1, 1 + len(batches[1]))
    assert len(batches[1]) >= 4
    assert len(batches) == 2, "fewer than four are left"
    send(url, 7, 8, t)
    assert read_stream(spark, url, check, topic=t, minRowsPerTrigger=50) == [[*rest, "7"]], "does not hang"
    send(url, 8, 9, t)
    query = start("1s")
    patient((check / "commits" / "3").exists)
    send(url, 9, 10, t)
    patient((check / "commits" / "4").exists)
    query.stop()
    assert batches[2:] == [["8"], ["9"]]


def test_bytes_of_a_batch_are_bounded_and_a_larger_message_comes_alone(
    spark: SparkSession, broker: Broker, tmp_path: Path, t: str
) -> None:
    url, sizes = broker.url, [300, 300, 500, 5000, 10, 400, 700]
    with mq.connect(url) as bus:
        bus.admin.create_topic(t, 1)
        rows = [mq.Message(t, b"x" * size, key=str(number)) for number, size in enumerate(sizes)]
        assert bus.producer("filler").send_batch(rows).ok
    found = read_stream(spark, url, tmp_path / "check", topic=t, maxBytesPerTrigger="1kB")
    assert found == [["0", "1"], ["2"], ["3"], ["4", "5"], ["6"]]
    limits = {"maxBytesPerTrigger": "1kB", "maxRowsPerTrigger": 1}
    assert read_stream(spark, url, tmp_path / "rows", topic=t, **limits) == [[str(n)] for n in range(len(sizes))]
    options = {"topic": "%half", "maxBytesPerTrigger": "1kB"}
    assert keys(read_stream(spark, url, tmp_path / "half", **options)) == []


def test_a_range_that_is_purged_while_it_is_read_is_planned_anew(
    spark: SparkSession, broker: Broker, tmp_path: Path, t: str
) -> None:
    """The task fails, its query with it; started again on its checkpoint it skips what left."""
    url, check = broker.url, tmp_path / "check"
    send_each(url, 0, 40, t)  # so many tasks that some are left at the purge

    def run() -> list[list[str]]:
        return read_stream(spark, url, check, topic=t, onPurged="skip", maxRowsPerPartition=1)

    with standing(spark, tmp_path / "stage", "spark.read-some", lambda: purge(url, t)):
        refused(run, "RANGE_PURGED", stream=True)
    assert keys(run()) == ["39"]
