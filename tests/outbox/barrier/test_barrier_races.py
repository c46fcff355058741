"""A local transaction held open while the check-back asks, then committed, rolled back or killed: in all orders, on all
databases.
"""

from __future__ import annotations

import functools
import random
import threading

import numpy as np
import pytest
import sqlalchemy as sa
from barrier_race import ENDS, Checker, Local, Wrong, all_orders, orders, play

import escrowmq as mq
from escrowmq.model import TransactionId
from escrowmq.outbox import Barrier, bind_tx
from escrowmq.outbox.barrier import columns

ids = np.array([bytes(TransactionId(1, 1, 1))], "S16")


def some(plays, count):
    return random.Random(7).sample(plays, count)


def played(shop, plays, make=Checker):
    """Play them all; how many of each (committed, answers) there were."""
    found = {}
    for number, (order, end, write_first) in enumerate(plays):
        committed, answers = play(shop, number, order, end, write_first, make)
        key = (committed, *sorted(answer.name for answer in answers))
        found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.invariant("I15")
def test_one_checker_in_every_order(shop):
    plays = [(o, end, first) for o in all_orders(1, 3) for end in ENDS for first in (True, False)]
    assert len(plays) == 6 * 20
    found = played(shop, plays)
    assert {key[1] for key in found if key[0]} == {"COMMIT", "UNKNOWN"}  # it was worth playing: every case came to pass
    assert {key[1] for key in found if not key[0]} == {"ROLLBACK", "UNKNOWN"}


@pytest.mark.invariant("I15")
def test_two_checkers_in_every_order(shop):
    every = all_orders(2, 2)
    assert len(every) == 105  # of two orders that differ only in who is who, one is enough
    plays = [(order, "commit", False) for order in every] + some([(order, "rollback", False) for order in every], 25)
    found = played(shop, plays, functools.partial(Checker, looks=False))
    assert (True, "COMMIT", "COMMIT") in found
    assert (False, "ROLLBACK", "ROLLBACK") in found


THREE = [(o, end, first) for o in all_orders(3, 2) for end in ENDS for first in (True, False)]


@pytest.mark.invariant("I15")
def test_three_checkers_in_some_orders(shop):
    played(shop, some(THREE, 60), functools.partial(Checker, looks=False))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_checkers_in_every_order(shop):
    assert len(THREE) == 7560
    played(shop, THREE, functools.partial(Checker, looks=False))


@pytest.mark.invariant("I5")
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_bind_that_meets_a_checker_in_the_act_waits_for_what_it_does(shop, ends):
    """The one order that a single thread cannot play: the checker has inserted and not committed."""
    inserted, go, done = threading.Event(), threading.Event(), []

    def check():
        with shop.connect() as connection:
            if shop.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            columns.insert(connection, ids, "", columns.ROLLED_BACK, strict=False)
            inserted.set()
            assert go.wait(60)
            getattr(connection, ends)()

    def bind():
        local = Local(shop, 1, "commit", True)
        try:
            local.begin()
            local.bind()
            local.end()
        finally:
            done.append(local.dead)

    checker, binder = threading.Thread(target=check), threading.Thread(target=bind)
    checker.start()
    assert inserted.wait(60)
    binder.start()
    assert (
        Barrier(shop, wait=0).decide(TransactionId(1, 1, 1)) is mq.UNKNOWN
    )  # another checker neither waits nor guesses
    assert not done
    go.set()
    checker.join(60)
    binder.join(60)
    late = ends == "commit"
    assert done == [late]
    assert Barrier(shop).decide(TransactionId(1, 1, 1)) is (mq.ROLLBACK if late else mq.COMMIT)
    with shop.connect() as connection:
        assert len(connection.execute(sa.select(orders)).all()) == (0 if late else 1)


@pytest.mark.invariant("I13")
def test_what_is_in_flight_holds_up_no_other(shop):
    """Committed ones are answered at once everywhere; absent ones too, where a database can write beside a writer."""
    barrier = Barrier(shop, wait=0.05)
    with shop.begin() as connection:
        bind_tx(connection, TransactionId(1, 1, 500))
    with shop.connect() as connection:
        connection.execute(orders.insert(), {"id": 1})
        for number in (3, 77, 612):
            bind_tx(connection, TransactionId(1, 1, number))
        told = barrier.decide_ids([TransactionId(1, 1, number) for number in range(1000)])
        connection.commit()
    unknown = set(range(1000)) - {500} if shop.dialect.name == "sqlite" else {3, 77, 612}
    assert set(np.flatnonzero(told == mq.UNKNOWN).tolist()) == unknown
    assert np.flatnonzero(told == mq.COMMIT).tolist() == [500]
    after = barrier.decide_ids([TransactionId(1, 1, number) for number in range(1000)])
    assert np.flatnonzero(after == mq.COMMIT).tolist() == [3, 77, 500, 612]
    assert np.count_nonzero(after == mq.ROLLBACK) == 996


@pytest.mark.invariant("I13")
@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)  # SQLite has one writer at a time
def test_what_holds_its_rows_unseen_holds_up_no_other_either(shop, monkeypatch):
    """Without the locks and dirty reads that find them early: the insert is held up, cut up, and passes for the
    others."""
    barrier = Barrier(shop, wait=60)
    monkeypatch.setattr(type(barrier._databases[0]), "in_flight", lambda self, ids: np.zeros(len(ids), np.bool_))
    with shop.connect() as connection:
        for number in (3, 77, 612):
            bind_tx(connection, TransactionId(1, 1, number))
        told = barrier.decide_ids([TransactionId(1, 1, number) for number in range(1000)])
        assert np.flatnonzero(told == mq.UNKNOWN).tolist() == [3, 77, 612]
        assert np.count_nonzero(told == mq.ROLLBACK) == 997
        connection.rollback()
    assert barrier.decide(TransactionId(1, 1, 77)) is mq.ROLLBACK


# Planted bugs: each must be caught by the plays above


class Guesses(Checker):
    """Looks, and takes what it does not see for rolled back."""

    def close(self):
        pass

    def read(self):
        super().read()
        if self.answer is mq.UNKNOWN:
            self.answer = mq.ROLLBACK


class OldSnapshot(Checker):
    """Does all in one transaction of REPEATABLE READ, and so reads what stood before it inserted."""

    def __init__(self, engine, identity):
        super().__init__(engine, identity)
        self._connection = engine.connect().execution_options(isolation_level="REPEATABLE READ")

    def _seen(self):
        return columns.read(self._connection, self._ids, "")[0]

    def look(self):
        if self._seen() == columns.COMMITTED:
            self.answer = mq.COMMIT

    def close(self):
        self._connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 0")
        try:
            columns.insert(self._connection, self._ids, "", columns.ROLLED_BACK, strict=False)
        except sa.exc.OperationalError:
            self._connection.rollback()

    def read(self):
        if self.answer is mq.UNKNOWN:
            self.answer = mq.COMMIT if self._seen() == columns.COMMITTED else mq.ROLLBACK
        self._connection.commit()
        self._connection.close()


ONE = [(o, end, False) for o in all_orders(1, 3) for end in ("commit", "rollback")]


@pytest.mark.invariant("I15")
def test_planted_a_checker_that_guesses_is_caught(shop):
    with pytest.raises(Wrong):
        played(shop, ONE, Guesses)


@pytest.mark.invariant("I15")
def test_planted_a_table_without_its_key_is_caught(shop):
    with shop.begin() as connection:
        connection.exec_driver_sql("DROP TABLE trans_barrier")
        kind = {"postgresql": "bytea", "sqlite": "blob"}.get(shop.dialect.name, "binary(16)")
        columns = f"transaction_id {kind}, branch varchar(127), reason smallint, decided_us bigint"
        connection.exec_driver_sql(f"CREATE TABLE trans_barrier ({columns})")
    with pytest.raises(Wrong):
        played(shop, ONE)


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)  # the others refuse such an insert themselves
def test_planted_a_read_in_the_old_snapshot_is_caught(shop):
    with pytest.raises(Wrong):
        played(shop, ONE, OldSnapshot)
