"""examples/shop: payment, both sweeps, a late order and transaction 3 against each other, in every order that
matters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paying
import placing
import pytest
import shop_databases
import sqlalchemy as sa
import sweeps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paying import PaymentRefused
from placing import MINUTE_US, OrderFenced
from shop_tables import Freeze, Mark, Order, freezes, insert_new, order_marks, orders
from shop_world import BASKET, NAME, START, Act, World
from sweeps import Settled

from escrowmq_lab.databases import databases

Script = list[tuple[str, int]]


@contextmanager
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str | None) -> Iterator[World]:
    with databases(shop_databases.names(1), tmp_path, server) as urls:
        world = World(urls, monkeypatch)
        try:
            yield world
        finally:
            world.close()


@pytest.fixture
def on_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with opened(tmp_path, monkeypatch, None) as world:
        yield world


@pytest.fixture(params=["postgres_url", "mariadb_url"])
def on_server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with opened(tmp_path, monkeypatch, request.getfixturevalue(request.param)) as world:
        yield world


@pytest.fixture(params=[None, "postgres_url", "mariadb_url"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with opened(tmp_path, monkeypatch, request.param and request.getfixturevalue(request.param)) as world:
        yield world


# The acts


def pays(order_db: sa.Connection, product_db: sa.Connection) -> bool:
    return paying.pay(order_db, product_db, NAME)


def settles(order_db: sa.Connection, product_db: sa.Connection) -> Settled:
    return sweeps.settle_order(order_db, product_db, NAME, START + 15 * MINUTE_US)


def frees(order_db: sa.Connection, product_db: sa.Connection) -> Settled:
    return sweeps.release_orphan(order_db, product_db, NAME)


def places(order_db: sa.Connection, _: sa.Connection) -> bool:
    placing.place_order(order_db, NAME, BASKET, START + 14 * MINUTE_US)
    return True


def play_due(world: World, script: Script, pay: Act = pays, settle: Act = settles) -> list[str]:
    """An order that is due, somebody who pays it, and two sweeps. What a caller was told must be true at the end."""
    world.begin(ordered=True, age_us=15 * MINUTE_US)
    actors = [world.actor("payment", pay), world.actor("sweep", settle), world.actor("other sweep", settle)]
    wrong = world.play(actors, script) or world.sweep()
    with world.databases.shards[0].begin() as connection:
        state = connection.scalar(sa.select(orders.c.state))
    if actors[0].result is True and state != Order.PAID:
        wrong.append("the payment succeeded, the order is not paid")
    if isinstance(actors[0].result, PaymentRefused) and state == Order.PAID:
        wrong.append("the payment was refused, the order is paid")
    return wrong


def play_late(world: World, script: Script, free: Act = frees) -> list[str]:
    """Frozen stock without an order, an order that comes at last, sweep 2 and transaction 3."""
    world.begin(ordered=False, age_us=14 * MINUTE_US)
    actors = [world.actor("late order", places), world.actor("sweep", free), world.actor("transaction 3", free)]
    wrong = world.play(actors, script) or world.sweep_freezes()
    with world.databases.shards[0].begin() as connection:
        there = connection.scalar(sa.select(orders.c.state)) is not None
    with world.databases.products.begin() as connection:
        kept = set(connection.scalars(sa.select(freezes.c.state))) == {Freeze.FROZEN}
    if there != kept:
        wrong.append(f"an order: {there}, its stock kept: {kept}")
    if isinstance(actors[0].result, OrderFenced) and there:
        wrong.append("the order was refused and is there")
    return wrong or world.sweep()


# No order of steps, no death and no lost session makes two of them win

STEPS = st.lists(st.tuples(st.sampled_from(["step"] * 8 + ["kill", "cut"]), st.integers(0, 2)), max_size=14)
FEW, MANY = (
    settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture]) for count in (8, 40)
)


@MANY
@given(script=STEPS)
def test_a_payment_and_two_sweeps_never_both_win(on_sqlite: World, script: Script) -> None:
    assert play_due(on_sqlite, script) == []


@MANY
@given(script=STEPS)
def test_a_late_order_a_sweep_and_transaction_3_never_both_win(on_sqlite: World, script: Script) -> None:
    assert play_late(on_sqlite, script) == []


@FEW
@given(script=STEPS)
def test_on_servers_neither(on_server: World, script: Script) -> None:
    assert play_due(on_server, script) == []
    assert play_late(on_server, script) == []


def merges(first: int, second: int, whose: tuple[int, int] = (0, 1)) -> Iterator[Script]:
    """Every way in which the steps of two actors can lie between each other."""
    for places_of_second in itertools.combinations(range(first + second), second):
        taken = set(places_of_second)
        yield [("step", whose[at in taken]) for at in range(first + second)]


def deaths(script: Script) -> Iterator[Script]:
    """The script, and the script with one step of its second actor replaced by its death or by the loss of its
    session."""
    yield script
    second = max(whose for _, whose in script)
    for at, (_, whose) in enumerate(script):
        if whose == second:
            yield [*script[:at], ("kill", second), *script[at + 1 :]]
            yield [*script[: at + 1], ("cut", second), *script[at + 1 :]]


@pytest.mark.long
def test_every_interleaving_of_a_payment_and_a_sweep_with_every_death_of_the_sweep(world: World) -> None:
    for merge in merges(6, 4):
        for script in deaths(merge):
            assert play_due(world, script) == [], script


def test_every_interleaving_of_a_late_order_and_a_sweep(on_sqlite: World) -> None:
    for merge in merges(3, 5):
        assert play_late(on_sqlite, merge) == [], merge


# What each part of the construction is for: without it, something goes wrong


def settles_without_lock(order_db: sa.Connection, product_db: sa.Connection) -> None:
    with order_db.begin():
        order = order_db.execute(sa.select(orders).where(orders.c.trans_id == NAME)).one()
    if order.state != Order.UNPAID:
        return
    sweeps.reach("looked")
    with product_db.begin():
        sweeps.release(product_db, NAME, Freeze.UNSOLD)
    sweeps.reach("released")
    with order_db.begin():
        order_db.execute(sa.update(orders).values(state=Order.TIMED_OUT, settled=True))
        placing.tell(order_db, NAME, "timed out", order.units)


def settles_without_looking_back(order_db: sa.Connection, product_db: sa.Connection) -> None:
    """Does not notice that the lock of the order was lost before the freeze was locked."""
    with order_db.begin():
        order = order_db.execute(sa.select(orders).where(orders.c.trans_id == NAME).with_for_update()).one()
        if order.state != Order.UNPAID:
            return
        sweeps.reach("locked")
        with product_db.begin():
            sweeps.release(product_db, NAME, Freeze.UNSOLD)
        sweeps.reach("released")
        order_db.execute(sa.update(orders).values(state=Order.TIMED_OUT, settled=True))
        placing.tell(order_db, NAME, "timed out", order.units)


def pays_without_guard(order_db: sa.Connection, product_db: sa.Connection) -> bool:
    with order_db.begin():
        order = order_db.execute(sa.select(orders).where(orders.c.trans_id == NAME).with_for_update()).one()
        if order.state != Order.UNPAID:
            raise PaymentRefused(order.state)
        order_db.execute(sa.update(orders).values(state=Order.PAID))
        placing.tell(order_db, NAME, "paid", order.units)
    return True


def frees_without_fence(order_db: sa.Connection, product_db: sa.Connection) -> None:
    with order_db.begin():
        if order_db.scalar(sa.select(order_marks.c.mark).where(order_marks.c.trans_id == NAME)) == Mark.PLACED:
            return
    sweeps.reach("looked")
    with product_db.begin():
        sweeps.release(product_db, NAME, Freeze.UNSOLD)


def found(plays: Iterator[list[str]]) -> bool:
    return any(plays)


def test_a_sweep_that_does_not_lock_is_caught(on_sqlite: World) -> None:
    assert found(play_due(on_sqlite, script, settle=settles_without_lock) for script in merges(6, 4))


def test_a_payment_without_the_guard_is_caught(on_sqlite: World) -> None:
    assert found(play_due(on_sqlite, script, pay=pays_without_guard) for m in merges(2, 4) for script in deaths(m))


def test_a_sweep_that_does_not_notice_that_its_lock_was_lost_is_caught(on_sqlite: World) -> None:
    lost: Script = [("step", 1), ("cut", 1)]
    scripts = ([*lost, *merge] for merge in reversed(list(merges(6, 2))))
    assert found(play_due(on_sqlite, script, settle=settles_without_looking_back) for script in scripts)


def test_a_sweep_without_the_fence_is_caught(on_sqlite: World) -> None:
    assert found(play_late(on_sqlite, script, free=frees_without_fence) for script in merges(3, 3))


def test_a_look_at_a_replica_that_lags_is_caught(on_sqlite: World, tmp_path: Path) -> None:
    """Transaction 3 that reads where the order has not arrived yet gives away the stock of an order that is there."""
    world = on_sqlite
    world.begin(ordered=False, age_us=0)
    with (
        world.databases.shards[0].connect() as primary,
        sa.create_engine(f"sqlite:///{tmp_path / 'replica.db'}").connect() as replica,
    ):
        primary.connection.driver_connection.backup(replica.connection.driver_connection)
        placing.place_order(primary, NAME, BASKET, START)
        with world.databases.products.connect() as product_db:
            frees_without_fence(replica, product_db)
            assert world.problems() != []
    world.begin(ordered=True, age_us=0)
    with world.databases.shards[0].connect() as primary, world.databases.products.connect() as product_db:
        assert sweeps.release_orphan(primary, product_db, NAME) == Settled.HAS_ORDER
    assert world.problems() == []


def test_a_mark_is_given_once(world: World) -> None:
    with world.databases.shards[0].begin() as connection:
        assert insert_new(connection, order_marks, trans_id="x", mark=Mark.NEVER)
        assert not insert_new(connection, order_marks, trans_id="x", mark=Mark.PLACED)
        assert connection.scalar(sa.select(order_marks.c.mark)) == Mark.NEVER
