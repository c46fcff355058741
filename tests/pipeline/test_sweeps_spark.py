"""The sweeps on Spark over a sharded shop: as one clean run of plain SQL, whoever else runs and whoever is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from sweeps_killing import EACH, POINTS, Content, both, killing, once_cleanly
from sweeps_world import BOOKS, EVERYWHERE, NOW, SHARDS, World, world

from escrowmq.errors import Misuse
from escrowmq.pipeline.sql.source import read_sql
from escrowmq.pipeline.sql.tables import SqlRead
from escrowmq.pipeline.sweeps import Act, Books, Databases, Swept, sweep_freezes

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[World]:
    names = ["products", "warehouse", *(f"orders_{number}" for number in range(SHARDS))]
    with world([f"sqlite:///{tmp_path / name}.db" for name in names]) as made:
        made.fill(EACH)
        yield made


@pytest.fixture
def clean(shop: World) -> Content:
    return once_cleanly(shop)


def test_as_the_plain_sweeps_and_a_second_run_does_nothing(spark: SparkSession, shop: World, clean: Content) -> None:
    first, second = both(spark, shop)
    assert first.acts == {Act.SOLD: EACH, Act.TIMED_OUT: EACH}
    assert second.acts == {Act.ORPHAN: 2 * EACH}  # those fenced by a sweep that died, too
    assert shop.content() == clean
    assert [swept.acts for swept in both(spark, shop)] == [{}, {}]
    assert shop.content() == clean


def test_two_at_once_without_a_rule_for_shards(spark: SparkSession, shop: World, clean: Content) -> None:
    with ThreadPoolExecutor(2) as pool:
        running: list[Future[list[Swept]]] = [pool.submit(both, spark, shop, EVERYWHERE) for _ in range(2)]
        done = [one.result() for one in running]
    acts = [swept.acts for pair in done for swept in pair]
    for act, times in ((Act.SOLD, EACH), (Act.TIMED_OUT, EACH), (Act.ORPHAN, 2 * EACH)):
        assert sum(one.get(act, 0) for one in acts) == times
    without_marks = {name: rows for name, rows in clean.items() if not name.startswith("order_marks")}
    assert shop.content(marks=False) == without_marks
    assert shop.problems() == []


def test_executors_killed_at_every_place(spark: SparkSession, shop: World, clean: Content, tmp_path: Path) -> None:
    for sweep, points in POINTS.items():
        with killing(spark, points, tmp_path / sweep.__name__) as killed:
            while len(killed) < len(points):
                told = ""
                try:
                    sweep(spark, shop.databases, books=BOOKS, now_us=NOW)
                except Exception as problem:
                    told = str(problem)
                # it ends well only if the last place was of the run before, whose other task died after its neighbour
                assert "Python worker" in told or len(killed) == len(points)
                assert shop.problems() == []
    both(spark, shop)
    assert shop.content() == clean


def test_what_fails_is_told_and_done_by_the_next_run(spark: SparkSession, shop: World, clean: Content) -> None:
    with shop.shop.products.begin() as connection:
        broken = sa.text("UPDATE freezes SET state = 'released unsold' WHERE trans_id = 't-0000'")
        connection.execute(broken)
    first, _ = both(spark, shop)
    assert first.acts == {Act.SOLD: EACH - 1, Act.TIMED_OUT: EACH, Act.FAILED: 1}
    assert first.alerts == (("t-0000", "t-0000 is to be 'released sold', but its freeze is 'released unsold'"),)
    with shop.shop.products.begin() as connection:
        connection.execute(sa.text("UPDATE freezes SET state = 'frozen' WHERE trans_id = 't-0000'"))
    assert both(spark, shop)[0].acts == {Act.SOLD: 1}
    assert shop.content() == clean


def test_a_wrong_rule_for_shards_is_noticed_before_anything_is_done(spark: SparkSession, shop: World) -> None:
    before = shop.content()
    turned = Databases(shop.databases.orders[::-1], shop.databases.products)
    with pytest.raises(Misuse, match="orders are not sharded by crc32 of user_id"):
        sweep_freezes(spark, turned, books=BOOKS, now_us=NOW)
    with pytest.raises(Misuse, match=r"table 'freezes' of .* has no column user_nr"):
        sweep_freezes(spark, shop.databases, books=Books(shard_by="user_nr"), now_us=NOW)
    assert shop.content() == before


def test_tables_are_read_in_ranges_of_their_keys(spark: SparkSession, tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    dice = random.Random(5)
    rows = []
    for number, url in enumerate(urls):
        engine = sa.create_engine(url)
        made = [(f"k{dice.randrange(10**9)}", line, dice.choice([True, False, None])) for line in range(250)]
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE t (k VARCHAR(20) PRIMARY KEY, n BIGINT, yes BOOLEAN)"))
            connection.exec_driver_sql("INSERT INTO t VALUES (?, ?, ?)", made)
        engine.dispose()
        rows += [(number, k, n, yes) for k, n, yes in made if n >= 10]
    where = (("n", ">=", 10),)
    found = read_sql(spark, [SqlRead(url, "t", ("k", "n", "yes"), where) for url in urls], partition_rows=40)
    assert found.rdd.getNumPartitions() == 12
    assert sorted(map(tuple, found.collect())) == sorted(rows)
    with pytest.raises(Misuse, match="has no column m"):
        read_sql(spark, [SqlRead(urls[0], "t", ("m",))])
    plan = found._jdf.queryExecution().toString()  # may be shown to many: no URL with its password in it
    assert "escrowmq-sql" in plan
    assert str(tmp_path) not in plan
