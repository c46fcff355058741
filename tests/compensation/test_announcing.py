"""The producer's side: change and announcement are one, ends go one way, and what is sent again under its id is never
done twice.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa

import escrowmq as mq
import forked
from escrowmq import Code, outbox
from escrowmq.compensation import Announced, Announcing
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.tables import trans_message
from escrowmq.outbox.targets.opening import open_target
from escrowmq_lab.servers import escrow
from escrowmq_lab.servers.process import Server

ORDERS = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.String(64), primary_key=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One broker for all tests of this file; their names do not meet."""
    with escrow.serving(
        tmp_path_factory.mktemp("broker"), "--transaction-timeout", "1h", launcher=forked.Forked
    ) as made:
        yield made


@pytest.fixture(scope="module")
def bus(server: Server) -> Iterator[mq.Bus]:
    with mq.connect(server.url) as made:
        yield made


def prepared_for(engine: sa.Engine) -> sa.Engine:
    outbox.migrate(engine)
    ORDERS.metadata.create_all(engine)
    return engine


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = prepared_for(sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}"))
    yield engine
    engine.dispose()


def oneway(bus: mq.Bus, group: str) -> Any:
    return bus.producer(group, unasked=True, confirm="oneway")


def put(name: str) -> Callable[[Any], None]:
    """The local change: one order."""
    return lambda session: session.execute(ORDERS.insert(), {"id": name})


def broken(session: Any) -> None:
    """A local change that fails in its middle."""
    session.execute(ORDERS.insert(), {"id": "half done"})
    raise ZeroDivisionError


def orders(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.scalars(sa.select(ORDERS.c.id)))


def announced(engine: sa.Engine) -> list[tuple[str, str, bytes, bytes]]:
    """What the outbox holds."""
    columns = (trans_message.c.topic, trans_message.c.key, trans_message.c.body, trans_message.c.id)
    with engine.connect() as connection:
        return [(row.topic, row.key, bytes(row.body), bytes(row.id)) for row in connection.execute(sa.select(*columns))]


def visible(bus: mq.Bus, topic: str) -> list[bytes]:
    there = {one["name"] for one in bus.admin.topics()}
    return bus.admin.read(topic).read_all()["body"].to_pylist() if topic in there else []


def state(bus: mq.Bus, sent: Any, at: int = 0) -> str:
    return str(bus.admin.transaction(sent.transactions[at])["state"])


class Confirmless(Announcing):
    """Whose ends are lost on their way, all of them."""

    def commit(self, prepared: Any) -> tuple[Code, ...]:
        return (Code.SENT,) * len(prepared.ids)


# What one send does


def test_change_announcement_and_message_all_come_out(bus, server, shop, t, g):
    producer = oneway(bus, g)
    sent = Announcing(producer, f"{t}-keys", database=shop).send(mq.Message(t, b"book", key="o-1"), put("o-1")).check()
    assert (sent.outcome, sent.ends, sent.repeated) == (mq.COMMIT, (Code.SENT,), False)
    (identity,), (key,) = sent.ids, sent.unique_keys
    assert announced(shop) == [(f"{t}-keys", key, key.encode(), identity)]
    assert key == identity.hex()
    assert producer.flush()
    assert (orders(shop), visible(bus, t), state(bus, sent)) == (["o-1"], [b"book"], "committed")
    target = open_target(server.url)
    assert Relay(shop, target).drain(60.0)
    target.close()
    (row,) = bus.admin.read(f"{t}-keys").read_all().to_pylist()
    assert (row["key"], row["body"], row["message_id"]) == (key, key.encode(), identity)


@pytest.mark.parametrize("named", [False, True], ids=["ids made here", "ids of the caller's"])
def test_a_change_that_fails_is_rolled_back_announced_to_nobody_and_still_has_its_keys(bus, shop, t, g, named):
    producer = oneway(bus, g)
    message = mq.Message(t, b"book", message_id=t if named else None)
    sent = Announcing(producer, database=shop).send(message, broken)
    assert (sent.outcome, type(sent.error)) == (mq.ROLLBACK, ZeroDivisionError)
    assert sent.ends == ((Code.ROLLED_BACK,) if named else (Code.SENT,))
    with pytest.raises(ZeroDivisionError):
        sent.check()
    assert producer.flush()
    assert (orders(shop), announced(shop), visible(bus, t), state(bus, sent)) == ([], [], [], "rolled_back")
    assert len(sent.ids) == 1
    (found,) = bus.admin.lookup(message_id=sent.ids[0])
    assert found["state"] == "rolled_back", "an operator finds it"


@pytest.mark.invariant("I48")
@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_a_commit_of_the_database_that_failed_is_left_to_the_announcement(bus, shop, t, g, done):
    def lost(connection: Any) -> None:
        getattr(connection.connection.dbapi_connection, "commit" if done else "rollback")()
        raise ConnectionError("the answer to COMMIT is lost")

    sa.event.listen(shop, "commit", lost)
    sent = Announcing(oneway(bus, g), database=shop).send(mq.Message(t, b"book"), put("o-1"))
    sa.event.remove(shop, "commit", lost)
    assert (sent.outcome, sent.ends, type(sent.error)) == (mq.UNKNOWN, (Code.NOTED,), ConnectionError)
    assert state(bus, sent) == "open"
    assert (orders(shop), [row[3] for row in announced(shop)]) == ((["o-1"], [*sent.ids]) if done else ([], []))


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_a_change_that_ends_the_transaction_itself_leaves_everything_undecided(bus, shop, t, g, how):
    def business(session: Any) -> None:
        session.execute(ORDERS.insert(), {"id": "o-1"})
        getattr(session, how)()

    sent = Announcing(oneway(bus, g), database=shop).send(mq.Message(t, b"book"), business)
    assert (sent.outcome, state(bus, sent)) == (mq.UNKNOWN, "open")
    with pytest.raises(mq.Misuse, match="ended the transaction"):
        sent.check()
    assert len(orders(shop)) == len(announced(shop)) == (how == "commit"), "announced if and only if it is there"


def test_many_messages_are_a_transaction_each_and_one_change(bus, shop, t, g):
    producer = oneway(bus, g)
    way = Announcing(producer, database=shop)
    columns = pa.table({"topic": [t] * 300, "body": [b"%d" % n for n in range(300)]})
    sent = way.send(columns, put("all"))
    assert producer.flush()
    assert len(set(sent.transactions)) == len(set(sent.ids)) == 300
    assert len(visible(bus, t)) == 300
    assert {row[3] for row in announced(shop)} == set(sent.ids)


def test_what_is_refused_is_announced_to_nobody_and_rolls_the_others_back(bus, shop, t, g):
    producer = oneway(bus, g)
    with pytest.raises(mq.Rejected, match="BAD_QUEUE"):
        Announcing(producer, database=shop).send([mq.Message(t, b"fits"), mq.Message(t, b"", queue=999)], put("o-1"))
    assert (orders(shop), announced(shop)) == ([], [])
    assert [one["state"] for one in bus.admin.transactions(group=g)] == ["rolled_back"]


def test_tables_that_are_not_there_are_said_so_and_nothing_is_left_open(bus, tmp_path, t, g):
    producer, empty = oneway(bus, g), sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(mq.Misuse, match="NO_TABLES"):
        Announcing(producer, database=empty).send(mq.Message(t, b"book"), put("o-1"))
    empty.dispose()
    assert producer.flush()
    assert [one["state"] for one in bus.admin.transactions(group=g)] == ["rolled_back"]


def test_what_makes_no_sense_is_refused_where_it_is_made(bus, shop, t, g):
    producer = oneway(bus, g)
    for options, said in [
        ({"announce": "later"}, "announce = 'later'"),
        ({"on_failure": "retry"}, "on_failure = 'retry'"),
        ({"announce": "direct"}, "no sender of the keys"),
        ({"by": producer}, "by= has no use"),
    ]:
        with pytest.raises(mq.Misuse, match=said):
            Announcing(producer, database=shop, **options)
    with pytest.raises(mq.EscrowError, match="BAD_TOPIC_NAME"):
        Announcing(producer, "no topic")
    with pytest.raises(mq.Misuse, match="needs a database"):
        Announcing(producer).send(mq.Message(t, b"book"), put("o-1"))
    with pytest.raises(mq.Misuse, match="cannot join another"):
        Announcing(producer, database=shop).send(
            pa.table({"topic": [t], "body": [b"x"], "transaction": pa.array([bytes(16)], pa.binary(16))}), put("o-1")
        )
    assert g not in {one["group"] for one in bus.admin.producers()}, "nothing was prepared"


# Directly


def test_keys_sent_directly_after_the_commit(bus, shop, t, g):
    way = Announcing(oneway(bus, g), f"{t}-keys", database=shop, announce="direct", by=bus.producer(f"{g}-keys"))
    sent = way.send(mq.Message(t, b"book"), put("o-1")).check()
    (row,) = bus.admin.read(f"{t}-keys").read_all().to_pylist()
    assert (sent.keys, row["key"], row["message_id"]) == (Code.OK, sent.unique_keys[0], sent.ids[0])
    assert announced(shop) == []
    assert way.announce(sent.unique_keys) is Code.OK, "again: the broker has it"
    assert len(bus.admin.read(f"{t}-keys").read_all()) == 1
    assert way.send(mq.Message(t, b"pen"), broken).keys is Code.OK
    assert len(bus.admin.read(f"{t}-keys").read_all()) == 1


def test_a_key_that_did_not_get_through_is_told_and_can_be_announced_later(bus, shop, t, g):
    class Away:
        """A way out that is away, and then is back."""

        here = False

        def place(self, keys: pa.Array) -> Any:
            return [-1] * len(keys)

        def send(self, batch: pa.RecordBatch, shards: Any) -> Any:
            return np.full(batch.num_rows, Code.OK if self.here else Code.DISCONNECTED, np.uint8)

    out = Away()
    way = Announcing(oneway(bus, g), database=shop, announce="direct", by=out)
    sent = way.send(mq.Message(t, b"book"), put("o-1")).check()
    assert (sent.outcome, sent.keys) == (mq.COMMIT, Code.DISCONNECTED)
    out.here = True
    assert way.announce(sent.ids) is Code.OK


# Its parts, in a session of the caller's


def test_the_parts_in_a_session_of_ones_own(bus, shop, t, g):
    producer = oneway(bus, g)
    way = Announcing(producer, f"{t}-keys")
    prepared = way.prepare([mq.Message(t, b"1"), mq.Message(t, b"2")])
    with shop.begin() as connection:
        assert way.announce_tx(connection, prepared)
        connection.execute(ORDERS.insert(), {"id": "o-1"})
    assert way.commit(prepared) == (Code.SENT, Code.SENT)
    dropped = way.prepare(mq.Message(t, b"3"))
    with pytest.raises(ZeroDivisionError), shop.begin() as connection:  # noqa: PT012
        way.announce_tx(connection, dropped.ids)
        1 / 0
    assert way.rollback(dropped) == (Code.SENT,)
    assert producer.flush()
    assert sorted(visible(bus, t)) == [b"1", b"2"]
    assert {row[3] for row in announced(shop)} == set(prepared.ids)


# Sent again under the same id


def message(t: str) -> mq.Message:
    return mq.Message(t, b"book", key="o-1", message_id=f"order-{t}")


@pytest.mark.invariant("I48")
def test_sent_again_while_its_confirm_is_lost_the_change_is_not_done_again(bus, shop, t, g):
    producer = oneway(bus, g)
    first = Confirmless(producer, database=shop).send(message(t), put("o-1")).check()
    assert state(bus, first) == "open"
    again = Announcing(producer, database=shop).send(message(t), put("o-2")).check()
    assert (again.ids, again.transactions) == (first.ids, first.transactions), "the same transaction"
    assert (again.outcome, again.repeated) == (mq.COMMIT, True)
    assert producer.flush()
    assert (orders(shop), visible(bus, t), len(announced(shop))) == (["o-1"], [b"book"], 1)
    third = Announcing(producer, database=shop).send(message(t), put("o-3")).check()
    assert producer.flush()
    assert (third.repeated, orders(shop), visible(bus, t)) == (True, ["o-1"], [b"book"]), "committed: as it is"
    assert producer.refused_ends == 0


@pytest.mark.invariant("I48")
def test_sent_again_after_a_rollback_the_id_is_spent_and_nothing_is_done(bus, shop, t, g):
    way = Announcing(oneway(bus, g), database=shop)
    assert way.send(message(t), broken).ends == (Code.ROLLED_BACK,)
    with pytest.raises(mq.Rejected, match=r"CONFLICT.*cannot be used again"):
        way.send(message(t), put("o-1"))
    assert (orders(shop), announced(shop), visible(bus, t)) == ([], [], [])


def test_sent_again_after_a_failure_that_was_kept_it_is_the_same_transaction(bus, shop, t, g):
    producer = oneway(bus, g)
    way = Announcing(producer, database=shop, on_failure="keep")
    failed = way.send(message(t), broken)
    assert (failed.outcome, failed.ends, state(bus, failed)) == (mq.ROLLBACK, (Code.NOTED,), "open")
    sent = way.send(message(t), put("o-1")).check()
    assert sent.transactions == failed.transactions
    assert producer.flush()
    assert (orders(shop), visible(bus, t), len(announced(shop))) == (["o-1"], [b"book"], 1)
    made = way.send(mq.Message(t, b"no id of the caller's"), broken)
    assert producer.flush()
    assert state(bus, made) == "rolled_back", "nobody can send it again"


def test_an_id_that_somebody_else_committed_is_not_done(bus, shop, t, g):
    producer = oneway(bus, g)
    receipt = producer.prepare(message(t))
    bus.admin.commit(receipt.transaction_id)
    with pytest.raises(mq.Rejected, match="TRANSACTION_DECIDED"):
        Announcing(producer, database=shop).send(message(t), put("o-1"))
    assert (orders(shop), announced(shop)) == ([], [])


def test_some_sent_before_and_some_not_is_refused_and_hurts_nobody(bus, shop, t, g):
    producer = oneway(bus, g)
    first = Confirmless(producer, database=shop).send(message(t), put("o-1")).check()
    other = mq.Message(t, b"pen", message_id=f"other-{t}")
    with pytest.raises(mq.Rejected, match=r"MESSAGE_ID_TAKEN.*some"):
        Announcing(producer, database=shop).send([message(t), other], put("o-2"))
    assert state(bus, first) == "open"
    assert orders(shop) == ["o-1"]
    with pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        Announcing(producer, database=shop).send(mq.Message(t, b"another", message_id=f"order-{t}"), put("o-2"))


WAITING = {
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'INSERT%trans_recv_log%'",
}


@pytest.mark.invariant("I48")
@pytest.mark.parametrize(
    ("keeps", "fails"), [(False, False), (False, True), (True, True)], ids=["committed", "rolled back", "kept"]
)
@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_two_sends_of_one_id_at_once_are_one(bus, engine, t, g, keeps, fails, eventually):
    """The second waits for the mark of the first; whatever becomes of that one, order and message agree."""
    prepared_for(engine)
    producer = oneway(bus, g)
    way = Announcing(producer, database=engine, on_failure="keep" if keeps else "rollback")
    inside, go = threading.Event(), threading.Event()
    outcomes: dict[str, Any] = {}

    def slowly(session: Any) -> None:
        put(t)(session)
        inside.set()
        assert go.wait(60)
        if fails:
            raise ZeroDivisionError

    def run(name: str, business: Any) -> None:
        try:
            outcomes[name] = way.send(message(t), business)
        except mq.Rejected as problem:
            outcomes[name] = problem

    def waits() -> int:
        with engine.connect() as connection:
            return int(connection.scalar(sa.text(WAITING[engine.dialect.name])) or 0)

    first, second = (threading.Thread(target=run, args=args) for args in (("first", slowly), ("second", put(t))))
    first.start()
    assert inside.wait(60)
    second.start()
    eventually(waits)
    go.set()
    first.join()
    second.join()
    assert producer.flush()
    there = t in orders(engine)
    assert visible(bus, t) == ([b"book"] if there else []), "order and message agree"
    assert len([row for row in announced(engine) if row[3] == outcomes["first"].ids[0]]) == there
    if not fails:
        assert (there, outcomes["second"].repeated) == (True, True)
    elif keeps:
        assert (there, outcomes["second"].repeated, outcomes["second"].outcome) == (True, False, mq.COMMIT)
    else:
        assert not there
        assert outcomes["second"].code is Code.CONFLICT


# What a scheduler's resend calls


def test_resent_it_is_the_same_transaction_if_that_is_open_or_committed(bus, shop, t, g):
    producer = oneway(bus, g)
    way = Announcing(producer, database=shop)
    first = Confirmless(producer, database=shop).send(message(t), put("o-1")).check()
    for code in (Code.COMMITTED, Code.ALREADY_COMMITTED):
        again = way.resend(message(t))
        assert (again.ids, again.transactions, again.ends) == (first.ids, first.transactions, (code,))
        assert visible(bus, t) == [b"book"]
    assert orders(shop) == ["o-1"]
    with pytest.raises(mq.Misuse, match="without an id"):
        way.resend(mq.Message(t, b"book"))


def test_resent_after_a_rollback_it_is_a_conflict(bus, shop, t, g):
    way = Announcing(oneway(bus, g), database=shop)
    way.send(message(t), broken)
    with pytest.raises(mq.Rejected, match="CONFLICT"):
        way.resend(message(t))
    assert visible(bus, t) == []


def test_resent_when_the_broker_has_forgotten_the_id_it_is_a_new_transaction(shop, tmp_path, t, g, eventually):
    with mq.connect(f"file:{tmp_path / 'data'}", dedup_window=0.001) as bus:
        producer = oneway(bus, g)
        first = Confirmless(producer, database=shop).send(message(t), put("o-1")).check()

        def anew() -> Announced | None:
            again = Announcing(producer, database=shop).resend(message(t))
            return again if again.transactions != first.transactions else None

        # marks leave a slice of the window at a time, when something is stored: other messages move it on
        again = eventually(lambda: bus.producer("p").send(t, uuid.uuid4().bytes) and anew())
        assert again.ids == first.ids
        assert b"book" in visible(bus, t)


# Killed anywhere

SHOP = """
import sys, sqlalchemy as sa, escrowmq as mq
from escrowmq.compensation import Announcing
folder, database, topic = sys.argv[1:]
engine = sa.create_engine(database)
with mq.connect("file:" + folder) as bus:
    way = Announcing(bus.producer("shop", unasked=True, confirm="oneway"), database=engine)
    way.send(mq.Message(topic, b"book", message_id="order-1"),
             lambda session: session.execute(sa.text("INSERT INTO orders VALUES ('o-1')"))).check()
"""


LONG = pytest.mark.long


@pytest.mark.invariant("I48")
@pytest.mark.parametrize(
    "place", [pytest.param("prepared", marks=LONG), "changed", "committed", pytest.param("ended", marks=LONG)]
)
def test_killed_anywhere_the_announcement_follows_the_database_and_sending_again_finishes_it(tmp_path, shop, t, place):
    folder = tmp_path / "data"
    command = [sys.executable, "-c", SHOP, str(folder), str(shop.url), t]
    died = forked.run(command, env={**os.environ, "ESCROWMQ_FAILPOINT": f"announcing.{place}"})
    assert died.returncode == -9
    done = place in ("committed", "ended")
    assert (len(orders(shop)), len(announced(shop))) == (done, done)
    with mq.connect(f"file:{folder}") as bus:
        if place != "ended":  # that end may be out, or not
            assert visible(bus, t) == []
        producer = oneway(bus, "shop")
        again = Announcing(producer, database=shop).send(mq.Message(t, b"book", message_id="order-1"), put("o-1"))
        assert (again.outcome, again.repeated) == (mq.COMMIT, done)
        assert producer.flush()
        assert (visible(bus, t), orders(shop), len(announced(shop))) == ([b"book"], ["o-1"], 1)
