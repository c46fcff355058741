"""A filter belongs to one query: whatever was asked of a DataFrame before, the next query sees all rows.

With push-down on, PySpark 4.3.0 keeps the reader that took the filters of a query with the DataFrame, for any Python
source that takes some. So format "escrow" takes none; what the broker is to filter, options say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter

import escrowmq as mq
from escrowmq.pipeline.reconcile import missing, read_side
from escrowmq.spark.reading import EscrowReader
from escrowmq.spark.source import register

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ROWS = 400
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """ROWS messages of ``t``, even and odd, in two queues; all but three of their keys in ``few``; two groups with a
    dead letter each that was discarded."""
    url = f"file:{tmp_path_factory.mktemp('filters') / 'data'}"
    with mq.connect(url) as bus:
        bus.admin.create_topic("t", 2)
        tags = ("even", "odd")
        messages = [mq.Message("t", b"%d" % n, key=f"k-{n}", tag=tags[n % 2], queue=n // 2 % 2) for n in range(ROWS)]
        producer = bus.producer("p")
        producer.send_batch(messages).check()
        bus.admin.create_topic("few", 1)
        producer.send_batch([mq.Message("few", b"", key=f"k-{n}") for n in range(ROWS - 3)]).check()
        for group in ("g", "h"):
            with bus.consumer(group, ["few"], max_attempts=1) as consumer:
                message = next(iter(consumer))
                message.nack()
            bus.admin.discard_dead_letters(group)
    return url


@pytest.fixture(params=["off", "on"])
def session(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """A session with push-down off, as Spark has it, or turned on by its user."""
    with push_down(spark, on=request.param == "on"):
        yield spark


@contextmanager
def push_down(spark: SparkSession, *, on: bool) -> Iterator[None]:
    """The session's setting, and format "escrow" registered after it was made."""
    spark.conf.unset(PUSH_DOWN)
    if on:
        spark.conf.set(PUSH_DOWN, "true")
    register(spark)
    try:
        assert spark.conf.get(PUSH_DOWN) == str(on).lower(), "register leaves the session as it is"
        yield
    finally:
        spark.conf.unset(PUSH_DOWN)


def read(spark: SparkSession, url: str, topic: str = "t", **options: Any) -> DataFrame:
    return spark.read.format("escrow").options(topic=topic, **options).load(url)


def by_tag(frame: DataFrame) -> dict[str, int]:
    return {row["tag"]: row["count"] for row in frame.groupBy("tag").count().collect()}


@pytest.mark.invariant("I41")
def test_a_filter_ends_with_its_query(session: SparkSession, url: str) -> None:
    frame = read(session, url)
    assert frame.where("tag = 'even'").count() == ROWS // 2
    assert frame.count() == ROWS
    assert by_tag(frame) == {"even": ROWS // 2, "odd": ROWS // 2}
    assert frame.where("queue = 0 and offset < 10").count() == 10
    assert frame.where("key = 'k-7'").count() == 1
    assert frame.where("tag in ('odd')").count() == ROWS // 2
    assert frame.where("stored < '2001-01-01'").count() == 0
    assert frame.count() == ROWS


@pytest.mark.invariant("I41")
def test_each_side_of_a_join_with_itself_has_its_own_filter(session: SparkSession, url: str) -> None:
    frame = read(session, url)
    even, odd = frame.where("tag = 'even'"), frame.where("tag = 'odd'")
    assert even.alias("a").join(odd.alias("b"), f.expr("a.offset = b.offset and a.queue = b.queue")).count() == 0
    assert even.unionByName(odd).count() == ROWS
    number = f.col("key").substr(3, 9).cast("int")
    pairs = even.select(number.alias("n")).join(odd.select((number - 1).alias("n")), "n")
    assert pairs.count() == ROWS // 2
    assert frame.join(frame.where("key = 'k-1'").select("tag"), "tag").count() == ROWS // 2
    assert frame.count() == ROWS


@pytest.mark.invariant("I41")
def test_what_is_cached_after_a_filtered_query_is_all(session: SparkSession, url: str) -> None:
    frame = read(session, url)
    assert frame.where("tag = 'even'").count() == ROWS // 2
    cached = frame.cache()
    assert cached.count() == ROWS
    assert cached.where("tag = 'odd'").count() == ROWS // 2
    cached.unpersist()
    assert frame.where("tag = 'odd'").count() == ROWS // 2
    assert by_tag(frame) == {"even": ROWS // 2, "odd": ROWS // 2}


def test_a_view_of_groups_filtered_by_one_still_has_the_others(session: SparkSession, url: str) -> None:
    acts = read(session, url, "%group-acts")
    assert [acts.where(f"group = '{group}'").count() for group in ("g", "h", "none")] == [1, 1, 0]
    assert acts.count() == 2


def test_ids_that_are_missing_are_all_there_after_one_was_looked_up(session: SparkSession, url: str) -> None:
    """Spark pushes a filter on an id through the grouping by id, to the sides."""
    half, commits = read_side(session, url, "t"), read_side(session, url, "few")
    lost = missing(half, commits, settled_before=datetime.now(UTC) + timedelta(days=1))
    assert lost.where(f"id = 'k-{ROWS - 1}'").count() == 1
    assert sorted(row["id"] for row in lost.collect()) == [f"k-{n}" for n in range(ROWS - 3, ROWS)]


def test_the_reader_takes_no_filters() -> None:
    """Not even by defining what gives them back: with push-down off Spark refuses a reader that does."""
    assert EscrowReader.pushFilters is DataSourceReader.pushFilters


def test_spark_itself_still_keeps_the_filter_of_one_query_for_the_next(spark: SparkSession) -> None:
    """A plain source of Spark's own interface, whose ten rows are even and odd in turns."""

    class TenRows(DataSource):
        name = classmethod(lambda cls: "ten")

        def schema(self) -> str:
            return "tag string"

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    class Reader(DataSourceReader):
        tag = None

        def pushFilters(self, filters: list[Filter]) -> list[Filter]:
            for one in filters:
                self.tag = one.value if isinstance(one, EqualTo) else self.tag
            return [one for one in filters if not isinstance(one, EqualTo)]

        def read(self, partition: Any) -> Iterator[tuple[str]]:
            return (row for row in [("even",), ("odd",)] * 5 if self.tag in (None, row[0]))

    with push_down(spark, on=True):
        spark.dataSource.register(TenRows)
        frame = spark.read.format("ten").load()
        counts = [frame.count(), frame.where("tag = 'even'").count(), frame.count()]
    assert counts[:2] == [10, 5]
    assert counts[2] == 5, "Spark has mended it: with that version EscrowReader may take filters again"


# What options say is filtered by the broker


def keys(frame: DataFrame) -> Counter[str]:
    return Counter(row["key"] for row in frame.select("key").collect())


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"key": "k-7"}, "key = 'k-7'"),
        ({"tags": "odd"}, "tag = 'odd'"),
        ({"tags": "odd||none"}, "tag in ('odd', 'none')"),
        ({"key": "k-7", "tags": "even"}, "false"),
        ({"queues": "1"}, "queue = 1"),
        ({"queues": "0, 1"}, "true"),
        ({"queues": "1", "tags": "even", "storedFrom": "2001-01-01"}, "queue = 1 and tag = 'even'"),
        ({"storedUntil": "2001-01-01T00:00:00+00:00"}, "false"),
    ],
)
def test_an_option_gives_what_the_filter_would(
    spark: SparkSession, url: str, options: dict[str, str], where: str
) -> None:
    assert keys(read(spark, url, **options)) == keys(read(spark, url).where(where))


def test_times_are_bounds_of_what_is_stored(
    spark: SparkSession, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """``start`` counts by when a message became visible, ``storedFrom`` by when it was stored."""
    url = f"file:{tmp_path / 'data'}"
    with mq.connect(url) as bus:
        producer = bus.producer("p", checker=lambda check: mq.UNKNOWN)
        half = producer.prepare("t", b"", key="early")
        bus.producer("plain").send("t", b"", key="plain")
        middle = bus.admin.hello()[0]["time_us"]
        eventually(lambda: bus.admin.hello()[0]["time_us"] > middle + 1)
        producer.commit(half.transaction_id)
    at = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=middle + 1)).isoformat()
    assert keys(read(spark, url, start=at)) == {"early": 1}
    assert keys(read(spark, url, storedFrom=at)) == {}
    assert keys(read(spark, url, storedUntil=at)) == {"early": 1, "plain": 1}
    assert read(spark, url, "%op", storedFrom=at).count() == read(spark, url, "%op", start=at).count() == 1
    assert read(spark, url, "%op", storedUntil=at).count() == 0


def test_a_view_of_one_group(spark: SparkSession, url: str) -> None:
    rows = read(spark, url, "%group-acts", group="g").collect()
    assert [(row["group"], row["act"]) for row in rows] == [("g", "discard")]
    assert read(spark, url, "%acks", group="none").count() == 0


def test_a_stream_has_the_same_options(spark: SparkSession, url: str, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    stream = spark.readStream.format("escrow").options(topic="t", tags="odd", queues="1").load(url)
    writer = stream.writeStream.foreachBatch(lambda frame, _: seen.update(keys(frame)))
    writer.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start().awaitTermination()
    assert seen == keys(read(spark, url).where("tag = 'odd' and queue = 1"))


def test_a_queue_that_is_not_there_is_named(spark: SparkSession, url: str) -> None:
    with pytest.raises(Exception, match="t has no queue 2"):
        read(spark, url, queues="0,2").count()
