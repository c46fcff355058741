"""The sweeps on Spark over a sharded shop: as one clean run of plain SQL, whoever else runs and whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from sweeps_world import BOOKS, EVERYWHERE, NOW, SHARDS, World, world

from escrowmq.errors import Misuse
from escrowmq.pipeline.sql_source import SqlRead, read_sql
from escrowmq.pipeline.sweeps import Act, Books, Databases, Swept, sweep_freezes, sweep_orders
from escrowmq.platform.failpoints import TELL_VARIABLE, VARIABLE

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

EACH = 6
POINTS = {
    sweep_orders: ("sweep.locked", "sweep.freeze-written", "sweep.released", "sweep.settled"),
    sweep_freezes: ("sweep.fence-written", "sweep.fenced", "sweep.orphan-written", "sweep.orphan-released"),
}


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[World]:
    names = ["products", "warehouse", *(f"orders_{number}" for number in range(SHARDS))]
    with world([f"sqlite:///{tmp_path / name}.db" for name in names]) as made:
        made.fill(EACH)
        yield made


@pytest.fixture
def clean(shop: World) -> dict[str, list[tuple[Any, ...]]]:
    """What one clean run of examples/shop's sweeps leaves; the shop is then as before."""
    shop.plain_sweeps()
    found = shop.content()
    shop.fill(EACH)
    return found


def both(spark: SparkSession, shop: World, books: Books = BOOKS) -> list[Swept]:
    return [sweep(spark, shop.databases, books=books, now_us=NOW) for sweep in (sweep_orders, sweep_freezes)]


def test_as_the_plain_sweeps_and_a_second_run_does_nothing(spark: SparkSession, shop: World, clean: Any) -> None:
    first, second = both(spark, shop)
    assert first.acts == {Act.SOLD: EACH, Act.TIMED_OUT: EACH}
    assert second.acts == {Act.ORPHAN: 2 * EACH}  # those fenced by a sweep that died, too
    assert shop.content() == clean
    assert [swept.acts for swept in both(spark, shop)] == [{}, {}]
    assert shop.content() == clean


def test_two_at_once_without_a_rule_for_shards(spark: SparkSession, shop: World, clean: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        running: list[Future[list[Swept]]] = [pool.submit(both, spark, shop, EVERYWHERE) for _ in range(2)]
        done = [one.result() for one in running]
    acts = [swept.acts for pair in done for swept in pair]
    for act, times in ((Act.SOLD, EACH), (Act.TIMED_OUT, EACH), (Act.ORPHAN, 2 * EACH)):
        assert sum(one.get(act, 0) for one in acts) == times
    without_marks = {name: rows for name, rows in clean.items() if not name.startswith("order_marks")}
    assert shop.content(marks=False) == without_marks
    assert shop.problems() == []


def test_executors_killed_at_every_place(spark: SparkSession, shop: World, clean: Any, tmp_path: Path) -> None:
    for sweep, points in POINTS.items():
        with killing(spark, points, tmp_path) as killed:
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


@contextmanager
def killing(spark: SparkSession, points: tuple[str, ...], told: Path) -> Iterator[list[str]]:
    """Spark's Python workers die at these places: at each the first that comes there, once. What was killed so far."""
    environment = spark.sparkContext.environment  # of the workers that are started from now on
    killed: list[str] = []
    done = threading.Event()

    def kill() -> None:
        while not done.wait(0.01):
            for point in points:
                file = told / point
                if file.exists():
                    killed.append(point)
                    os.kill(int(file.read_text()), signal.SIGKILL)
                    file.unlink()

    environment |= {VARIABLE: ",".join(points), TELL_VARIABLE: str(told)}
    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()
        for name in (VARIABLE, TELL_VARIABLE):
            del environment[name]


def test_what_fails_is_told_and_done_by_the_next_run(spark: SparkSession, shop: World, clean: Any) -> None:
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
