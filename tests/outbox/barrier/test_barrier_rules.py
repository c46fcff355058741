"""Binding and asking: whose transaction, which branch, what is refused, and what no isolation level can change."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest
import sqlalchemy as sa
from barrier_race import kill, orders
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

import escrowmq as mq
from escrowmq import outbox
from escrowmq.model import Check, TransactionId
from escrowmq.outbox import Barrier, bind_batch_tx, bind_tx
from escrowmq.outbox.barrier.marks import MARKED, lock_keys, marks_of
from escrowmq.outbox.tables import trans_barrier


def txn(number):
    return TransactionId(9, 3, number)


def number_of_orders(shop):
    with shop.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(orders))


@pytest.fixture
def barrier(shop):
    return Barrier(shop, wait=0.05)


# Sessions


def test_every_kind_of_session_binds(shop, barrier):
    with Session(shop) as session, session.begin():
        bind_tx(session, txn(1))
    with scoped_session(sessionmaker(shop))() as session:
        bind_tx(session, str(txn(2)))
        session.commit()
    registry = scoped_session(sessionmaker(shop))
    bind_tx(registry, txn(3))
    registry.commit()
    registry.remove()
    with shop.begin() as connection:
        bind_tx(connection, txn(4))
    with shop.connect() as connection:
        bind_tx(connection, txn(5))  # begins by itself, as every statement does
        connection.rollback()
    assert barrier.decide_ids([txn(n) for n in range(1, 6)]).tolist() == [1, 1, 1, 1, 2]


def test_what_cannot_hold_a_mark_is_refused(shop):
    with (
        shop.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(mq.Misuse, match="NO_TRANSACTION"),
    ):
        bind_tx(connection, txn(1))
    with Session(shop) as session:
        session.execute(orders.insert(), {"id": 1})
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT * FROM no_such_table"))
        if shop.dialect.name == "postgresql":
            with pytest.raises(mq.Misuse, match="NO_TRANSACTION"):
                bind_tx(session, txn(1))
        session.rollback()
    with pytest.raises(mq.Misuse, match="not a session"):
        bind_tx(shop, txn(1))
    with shop.connect() as connection, pytest.raises(mq.Misuse, match="not a transaction id"):
        bind_tx(connection, 17)
    with shop.connect() as connection, pytest.raises(mq.Misuse, match="branch"):
        bind_tx(connection, txn(1), branch="x" * 128)


def test_without_tables_both_sides_say_so(engine):
    with engine.connect() as connection, pytest.raises(mq.Misuse, match="NO_TABLES"):
        bind_tx(connection, txn(1))
    with pytest.raises(mq.Misuse, match="NO_TABLES"):
        Barrier(engine).decide(txn(1))


def test_a_transaction_without_messages_has_no_id_to_bind(shop, patient_bus):
    producer = patient_bus.producer("p", checker=Barrier(shop))
    with producer.transaction() as empty, shop.connect() as connection, pytest.raises(mq.Misuse, match="no messages"):
        bind_tx(connection, empty)


def test_what_is_no_engine_of_its_own_is_no_barrier():
    with pytest.raises(mq.Misuse, match="one connection"):
        Barrier(sa.create_engine("sqlite://"))
    with pytest.raises(mq.Misuse, match="one connection"):
        Barrier(sa.create_engine("sqlite://", poolclass=StaticPool))
    with pytest.raises(mq.Misuse, match="AsyncBarrier"):
        Barrier("sqlite:///x.db")
    with pytest.raises(mq.Misuse, match="needs an engine"):
        Barrier()
    with pytest.raises(mq.Misuse, match="wait"):
        Barrier(sa.create_engine("sqlite:///x.db"), wait=-1)


# Late ones


def late(shop, number):
    assert Barrier(shop).decide(txn(number)) is mq.ROLLBACK


@pytest.mark.invariant("I5")
def test_a_late_one_cannot_commit_even_if_the_exception_is_swallowed(shop):
    late(shop, 1)
    with Session(shop) as session:
        session.execute(orders.insert(), {"id": 1})
        with pytest.raises(mq.Fenced, match="LATE_COMMIT"):
            bind_tx(session, txn(1))
        session.commit()
    assert number_of_orders(shop) == 0
    with shop.connect() as connection:
        connection.execute(orders.insert(), {"id": 1})
        with pytest.raises(mq.Fenced, match="LATE_COMMIT"):
            bind_tx(connection, txn(1))
        connection.commit()
    assert number_of_orders(shop) == 0


@pytest.mark.parametrize("face", ["session", "connection"])
def test_inside_a_block_nothing_can_follow_a_late_one(shop, face):
    late(shop, 1)
    refused = pytest.raises((sa.exc.InvalidRequestError, sa.exc.DBAPIError))
    with Session(shop) if face == "session" else shop.connect() as holder, refused, holder.begin():
        with pytest.raises(mq.Fenced):
            bind_tx(holder, txn(1))
        holder.execute(orders.insert(), {"id": 1})
    assert number_of_orders(shop) == 0


def test_a_late_one_in_a_savepoint_costs_the_savepoint(shop):
    late(shop, 1)
    with Session(shop) as session, session.begin():
        session.execute(orders.insert(), {"id": 1})
        with pytest.raises(mq.Fenced), session.begin_nested():  # noqa: PT012
            session.execute(orders.insert(), {"id": 2})
            bind_tx(session, txn(1))
        session.execute(orders.insert(), {"id": 3})
    with shop.connect() as connection:
        assert connection.scalars(sa.select(orders.c.id).order_by(orders.c.id)).all() == [1, 3]


def test_one_of_many_that_is_late_fences_all(shop, barrier):
    late(shop, 5)
    with pytest.raises(mq.Fenced), shop.begin() as connection:
        bind_batch_tx(connection, [txn(n) for n in range(10)])
    assert set(barrier.decide_ids([txn(n) for n in range(10)])) == {mq.ROLLBACK}


def test_a_second_transaction_for_a_committed_id_is_told_that_the_work_is_done(shop):
    with shop.begin() as connection:
        bind_tx(connection, txn(1))
    with pytest.raises(mq.Rejected, match="ALREADY_EXISTS"), shop.begin() as connection:
        bind_tx(connection, txn(1))
    with pytest.raises(mq.Misuse, match="bound to this id already"), shop.begin() as connection:  # noqa: PT012
        bind_tx(connection, txn(2))
        bind_tx(connection, txn(2))


# Savepoints, isolation, two phases


def test_a_mark_stands_and_falls_with_its_savepoint(shop, barrier):
    with Session(shop) as session, session.begin():
        session.execute(orders.insert(), {"id": 1})
        nested = session.begin_nested()
        bind_tx(session, txn(1))
        nested.rollback()
        with session.begin_nested():
            bind_tx(session, txn(2))
        assert barrier.decide(txn(2)) is mq.UNKNOWN
    assert barrier.decide(txn(1)) is mq.ROLLBACK
    assert barrier.decide(txn(2)) is mq.COMMIT
    assert number_of_orders(shop) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("asked", [False, True])
def test_whatever_the_isolation_of_the_local_transaction(shop, barrier, level, asked):
    if shop.dialect.name == "sqlite":
        level = {"REPEATABLE READ": "READ UNCOMMITTED"}.get(level, level)
    with shop.connect().execution_options(isolation_level=level) as connection:
        connection.execute(sa.select(orders)).all()  # an old snapshot, where there are such
        if asked:
            late(shop, 1)
            with pytest.raises((mq.Fenced, sa.exc.DBAPIError)):
                bind_tx(connection, txn(1))
            connection.rollback()
        else:
            bind_tx(connection, txn(1))
            assert barrier.decide(txn(1)) is mq.UNKNOWN
            connection.commit()
    assert barrier.decide(txn(1)) is (mq.ROLLBACK if asked else mq.COMMIT)


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("level", ["AUTOCOMMIT", "READ UNCOMMITTED", "SERIALIZABLE"])
def test_whatever_the_isolation_of_the_checkers_engine(shop, database_url, level):
    def levels():
        with other.connect() as connection:
            return connection.get_isolation_level(), connection.exec_driver_sql(session).scalar()

    session = {"sqlite": "PRAGMA read_uncommitted", "postgresql": "SHOW transaction_isolation"}.get(
        shop.dialect.name, "SELECT @@SESSION.tx_isolation"
    )
    other = sa.create_engine(database_url, isolation_level=level, pool_size=1, max_overflow=0)
    before = levels()
    barrier = Barrier(other, wait=0.05)
    with shop.connect() as connection:
        bind_tx(connection, txn(1))
        for _ in range(3):  # over one connection, whatever state the last time left it in
            assert barrier.decide(txn(1)) is mq.UNKNOWN
        connection.commit()
    assert barrier.decide_ids([txn(1), txn(2)]).tolist() == [mq.COMMIT, mq.ROLLBACK]
    assert levels() == before
    other.dispose()


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("database_url", ["mariadb", "postgresql"], indirect=True)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_prepared_transactions_are_in_flight_until_they_end(shop, barrier, end):
    with shop.connect() as connection:
        prepared = connection.begin_twophase()
        bind_tx(connection, txn(1))
        prepared.prepare()
        assert barrier.decide(txn(1)) is mq.UNKNOWN
        getattr(prepared, end)()
    assert barrier.decide(txn(1)) is (mq.COMMIT if end == "commit" else mq.ROLLBACK)


def test_settings_of_borrowed_connections_are_given_back(shop):
    names = {
        "sqlite": ["PRAGMA busy_timeout", "PRAGMA read_uncommitted"],
        "postgresql": ["SHOW lock_timeout", "SHOW synchronous_commit", "SHOW transaction_isolation"],
    }.get(shop.dialect.name, ["SELECT @@innodb_lock_wait_timeout", "SELECT @@tx_isolation", "SELECT @@autocommit"])

    def read():
        with shop.connect() as connection:
            return [connection.exec_driver_sql(name).scalar() for name in names]

    before = read()
    barrier = Barrier(shop, wait=0.07)
    with shop.connect() as connection:
        bind_tx(connection, txn(1))
        barrier.decide_ids([txn(1), txn(2)])
    barrier.decide_ids([txn(3)])
    assert read() == before


# Branches, shards, shapes


def test_branches_are_told_apart(shop):
    with shop.begin() as connection:
        bind_tx(connection, txn(1))
        bind_tx(connection, txn(1), branch="stock")
        bind_tx(connection, txn(2), branch="stock")
    assert Barrier(shop).decide_ids([txn(1), txn(2)]).tolist() == [mq.COMMIT, mq.ROLLBACK]
    assert Barrier(shop, branch="stock").decide_ids([txn(1), txn(2)]).tolist() == [mq.COMMIT, mq.COMMIT]
    assert Barrier(shop, branch="Stock").decide(txn(1)) is mq.ROLLBACK


def test_shards_are_asked_together(tmp_path):
    shards = [sa.create_engine(f"sqlite:///{tmp_path}/{name}.db") for name in "abc"]
    for shard in shards:
        outbox.migrate(shard)
    barrier = Barrier(*shards, wait=0)
    for number, shard in enumerate(shards):
        with shard.begin() as connection:
            bind_tx(connection, txn(number))
    held = shards[1].connect()
    bind_tx(held, txn(3))
    assert barrier.decide_ids([txn(n) for n in range(5)]).tolist() == [1, 1, 1, 0, 0]
    held.commit()
    held.close()
    assert barrier.decide_ids([txn(n) for n in range(5)]).tolist() == [1, 1, 1, 1, 2]
    with shards[0].connect() as connection:  # what was committed elsewhere leaves no mark here, unless it was in flight
        assert connection.scalar(sa.select(sa.func.count()).select_from(trans_barrier)) == 3
    for shard in shards:
        shard.dispose()


def test_a_batch_keeps_its_order_its_repeats_and_its_nulls(shop, barrier):
    with shop.begin() as connection:
        bind_batch_tx(connection, [txn(2), None, txn(2**40), txn(0)])
    asked = [txn(5), txn(0), None, txn(2), txn(5), txn(2**40), txn(2**40 - 256)]
    assert barrier.decide_ids(asked).tolist() == [2, 1, 0, 1, 2, 1, 2]
    assert barrier.decide_ids([]).tolist() == []
    assert barrier(Check(txn(2), 1, ())) is mq.COMMIT
    assert barrier.decide(bytes(txn(0))) is mq.COMMIT


def test_ids_that_look_alike_are_not_mistaken(shop, barrier):
    """Zeros at the end, zeros at the beginning, quotes, backslashes, percent signs, high bytes."""
    raw = [bytes(15) + b"\1", b"\1" + bytes(15), bytes(16), b"%s'\\\"%(ids)s\n\0\xff?", b"\xff" * 16]
    with shop.begin() as connection:
        bind_batch_tx(connection, raw[::2])
    assert barrier.decide_ids(raw).tolist() == [1, 2, 1, 2, 1]


@pytest.mark.invariant("I15")
def test_any_sixteen_bytes_are_an_id(shop, barrier):
    """Also those that would spell characters where bytes are taken for text."""
    raw = np.random.default_rng(5).integers(0, 256, (3000, 16), np.uint8)
    raw[:1000] = np.frombuffer("é ü – €".encode() * 2000, np.uint8)[:16000].reshape(1000, 16) ^ (raw[:1000] % 2)
    every = list({row.tobytes() for row in raw})
    with shop.begin() as connection:
        bind_batch_tx(connection, every[::2])
        stored = set(connection.scalars(sa.select(trans_barrier.c.transaction_id)))
    assert stored == set(every[::2])
    told = barrier.decide_ids(every)
    assert (told[::2] == mq.COMMIT).all()
    assert (told[1::2] == mq.ROLLBACK).all()


def test_ten_thousand_in_one_call_cross_the_size_of_a_statement(shop, barrier):
    every = [txn(n) for n in range(10_000)]
    with shop.begin() as connection:
        bind_batch_tx(connection, every[::2])
    told = barrier.decide_ids(every)
    assert (told[::2] == mq.COMMIT).all()
    assert (told[1::2] == mq.ROLLBACK).all()


@pytest.mark.invariant("I13")
@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_those_in_flight_are_found_without_waiting(shop):
    every = np.array([bytes(txn(number)) for number in range(300)], "S16")
    held = [*range(0, 60), 299]
    assert len(held) <= MARKED
    with shop.connect() as connection, shop.connect() as other:
        bind_batch_tx(connection, [txn(number) for number in held])
        bind_tx(other, txn(100), branch="another")
        assert np.flatnonzero(marks_of(shop, "", 0.5).in_flight(every)).tolist() == held
        assert np.flatnonzero(marks_of(shop, "another", 0.5).in_flight(every)).tolist() == [100]
        connection.rollback()
        assert not marks_of(shop, "", 0.5).in_flight(every).any()


def test_lock_keys_are_spread():
    ids = np.array([bytes(TransactionId(s, e, p)) for s in range(10) for e in range(10) for p in range(100)], "S16")
    assert len(np.unique(lock_keys(ids, ""))) == 10_000
    assert not np.isin(lock_keys(ids, ""), lock_keys(ids, "b")).any()


def test_a_database_that_cannot_be_written_still_tells_what_is_committed(shop, barrier, monkeypatch, caplog):
    with shop.begin() as connection:
        bind_tx(connection, txn(1))

    def refuse(self, ids):
        raise sa.exc.OperationalError("INSERT", {}, Exception("read-only"))

    monkeypatch.setattr(type(barrier._databases[0]), "insert", refuse)
    assert barrier.decide_ids([txn(1), txn(2)]).tolist() == [mq.COMMIT, mq.UNKNOWN]
    assert "read-only" in caplog.text


def test_an_insert_that_the_database_refuses_is_not_taken_for_a_mark_that_stands(shop, barrier, caplog):
    """INSERT IGNORE would say nothing, and the transaction be asked about for ever."""
    guards = {
        "sqlite": ["CREATE TRIGGER t BEFORE INSERT ON trans_barrier BEGIN SELECT RAISE(ABORT, 'refused'); END"],
        "postgresql": ["ALTER TABLE trans_barrier ADD CONSTRAINT refused CHECK (reason < 0)"],
        "mysql": [
            "CREATE TABLE known (name VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY)",
            "ALTER TABLE trans_barrier ADD CONSTRAINT refused FOREIGN KEY (branch) REFERENCES known (name)",
        ],
    }
    with shop.begin() as connection:
        for guard in guards[shop.dialect.name]:
            connection.exec_driver_sql(guard)
    assert barrier.decide(txn(1)) is mq.UNKNOWN
    assert "could not be closed for 1 transactions" in caplog.text
    assert "refused" in caplog.text


def test_a_connection_that_dies_takes_its_mark_with_it(shop, eventually):
    connection = shop.connect()
    bind_tx(connection, txn(1))
    kill(shop, connection)
    connection.close()
    eventually(lambda: Barrier(shop, wait=0).decide(txn(1)) is mq.ROLLBACK)


# Purging


def aged(shop, number, seconds):
    with shop.begin() as connection:
        bind_tx(connection, txn(number))
        then = time.time_ns() // 1000 - round(seconds * 1e6)
        update = sa.update(trans_barrier).where(trans_barrier.c.transaction_id == bytes(txn(number)))
        connection.execute(update.values(decided_us=then))


def test_old_marks_are_purged_in_pieces_and_young_ones_kept(shop, barrier):
    week = 7 * 86400
    for number in range(25):
        aged(shop, number, week + 3600 + 60 * (number // 3))
    for number in range(25, 30):
        aged(shop, number, week - 3600)
    statements = []
    sa.event.listen(shop, "before_cursor_execute", lambda *given: statements.append(given[2]))
    kept = txn(7)
    assert barrier.purge(timedelta(days=7), keep=[str(kept)], chunk=4) == 24
    assert sum("DELETE" in one for one in statements) >= 5
    with shop.connect() as connection:
        left = {bytes(row[0]) for row in connection.execute(sa.select(trans_barrier.c.transaction_id))}
    assert left == {bytes(txn(number)) for number in [7, *range(25, 30)]}
    assert barrier.purge(week, keep=kept, chunk=1) == 0


def test_purging_what_the_broker_may_still_ask_about_is_refused(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/x.db")
    outbox.migrate(engine)
    with pytest.raises(mq.Misuse, match="retention"):
        Barrier(engine).purge(86400)
    assert Barrier(engine).purge(86400, retention=3600) == 0
    with pytest.raises(mq.Misuse, match="chunk"):
        Barrier(engine).purge(1e9, chunk=0)
    with pytest.raises(mq.Misuse, match="older_than"):
        Barrier(engine).purge("a week")
    engine.dispose()
