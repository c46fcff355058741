"""examples/shop: no piece is sold twice or lost, whatever dies; every step killed at every place ends as a clean run
does.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import shop
import shop_account
import shop_databases
import shop_steps
import sqlalchemy as sa
import sweeps
from placing import MINUTE_US, OutOfStock, take_stock
from shop_baskets import baskets, shelves
from shop_databases import Databases
from shop_steps import PLACES, START_US, STEPS, Run
from shop_tables import Basket, Freeze, Order, freezes, orders, parcels, products, users
from till import Fate

from escrowmq.outbox.tables import trans_message
from escrowmq.platform import failpoints
from escrowmq_lab.databases import databases

SCRIPT = Path(shop.__file__)
STEADY = (Fate.PAYS, Fate.FORGETS, Fate.LOSES_ANSWER, Fate.PAYS, Fate.NEVER_ARRIVES)


def told(tmp_path: Path, **more: object) -> Namespace:
    given = {"database_url": None, "orders": 30, "shards": 2, "crash": False, "data": None, "keep": False}
    return Namespace(**{**given, "folder": tmp_path / "run", **more})


# The command


@pytest.mark.invariant("I24")
def test_one_command(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--orders", "40", "--shards", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "verdict: every piece and every order accounted for"


@pytest.mark.parametrize("server", ["postgres_url", "mariadb_url"])
def test_on_a_server_it_removes_what_it_made(request: pytest.FixtureRequest, tmp_path: Path, server: str) -> None:
    url = request.getfixturevalue(server)
    assert shop.main(told(tmp_path, database_url=url)) == 0
    with databases(["shop_products"], tmp_path, url):  # somebody's own: refused by name, and left alone
        assert shop.main(told(tmp_path, database_url=url)) == 2
        with databases(["shop_warehouse"], tmp_path, url):
            pass
    with databases(["shop_products"], tmp_path, url):
        pass


@pytest.mark.long
@pytest.mark.parametrize("server", [None, "postgres_url", "mariadb_url"])
def test_killed_processes(request: pytest.FixtureRequest, tmp_path: Path, server: str | None) -> None:
    url = server and request.getfixturevalue(server)
    assert shop.main(told(tmp_path, database_url=url, orders=80, crash=True)) == 0


def test_real_invoices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"]
    lines += [f"{n},{n % 4:05d},a lamp,{1 + n % 3},2011-01-0{1 + n % 9}T10:00,2.50,{n % 5},France" for n in range(20)]
    (tmp_path / "orders.csv").write_text("\n".join([*lines, "C21,00001,returned,-1,2011-01-01T10:00,2.50,1,France"]))
    assert shop.main(told(tmp_path, data=tmp_path / "orders.csv")) == 0
    assert "20 baskets" in capsys.readouterr().out
    assert shop.main(told(tmp_path, data=tmp_path / "none.csv", folder=tmp_path / "other")) == 2
    assert "no orders file" in capsys.readouterr().err


# Killed anywhere and run again, it ends as a clean run does


class Killed(BaseException):
    """The process is gone: nothing more is committed."""


def die() -> None:
    raise Killed


@contextmanager
def opened(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, Databases]]:
    """Databases of a run whose baskets are all in stock and never leave anything for chance."""
    wanted = [(n, basket, fate) for (n, basket, _), fate in zip(baskets(count), cycle(STEADY), strict=False)]
    monkeypatch.setattr(Run, "baskets", lambda _: wanted)
    monkeypatch.setattr(shop_steps, "TILLS", 1)
    with databases(shop_databases.names(2), folder) as urls, shop_databases.opened(urls) as found:
        for engine in [found.products, *found.shards]:  # what these tests write need not outlive them
            sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous = OFF"))
        shop_databases.create(found, {name: 2 * pieces for name, pieces in shelves(wanted).items()})
        yield Run(urls, folder, count), found


def outcome(found: Databases) -> tuple[Counter[str], dict[str, int]]:
    """How every basket ended, and what is on every shelf."""
    ends: Counter[str] = Counter()
    for shard in found.shards:
        with shard.begin() as connection:
            rows = connection.execute(sa.select(orders.c.trans_id, orders.c.state))
            ends.update(f"{row.trans_id[:7]} {row.state}" for row in rows)
    with found.products.begin() as connection:
        return ends, {row.product_id: row.stock for row in connection.execute(sa.select(products))}


def played(run: Run, found: Databases, dies_in: str = "", place: str = "", count: int = 1) -> bool:
    """Tills and both sweeps, the one step dying at ``place`` first; whether it came there."""
    died = False
    for name in ("tills", "sweep 2", "sweep 1"):
        if name == dies_in:
            failpoints.arm(failpoints.Failpoint(place, count, die))
            try:
                STEPS[name](run, found)
            except Killed:
                died = True
            finally:
                failpoints.arm()
            assert shop_account.order_problems(found, START_US + (15 * MINUTE_US if name == "sweep 1" else 0)) == []
        STEPS[name](run, found)
    assert shop_account.final_problems(found) == []
    return died


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counter[str], dict[str, int]]:
    with pytest.MonkeyPatch.context() as patch, opened(tmp_path_factory.mktemp("clean"), 10, patch) as (run, found):
        assert not played(run, found)
        return outcome(found)


REACHED_BY_SWEEP_2 = {"shop.fence-written", "shop.fenced"}
"""Without crashes there is no orphan here, but every old freeze is asked about."""


@pytest.mark.invariant("I37")
@pytest.mark.parametrize(
    ("step", "place"),
    [(step, place) for step in ("tills", "sweep 1") for place in PLACES[step]]
    + [("sweep 2", place) for place in sorted(REACHED_BY_SWEEP_2)],
)
def test_killed_at_any_place_it_ends_as_a_clean_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: tuple[Counter[str], dict[str, int]], step: str, place: str
) -> None:
    with opened(tmp_path, 10, monkeypatch) as (run, found):
        assert played(run, found, step, place, count=2)
        assert outcome(found) == clean


def test_orphans_of_a_killed_sweep_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep 2 dies at each of its places while it gives the stock of dead tills back."""
    basket = Basket("ann", {"lamp": 2}, 500)
    with opened(tmp_path, 1, monkeypatch) as (run, found), found.products.connect() as product_db:
        with product_db.begin():
            product_db.execute(sa.insert(products).values(product_id="lamp", initial=10, stock=10))
        for place in PLACES["sweep 2"]:
            take_stock(product_db, f"9999999-{place[5:]}", basket, START_US)
            failpoints.arm(failpoints.Failpoint(place, 1, die))
            with pytest.raises(Killed):
                STEPS["sweep 2"](run, found)
            failpoints.arm()
        STEPS["sweep 2"](run, found)
        with product_db.begin():
            assert product_db.scalar(sa.select(products.c.stock).where(products.c.product_id == "lamp")) == 10
            assert set(product_db.scalars(sa.select(freezes.c.state))) == {Freeze.UNSOLD}


# What fails is alerted, and done by the next sweep


def test_what_fails_is_alerted_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, 5, monkeypatch) as (run, found):
        STEPS["tills"](run, found)
        with monkeypatch.context() as patch:
            patch.setattr(sweeps, "release", lambda *_: _fail())
            done = sweeps.sweep_orders(
                [shard.connect for shard in found.shards], found.products.connect, START_US + 15 * MINUTE_US
            )
        assert done["failed"] == sum(done.values()) > 0
        assert caplog.text.count("ALERT") == done["failed"]
        caplog.clear()
        assert shop_account.order_problems(found, START_US) == []
        STEPS["sweep 1"](run, found)
        assert shop_account.final_problems(found) == []
        assert not caplog.records


def _fail() -> None:
    raise sa.exc.OperationalError("release", None, Exception("the stock service is away"))


def test_stock_is_taken_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, 1, monkeypatch) as (_, found), found.products.connect() as product_db:
        with product_db.begin():
            rows = [{"product_id": name, "initial": 3, "stock": 3} for name in ("lamp", "oil")]
            product_db.execute(sa.insert(products), rows)
        with pytest.raises(OutOfStock):
            take_stock(product_db, "t", Basket("ann", {"lamp": 1, "oil": 4}, 1), START_US)
        with product_db.begin():
            assert set(product_db.scalars(sa.select(products.c.stock).where(products.c.initial == 3))) == {3}
            assert product_db.execute(sa.select(freezes)).all() == []


# The auditor is no yes-man


@pytest.fixture(scope="module")
def sold_out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """A finished run, all well."""
    folder = tmp_path_factory.mktemp("sold")
    with ExitStack() as stack:
        urls = stack.enter_context(databases(shop_databases.names(2), folder))
        found = stack.enter_context(shop_databases.opened(urls))
        assert shop.story(Run(urls, folder, 16), found, crash=False) == []
        yield found


TAMPERING = {
    "a piece is gone": ("products", sa.update(products).values(stock=products.c.stock + 1), "at first, but"),
    "a freeze is gone": ("products", sa.delete(freezes).where(freezes.c.state == Freeze.SOLD), "its freeze: missing"),
    "sold and given back": (
        "products",
        sa.update(freezes).where(freezes.c.state == Freeze.SOLD).values(state=Freeze.UNSOLD),
        f"{Order.PAID}, ",
    ),
    "sold without an order": ("shards", sa.delete(orders), "but there is no order"),
    "left unpaid": ("shards", sa.update(orders).values(state=Order.UNPAID), "still unpaid"),
    "not settled": ("shards", sa.update(orders).values(settled=False), "not settled"),
    "wrong sum": ("shards", sa.update(users).values(spent_cents=users.c.spent_cents + 1), "but paid for"),
    "a message lost": ("shards", sa.delete(trans_message).where(trans_message.c.seq == 1), "its messages say"),
    "a parcel lost": ("warehouse", sa.delete(parcels), "paid, 0 parcels"),
    "a parcel twice": (
        "warehouse",
        sa.insert(parcels).from_select(["trans_id", "units"], sa.select(parcels.c.trans_id, parcels.c.units)),
        "paid, 2 parcels",
    ),
}


@pytest.mark.parametrize("what", TAMPERING)
def test_the_auditor_sees_it(sold_out: Databases, what: str) -> None:
    where, statement, words = TAMPERING[what]
    engine = sold_out.shards[0] if where == "shards" else getattr(sold_out, where)
    with changed(engine, statement):
        found = shop_account.verdict(sold_out, START_US + 15 * MINUTE_US)
        assert any(words in problem for problem in found), found
    assert shop_account.verdict(sold_out, START_US + 15 * MINUTE_US) == []


@contextmanager
def changed(engine: sa.Engine, statement: sa.Executable) -> Iterator[None]:
    """The database with one statement done to it, which is undone afterwards."""
    with closing(sqlite3.connect(":memory:")) as kept, closing(sqlite3.connect(engine.url.database)) as file:
        file.backup(kept)
        with engine.begin() as connection:
            connection.execute(statement)
        yield
        engine.dispose()
        kept.backup(file)
