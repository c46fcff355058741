"""What is wrong with the input of a run is told on the driver, by code and sentence, and nothing of it is visible.

The broker allows bodies of 1000 bytes and transactions of 10 messages. Topic "in" has rows 0 to 39.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_runs import (
    Change,
    numbers,
    read_batch,
    read_stream,
    refused,
    rows,
    send,
    undecided,
    visible,
    write_batch,
    write_stream,
)
from killing import Broker
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

import escrowmq as mq
from escrowmq.spark.source import EscrowSource

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

AWAY = "escrow://127.0.0.1:9"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bad") / "data"
    broker = Broker(folder, "--max-body-bytes", "1000", "--max-transaction-messages", "10")
    try:
        send(broker.url, 0, 40)
        yield broker.url
    finally:
        broker.kill()


# Reading

READS = [
    ({"topic": "in,nothing"}, "UNKNOWN_TOPIC: no topic 'nothing'"),
    ({"start": '{"in/00000000/9": 1}'}, "BAD_SETTING: start: there is no 'in/00000000/9'"),
    ({"topik": "in"}, "BAD_SETTING: no option 'topik' (did you mean 'topic'?)"),
    ({"columns": "ky"}, "BAD_SETTING: in has no column 'ky' (did you mean 'key'?)"),
]


def named(given: object) -> str:
    """A test's name: the same in every process."""
    return str(getattr(given, "__name__", given))[:30]


@pytest.mark.parametrize(("options", "words"), READS, ids=named)
def test_a_batch_that_cannot_be_read(spark: SparkSession, url: str, options: dict[str, str], words: str) -> None:
    refused(lambda: read_batch(spark, url, **options), words)


@pytest.mark.parametrize(("options", "words"), READS, ids=named)
def test_a_stream_that_cannot_be_read(
    spark: SparkSession, url: str, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    at_start = "topik" in options or "columns" in options  # before there is a query
    refused(lambda: read_stream(spark, url, tmp_path / "check", **options), words, stream=not at_start)


@pytest.mark.invariant("I41")
def test_a_stream_of_another_topic_is_not_that_of_the_checkpoint(spark: SparkSession, url: str, tmp_path: Path) -> None:
    assert read_stream(spark, url, tmp_path / "check") == [[str(n) for n in range(40)]]
    send(url, 0, 3, "other")
    again = lambda: read_stream(spark, url, tmp_path / "check", topic="other")  # noqa: E731
    refused(again, "BAD_SETTING: there is no 'in/", "the checkpoint that of another query", stream=True)


# Writing: what is wrong with the whole


def without_body(frame: DataFrame) -> DataFrame:
    return frame.drop("body")


def with_number_as_key(frame: DataFrame) -> DataFrame:
    return frame.withColumn("key", f.lit(1))


def with_one_too_many(frame: DataFrame) -> DataFrame:
    return frame.withColumn("bodi", f.col("body"))


def as_it_is(frame: DataFrame) -> DataFrame:
    return frame


WRITES: list[tuple[Change, dict[str, Any], str]] = [
    (without_body, {}, "BAD_SETTING: the DataFrame has no column 'body'"),
    (with_number_as_key, {}, "BAD_SETTING: column 'key' is int, not string (cast it)"),
    (with_one_too_many, {}, "BAD_SETTING: no column 'bodi' in a message (did you mean 'body'?)"),
    (as_it_is, {"topik": "x"}, "BAD_SETTING: no option 'topik' (did you mean 'topic'?)"),
    (as_it_is, {"url": AWAY, "timeout": 0.3}, f"TIMED_OUT: {AWAY}: no broker answers"),
]


@pytest.mark.parametrize(("change", "sink", "words"), WRITES, ids=named)
def test_a_batch_that_cannot_be_written(
    spark: SparkSession, url: str, change: Change, sink: dict[str, Any], words: str
) -> None:
    refused(lambda: write_batch(change(rows(spark, 0, 3)), url, "refused", sink), words)
    assert visible(url, "refused") == []


@pytest.mark.parametrize(
    ("change", "sink", "words"),
    [*WRITES[:-1], pytest.param(*WRITES[-1], marks=pytest.mark.long)],  # a broker that goes away: test_broker_down.py
    ids=named,
)
def test_a_stream_that_cannot_be_written(
    spark: SparkSession, url: str, tmp_path: Path, change: Change, sink: dict[str, Any], words: str
) -> None:
    refused(lambda: write_stream(spark, url, tmp_path / "check", "refused", change, sink=sink), words, stream=True)
    assert visible(url, "refused") == []


@pytest.mark.parametrize(
    ("options", "overwrite", "words"),
    [
        ({"topic": "a/b"}, False, "BAD_TOPIC_NAME: 'a/b'"),
        ({"group": "a b"}, False, "BAD_GROUP_NAME: 'a b'"),
        ({"write_id": "w"}, False, "BAD_SETTING: 'write_id' is of batches"),
        ({}, True, "BAD_SETTING: output mode 'complete' would rewrite the topic"),
    ],
)
def test_a_sink_that_cannot_be(options: dict[str, str], overwrite: bool, words: str) -> None:
    schema = StructType().add("body", "string")
    with pytest.raises(mq.EscrowError) as problem:
        EscrowSource({"url": AWAY, "topic": "t"} | options).streamWriter(schema, overwrite)
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"end": "latest"}, "BAD_SETTING: a stream has no 'end'"), ({"topic": "%halves"}, "did you mean '%half'?")],
)
def test_a_stream_that_cannot_be(options: dict[str, str], words: str) -> None:
    with pytest.raises(mq.EscrowError) as problem:
        EscrowSource({"url": AWAY, "topic": "t"} | options).streamReader(StructType().add("body", "binary"))
    assert words in str(problem.value)


# Writing: a row in the middle


def spoilt(name: str, value: str) -> Change:
    """Row 25 has another value (SQL) there."""
    return lambda frame: frame.withColumn(name, f.expr(f"if(key = '25', {value}, string({name}))"))


def with_topic(change: Change, topic: str) -> Change:
    return lambda frame: change(frame.withColumn("topic", f.lit(topic)))


NOBODY = (spoilt("body", "NULL"), False, "BAD_BATCH: column 'body' is null in the row with ")
NOWHERE = (spoilt("topic", "NULL"), True, "BAD_BATCH: column 'topic' is null in the row with key '25'")
TOO_LONG = (
    spoilt("body", "repeat('x', 1001)"),
    False,
    "BODY_TOO_LARGE: the body is over the limit: the row with topic '{}', key '25'",
)
SPOILT = [
    NOBODY,
    NOWHERE,
    TOO_LONG,
    (spoilt("topic", "'%half'"), True, "BAD_TOPIC_NAME: not a topic name: the row with topic '%half', key '25'"),
    (
        lambda frame: frame.withColumn("properties", f.create_map(f.lit("a"), f.when(f.col("key") != "25", "b"))),
        False,
        "BAD_BATCH: column 'properties' has null names or values",
    ),
]


def test_a_batch_with_one_bad_row_leaves_nothing_and_the_next_is_written(spark: SparkSession, url: str) -> None:
    before = undecided(url)
    for number, (change, by_row, words) in enumerate(SPOILT):
        topic = f"rows-{number}"
        frame = with_topic(change, topic)(rows(spark, 0, 40)) if by_row else change(rows(spark, 0, 40))
        refused(lambda: write_batch(frame, url, None if by_row else topic), words.format(topic))
        assert visible(url, topic) == []
        assert undecided(url) == before  # rolled back at once, by the task that met it
        write_batch(frame.where("key != '25'"), url, None if by_row else topic)
        assert visible(url, topic) == sorted({*numbers(0, 40)} - {"25"})


@pytest.mark.invariant("I42")
def test_a_batch_of_a_stream_with_a_bad_row_leaves_nothing_and_the_mended_query_goes_on(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    def run(change: Change) -> None:
        write_stream(spark, url, tmp_path / "check", None, with_topic(change, "st"), source={"maxRowsPerTrigger": 16})

    for change, _, words in (NOBODY, NOWHERE, TOO_LONG):
        refused(lambda: run(change), words.format("st"), stream=True)
        assert visible(url, "st") == numbers(0, 16)  # the batch before is whole; nothing of the bad one
    run(lambda frame: frame.where("key != '25'"))
    assert visible(url, "st") == sorted({*numbers(0, 40)} - {"25"})


# A checkpoint that is not this sink's


@pytest.mark.invariant("I42")
def test_a_sink_goes_on_into_another_topic_but_not_at_another_broker(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    with mq.connect(url) as bus:
        bus.admin.create_topic("moving", 1)
    source = {"topic": "moving", "url": url}
    check = tmp_path / "check"
    write_stream(spark, url, check, "first", source=source)  # an empty batch leaves its mark, too
    send(url, 0, 10, "moving")
    write_stream(spark, url, check, "first", source=source)
    send(url, 10, 20, "moving")
    write_stream(spark, url, check, "second", source=source)
    assert visible(url, "first") == numbers(0, 10)
    assert visible(url, "second") == numbers(10, 20)
    send(url, 20, 30, "moving")
    other = Broker(tmp_path / "other")
    try:
        refused(
            lambda: write_stream(spark, other.url, check, "first", source=source),
            "BAD_SETTING: batch 3 of query",
            f"the last that was written to {other.url} is none",
            "option 'adopt' = true",
            stream=True,
        )
        assert visible(other.url, "first") == []
        assert undecided(other.url) == 0
        write_stream(spark, other.url, check, "first", source=source, sink={"adopt": "true"})
        assert visible(other.url, "first") == numbers(20, 30)
    finally:
        other.kill()
