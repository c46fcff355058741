"""How a bound transaction ends: as the database says, however its blocks are left and whatever is lost on the way."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import sqlalchemy as sa
from barrier_race import Later, kill, orders
from sqlalchemy.orm import Session

import escrowmq as mq
from escrowmq.outbox import Barrier, bind_batch_tx, bind_tx


def state(bus, txn):
    return bus.admin.transaction(txn.id)["state"]


def placed(shop):
    with shop.connect() as connection:
        return connection.scalars(sa.select(orders.c.id).order_by(orders.c.id)).all()


@pytest.fixture
def producer(patient_bus, shop):
    """Of a broker that does not ask by itself: what is decided here is decided at the end of the block."""
    return patient_bus.producer("p", checker=Barrier(shop, wait=0.05))


def test_three_lines_commit_both(shop, patient_bus, producer, t):
    with producer.transaction() as txn, Session(shop) as session, session.begin():
        txn.send(t, b"x")
        session.execute(orders.insert(), {"id": 1})
        bind_tx(session, txn)
    assert (state(patient_bus, txn), placed(shop)) == ("committed", [1])


def test_an_exception_rolls_both_back(shop, patient_bus, producer, t):
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        producer.transaction() as txn,
        Session(shop) as session,
        session.begin(),
    ):
        txn.send(t, b"x")
        session.execute(orders.insert(), {"id": 1})
        bind_tx(session, txn)
        1 / 0
    assert (state(patient_bus, txn), placed(shop)) == ("rolled_back", [])


@contextlib.contextmanager
def commits_that_raise(engine, monkeypatch, *, applied):
    """The database commits (or does not), and the connection is lost before its answer."""
    real = engine.dialect.do_commit

    def lost(connection):
        if applied:
            real(connection)
        else:
            engine.dialect.do_rollback(connection)
        raise sa.exc.OperationalError("COMMIT", {}, Exception("server closed the connection unexpectedly"))

    with monkeypatch.context() as patched:
        patched.setattr(engine.dialect, "do_commit", lost)
        try:
            yield lambda: patched.setattr(engine.dialect, "do_commit", real)
        finally:
            pass


@pytest.mark.invariant("I15")
@pytest.mark.parametrize("applied", [True, False])
def test_a_commit_whose_answer_is_lost_is_no_reason_to_roll_back(shop, patient_bus, producer, t, monkeypatch, applied):
    """The wrong outcome that this prevents: the order stands, and its message was rolled back on the way out."""
    with commits_that_raise(shop, monkeypatch, applied=applied) as heal:
        with pytest.raises(sa.exc.OperationalError) as raised, producer.transaction() as txn:  # noqa: PT012
            txn.send(t, b"x")
            try:
                with Session(shop) as session, session.begin():
                    session.execute(orders.insert(), {"id": 1})
                    bind_tx(session, txn)
            finally:
                heal()  # the next connection is a good one
        expected = ("committed", [1]) if applied else ("rolled_back", [])
        assert (state(patient_bus, txn), placed(shop)) == expected
        notes = getattr(raised.value, "__notes__", [])
        assert any("the database had committed" in note for note in notes) == applied


def test_planted_an_unbound_transaction_would_be_rolled_back_beside_its_order(
    shop, patient_bus, producer, t, monkeypatch
):
    """The same by id only, which binds the mark and not the object: the wrong outcome is there to be seen."""
    with commits_that_raise(shop, monkeypatch, applied=True) as heal:
        with pytest.raises(sa.exc.OperationalError), producer.transaction() as txn:  # noqa: PT012
            txn.send(t, b"x")
            try:
                with Session(shop) as session, session.begin():
                    session.execute(orders.insert(), {"id": 1})
                    bind_tx(session, txn.id)
            finally:
                heal()
        assert (state(patient_bus, txn), placed(shop)) == ("rolled_back", [1])


def test_a_database_that_cannot_be_asked_leaves_it_to_the_check_back(shop, bus, t, monkeypatch, eventually, caplog):
    checker = Later(shop)
    producer = bus.producer("p", checker=checker)
    asked = pytest.raises(mq.Unknown, match="check-back")
    with monkeypatch.context() as patched, asked, producer.transaction() as txn:
        txn.send(t, b"x")
        with shop.begin() as connection:
            connection.execute(orders.insert(), {"id": 1})
            bind_tx(connection, txn)
        patched.setattr(Barrier, "decide_ids", lambda self, ids: 1 / 0)
    checker.may_answer.set()
    eventually(lambda: state(bus, txn) == "committed")
    assert "could not be asked" in caplog.text


def test_blocks_in_the_wrong_order_are_told_and_harm_nothing(shop, bus, t, eventually):
    checker = Later(shop, wait=0.05)
    producer = bus.producer("p", checker=checker)
    told = pytest.raises(mq.Unknown, match="commit the database session before")
    with told, Session(shop) as session, session.begin(), producer.transaction() as txn:
        txn.send(t, b"x")
        session.execute(orders.insert(), {"id": 1})
        bind_tx(session, txn)
    checker.may_answer.set()
    eventually(lambda: state(bus, txn) == "rolled_back")
    assert placed(shop) == []


def test_a_forgotten_commit_sends_nothing(shop, patient_bus, producer, t):
    told = pytest.raises(mq.Rejected, match="commit the session inside the block")
    with told, producer.transaction() as txn, Session(shop) as session:
        txn.send(t, b"x")
        session.execute(orders.insert(), {"id": 1})
        bind_tx(session, txn)
    assert (state(patient_bus, txn), placed(shop)) == ("rolled_back", [])


def test_a_swallowed_late_commit_sends_nothing(shop, patient_bus, producer, t):
    with pytest.raises(mq.Rejected, match="did not commit"), producer.transaction() as txn:  # noqa: PT012
        txn.send(t, b"x")
        assert Barrier(shop).decide(txn.id) is mq.ROLLBACK  # the check-back was quicker, and has not answered yet
        with Session(shop) as session:
            session.execute(orders.insert(), {"id": 1})
            with contextlib.suppress(mq.Fenced):
                bind_tx(session, txn)
            session.commit()
    assert (state(patient_bus, txn), placed(shop)) == ("rolled_back", [])


@pytest.mark.parametrize("committed", [True, False])
def test_an_explicit_end_must_agree_with_the_database(shop, patient_bus, producer, t, committed):
    with producer.transaction() as txn:
        txn.send(t, b"x")
        with shop.connect() as connection:
            bind_tx(connection, txn)
            (connection.commit if committed else connection.rollback)()
        assert (txn.commit if committed else txn.rollback)() is (
            mq.Code.COMMITTED if committed else mq.Code.ROLLED_BACK
        )
    with pytest.raises(mq.Rejected, match="CONFLICT"), producer.transaction() as txn:  # noqa: PT012
        txn.send(t, b"y")
        with shop.connect() as connection:
            bind_tx(connection, txn)
            (connection.commit if committed else connection.rollback)()
        (txn.rollback if committed else txn.commit)()
    assert state(patient_bus, txn) == ("committed" if committed else "rolled_back")


def test_a_connection_that_dies_before_the_commit(shop, bus, t, eventually):
    checker = Later(shop, wait=0.05)
    producer = bus.producer("p", checker=checker)
    with pytest.raises(sa.exc.PendingRollbackError), producer.transaction() as txn:  # noqa: PT012
        txn.send(t, b"x")
        with shop.connect() as connection:
            connection.execute(orders.insert(), {"id": 1})
            bind_tx(connection, txn)
            kill(shop, connection)
            connection.commit()
    checker.may_answer.set()
    eventually(lambda: state(bus, txn) == "rolled_back")
    assert placed(shop) == []


def test_several_messages_and_a_second_binding(shop, patient_bus, producer, t):
    with producer.transaction() as txn, shop.begin() as connection:
        txn.send(t, b"1")
        bind_tx(connection, txn)
        bind_tx(connection, txn, branch="stock")
        txn.send(t, b"2")
    assert state(patient_bus, txn) == "committed"


# The check-back itself


@pytest.mark.invariant("I14")
def test_an_application_needs_no_checker_of_its_own(shop, bus, t, eventually):
    checker = Later(shop)
    producer = bus.producer("p", checker=checker)
    ended = {}
    for number in range(6):
        with producer.transaction() as txn:
            txn.send(t, b"%d" % number)
            with shop.connect() as connection:
                connection.execute(orders.insert(), {"id": number})
                if number % 3 < 2:
                    bind_tx(connection, txn.id)
                (connection.commit if number % 3 == 0 else connection.rollback)()
            txn.leave_undecided()
        ended[number] = txn
    checker.may_answer.set()
    eventually(lambda: all(state(bus, txn) != "open" for txn in ended.values()))
    assert {number for number, txn in ended.items() if state(bus, txn) == "committed"} == {0, 3} == set(placed(shop))


def test_the_check_back_waits_for_a_transaction_in_flight(shop, bus, t, eventually):
    checker = Later(shop, wait=0.05)
    producer = bus.producer("p", checker=checker)
    with producer.transaction() as txn, shop.begin() as connection:
        txn.send(t, b"x")
        connection.execute(orders.insert(), {"id": 1})
        bind_tx(connection, txn.id)
        checker.may_answer.set()
        checks = bus.admin.transaction(txn.id)["checks"]
        eventually(lambda: bus.admin.transaction(txn.id)["checks"] >= checks + 2)  # asked, and answered UNKNOWN
        assert state(bus, txn) == "open"
        txn.leave_undecided()
    eventually(lambda: state(bus, txn) == "committed")


@pytest.mark.invariant("I14")
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_hundred_thousand_undecided_are_answered_in_batches(shop, tmp_path, t, eventually):
    a_hundred_thousand(shop, tmp_path, t, eventually)


@pytest.mark.long
def test_a_hundred_thousand_undecided_on_every_database(shop, tmp_path, t, eventually):
    a_hundred_thousand(shop, tmp_path, t, eventually)


def a_hundred_thousand(shop, tmp_path, t, eventually):
    calls = []

    class Counting(Barrier):
        def decide_ids(self, ids):
            calls.append(len(ids))
            return super().decide_ids(ids)

    class Silent:
        def decide_ids(self, ids):
            return np.zeros(len(ids), np.uint8)

    count = 100_000
    with mq.connect(f"file:{tmp_path / 'broker'}", transaction_timeout=0.2, check_interval=0.5, check_max=1000) as bus:
        with bus.producer("p", checker=Silent()) as producer:
            receipts = producer.prepare_batch([mq.Message(t, b"%d" % number) for number in range(count)]).check()
            with shop.begin() as connection:
                bind_batch_tx(connection, receipts.transactions.take(list(range(0, count, 2))))
        bus.producer("p", checker=Counting(shop, wait=60))
        eventually(lambda: bus.admin.stats()[0]["open_half_messages"] == 0, 120)
        assert bus.admin.stats()[0]["parked"] == 0
        assert len(calls) < count / 100
        consumer, bodies = bus.consumer("c", [t]), set()
        for batch in consumer.batches(max_messages=10_000, idle_timeout=60):
            bodies.update(batch.arrow.column("body").to_pylist())
            batch.ack()
            if len(bodies) >= count // 2:
                break
        assert bodies == {b"%d" % number for number in range(0, count, 2)}
        assert not consumer.receive(10, wait=0.1)
