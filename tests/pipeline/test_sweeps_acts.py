"""The acts of the sweeps, without Spark, on three databases: killed between any two steps, twice at once, and against
plain SQL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sweeps_world import BOOKS, EVERYWHERE, KINDS, NOW, SHARDS, STOCK, World, world

from escrowmq.errors import Misuse
from escrowmq.pipeline.sweeps import Act, Books, Databases, Inconsistent, release_orphan, settle_order
from escrowmq.pipeline.sweeps import run as sweeping
from escrowmq.platform import failpoints
from escrowmq_lab.databases import databases

POINTS = (
    *("sweep.locked", "sweep.freeze-written", "sweep.released", "sweep.settled"),
    *("sweep.fence-written", "sweep.fenced", "sweep.orphan-written", "sweep.orphan-released"),
)


class Killed(BaseException):
    """The process is gone: whatever was not committed is rolled back."""


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    name = {"sqlite": None, "postgresql": "postgres_url", "mariadb": "mariadb_url"}[request.param]
    server = None if name is None else request.getfixturevalue(name)
    names = ["sweeps_products", "sweeps_warehouse", *(f"sweeps_orders_{number}" for number in range(SHARDS))]
    with databases(names, tmp_path, server) as urls, world(urls) as made:
        made.fill()
        yield made


def test_killed_at_every_place_and_run_again(shop: World) -> None:
    """Each point at its first, second, ... visit, until it is not visited any more."""
    shop.plain_sweeps()
    clean = shop.content()
    killed = dict.fromkeys(POINTS, 0)
    for point in POINTS:
        for visit in (1, 2, 3):
            shop.fill()
            failpoints.arm(failpoints.parse(f"{point}:{visit}", act=die))
            try:
                shop.act_on_all()
            except Killed:
                killed[point] += 1
            finally:
                failpoints.arm()
            assert shop.problems() == []
            shop.act_on_all()
            assert shop.content() == clean, (point, visit)
    assert all(killed.values()), killed


def die() -> None:
    raise Killed


def test_every_kind_of_order_ends_as_it_should_and_a_second_run_does_nothing(shop: World) -> None:
    done = shop.act_on_all(each=1)
    assert dict(zip(("paid", "paid, again", "unpaid", "unpaid, again"), done, strict=False)) == {
        "paid": Act.SOLD,
        "paid, again": Act.HAS_ORDER,
        "unpaid": Act.TIMED_OUT,
        "unpaid, again": Act.HAS_ORDER,
    }
    assert done[4:] == [Act.NOT_DUE, Act.HAS_ORDER, Act.BUSY, Act.ORPHAN, Act.BUSY, Act.BUSY, Act.ORPHAN]
    before = shop.content()
    assert {Act.SOLD, Act.TIMED_OUT, Act.ORPHAN}.isdisjoint(shop.act_on_all(each=1))
    assert shop.content() == before


def test_many_at_once_end_as_one(shop: World) -> None:
    shop.plain_sweeps()
    clean = shop.content()
    shop.fill()
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            shop.act_on_all()
        except sa.exc.OperationalError:  # a deadlock's victim, which the next run does
            pass
        except BaseException as problem:
            wrong.append(problem)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    shop.act_on_all()
    assert shop.content() == clean


def test_what_contradicts_itself_is_refused_and_nothing_is_changed(shop: World) -> None:
    with shop.shop.products.begin() as connection:
        connection.execute(sa.text("UPDATE freezes SET state = 'released unsold' WHERE trans_id = 't-0000'"))
        connection.execute(sa.text("DELETE FROM freezes WHERE trans_id = 't-0001'"))
        connection.execute(sa.text("DELETE FROM products WHERE product_id = 'pen'"))
    before = shop.content()
    shards = {name: shop.shop.shard(f"user {number}") for number, name in enumerate(KINDS)}
    with shop.shop.products.connect() as product_db:
        with shards["paid"].connect() as order_db, pytest.raises(Inconsistent, match="its freeze is 'released unsold'"):
            settle_order(order_db, product_db, "t-0000", NOW)
        with shards["unpaid"].connect() as order_db, pytest.raises(Inconsistent, match="there is no freeze of it"):
            settle_order(order_db, product_db, "t-0001", NOW)
        with shards["fenced"].connect() as order_db, pytest.raises(Inconsistent, match="there is no such product"):
            release_orphan([order_db], product_db, "t-0005")
    assert shop.content() == before


def test_without_a_rule_for_shards_all_of_them_are_fenced(shop: World) -> None:
    orphan, placed = "t-0003", "t-0001"
    with shop.shop.products.connect() as product_db:
        order_dbs = [shard.connect() for shard in shop.shop.shards]
        assert release_orphan(order_dbs, product_db, orphan, EVERYWHERE) == Act.ORPHAN
        assert release_orphan(order_dbs, product_db, placed, EVERYWHERE) == Act.HAS_ORDER
        assert release_orphan(order_dbs[::-1], product_db, placed, EVERYWHERE) == Act.HAS_ORDER
        for order_db in order_dbs:
            with order_db.begin():
                query = sa.text("SELECT mark FROM order_marks WHERE trans_id = 't-0003'")
                assert order_db.scalar(query) == "never"
            order_db.close()
    assert shop.problems() == []


def test_names_are_in_one_place_and_checked(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'mine.db'}")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ware (nr TEXT PRIMARY KEY, da BIGINT)"))
        connection.execute(sa.text("CREATE TABLE freezes (trans_id TEXT, product_id TEXT, amount INT, state TEXT)"))
        connection.execute(sa.text("INSERT INTO ware VALUES ('b', 1)"))
        connection.execute(sa.text("INSERT INTO freezes VALUES ('t', 'b', 2, 'frozen')"))
    (tmp_path / "names.json").write_text('{"products": "ware", "product_id": "nr", "product_stock": "da"}')
    books = Books.read(tmp_path / "names.json")
    with engine.begin() as connection:
        from escrowmq.pipeline.sweeps import release

        assert release(connection, "t", books.unsold, books)
        assert connection.scalar(sa.text("SELECT da FROM ware")) == 3
    engine.dispose()
    with pytest.raises(Misuse, match="has no table 'orders'"):
        books.check((str(engine.url),), str(engine.url))
    (tmp_path / "names.json").write_text('{"product": "ware"}')
    with pytest.raises(Misuse, match="did you mean 'products'"):
        Books.read(tmp_path / "names.json")
    with pytest.raises(Misuse, match="two order databases are the same"):
        Databases(("sqlite:///a", "sqlite:///a"), "sqlite:///b")
    assert "secret" not in repr(Databases(("postgresql://me:secret@host/a",), "mysql://me:secret@host/b"))
    assert BOOKS.ticks(1_500_000) == 1_500_000
    assert Books(ticks_per_second=1000).ticks(1_500_000) == 1500
    assert sum(STOCK.values()) == 2000


def test_the_time_of_a_sweep_is_that_of_its_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is ahead would give stock back while its customer may still pay."""
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("orders_0", "orders_1", "products")]
    for url in urls:
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE t (x)")
        engine.dispose()
    now_us = time.time_ns() // 1000
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(sweeping._read_now_us(None, Databases(tuple(urls[:2]), urls[2])) - now_us) < 3600e6
    told = iter([5_000_000, 3_000_000, 4_000_000])
    monkeypatch.setattr(sweeping, "database_now_us", lambda _: next(told))
    assert sweeping._read_now_us(None, Databases(tuple(urls[:2]), urls[2])) == 3_000_000
    assert sweeping._read_now_us(7, Databases(tuple(urls[:2]), urls[2])) == 7
