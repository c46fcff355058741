"""I37: the business row is committed if and only if the outbox row exists; and what is refused before anything is
written.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from outbox_world import Base, Order, agree, business_and_outbox, orders
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox import migrate, send_batch_tx, send_tx
from escrowmq.outbox.sending import CHUNK_BYTES, CHUNK_ROWS, lane_of
from escrowmq.outbox.tables import CHANNEL, LANES, State, trans_message
from escrowmq.settings import BrokerSettings


def rows(engine: sa.Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(trans_message).order_by(trans_message.c.seq)).mappings())


# What is stored


def test_a_row_holds_the_message_as_it_was_given(shop: sa.Engine) -> None:
    body, key = b"\x00\xff'\"\\%s:x" * 9, "ключ 😀 %s"
    with shop.begin() as connection:
        identity = send_tx(
            connection,
            "orders",
            body,
            key=key,
            tag="paid",
            properties={"a": "\0", "ü": ""},
            delay=1.5,
            message_id="o-1",
        )
        plain = send_tx(connection, mq.Message("points", bytearray(b"")))
    first, second = rows(shop)
    assert identity == mq.model.message_id("o-1")
    assert {**first, "seq": 0, "created_us": 0} == {
        "seq": 0,
        "id": identity,
        "lane": lane_of(key),
        "state": State.PENDING,
        "topic": "orders",
        "key": key,
        "tag": "paid",
        "properties": '{"a":"\\u0000","ü":""}',
        "body": body,
        "delay_us": 1_500_000,
        "attempts": 0,
        "due_us": 0,
        "created_us": 0,
        "sent_us": None,
        "done_us": None,
        "error": None,
    }
    assert (second["id"], second["body"], second["key"], second["properties"]) == (plain, b"", None, None)


def test_a_batch_is_stored_in_order_whatever_it_is_made_of(shop: sa.Engine) -> None:
    messages = [
        mq.Message("orders", b"%d" % n, key=f"k{n}", properties={"n": str(n)}) for n in range(2 * CHUNK_ROWS // 3)
    ]
    columns = pa.table(
        {
            "topic": [m.topic for m in messages],
            "body": [m.body for m in messages],
            "key": [m.key for m in messages],
            "properties": pa.array([list(m.properties.items()) for m in messages], pa.map_(pa.utf8(), pa.utf8())),
        }
    )
    with shop.begin() as connection:
        ids = send_batch_tx(connection, messages)
        ids += send_batch_tx(connection, columns)
        ids += send_batch_tx(connection, (mq.Message("orders", b"x") for _ in range(CHUNK_ROWS // 2)))
        assert send_batch_tx(connection, []) == send_batch_tx(connection, columns.slice(0, 0)) == []
    stored = rows(shop)
    assert [row["id"] for row in stored] == ids
    n = len(messages)
    strip = ("seq", "id", "created_us")
    bare = [{name: value for name, value in row.items() if name not in strip} for row in stored]
    assert bare[:n] == bare[n : 2 * n]
    assert [row["body"] for row in stored[:n]] == [m.body for m in messages]


def test_bodies_that_add_up_to_more_than_a_packet(shop: sa.Engine) -> None:
    """MariaDB takes 16 MiB at a time; quotes and zeros double in its SQL."""
    most = BrokerSettings().max_body_bytes
    with shop.begin() as connection:
        send_batch_tx(connection, [mq.Message("orders", b"'\0" * (most // 2)) for _ in range(2)])
        send_batch_tx(connection, [mq.Message("orders", b"\\" * (CHUNK_BYTES // 8)) for _ in range(10)])
    assert [len(row["body"]) for row in rows(shop)] == [most] * 2 + [CHUNK_BYTES // 8] * 10


def test_keys_keep_their_lane_and_what_has_none_takes_turns(sqlite_shop: sa.Engine) -> None:
    assert [lane_of(key) for key in ("o-1", "o-2", "ключ", "")] == [52, 45, 28, 25]  # for ever: relays rely on it
    with sqlite_shop.begin() as connection:
        send_batch_tx(connection, [mq.Message("orders", b"") for _ in range(LANES)])
    assert {row["lane"] for row in rows(sqlite_shop)} == set(range(LANES))


def test_ids_are_not_repeated_in_a_forked_child(sqlite_shop: sa.Engine) -> None:
    from escrowmq.outbox.sending import complete_ids

    read, write = os.pipe()
    parent = complete_ids([None])
    child = os.fork()
    if not child:  # pragma: no cover
        os.write(write, complete_ids([None])[0])
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 16)
    os.close(read)
    os.close(write)
    assert len({*parent, *complete_ids([None]), theirs}) == 3
    assert theirs[:8] != parent[0][:8]


def test_a_message_id_is_taken_once(shop: sa.Engine) -> None:
    with shop.begin() as connection:
        send_tx(connection, "orders", b"1", message_id="o-1")
    with shop.connect() as connection, pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        send_tx(connection, "orders", b"2", message_id="o-1")
    with shop.connect() as connection, pytest.raises(mq.Rejected, match="MESSAGE_ID_TAKEN"):
        send_batch_tx(connection, [mq.Message("orders", b"2", message_id=i) for i in ("o-2", "o-1")])
    assert [row["body"] for row in rows(shop)] == [b"1"]


# I37


@contextlib.contextmanager
def core(engine: sa.Engine) -> Iterator[Any]:
    with engine.connect() as connection:
        yield connection


@contextlib.contextmanager
def orm(engine: sa.Engine) -> Iterator[Any]:
    with Session(engine) as session:
        yield session


@contextlib.contextmanager
def scoped(engine: sa.Engine) -> Iterator[Any]:
    registry = scoped_session(sessionmaker(engine))
    yield registry
    registry.remove()


KINDS = pytest.mark.parametrize("kind", [core, orm])
Kind = Callable[[sa.Engine], contextlib.AbstractContextManager[Any]]


def place(session: Any, number: int) -> None:
    """The local transaction: an order, and the message about it."""
    if isinstance(session, sa.Connection):
        session.execute(sa.insert(orders).values(id=number))
    else:
        session.add(Order(id=number))
    send_tx(session, "orders", b"placed", key=str(number))


def place_and_commit(session: Any, number: int) -> None:
    place(session, number)
    session.commit()


@pytest.mark.invariant("I37")
@pytest.mark.parametrize("kind", [core, orm, scoped])
def test_i37_commit_keeps_both_and_rollback_neither(shop: sa.Engine, kind: Kind) -> None:
    with kind(shop) as session:
        place(session, 1)
        session.commit()
        place(session, 2)
        session.rollback()
        place(session, 3)
        session.commit()
        place(session, 4)  # closed without a commit
    assert agree(shop) == {"1", "3"}


@pytest.mark.invariant("I37")
@KINDS
def test_i37_nothing_is_seen_before_the_commit(shop: sa.Engine, kind: Kind) -> None:
    with kind(shop) as session:
        place(session, 1)
        if shop.dialect.name == "sqlite":
            session.commit()  # a reader beside a writer waits there
        else:
            assert agree(shop) == set()
            session.commit()
    assert agree(shop) == {"1"}


@pytest.mark.invariant("I37")
@KINDS
def test_i37_savepoints(shop: sa.Engine, kind: Kind) -> None:
    with kind(shop) as session:
        place(session, 1)
        inner = session.begin_nested()
        place(session, 2)
        inner.rollback()
        with session.begin_nested():
            place(session, 3)
        with contextlib.suppress(KeyError), session.begin_nested():
            place(session, 4)
            raise KeyError
        session.commit()
        place(session, 5)
        with session.begin_nested():
            place(session, 6)
        session.rollback()
    assert agree(shop) == {"1", "3"}


@pytest.mark.invariant("I37")
@KINDS
def test_i37_a_failing_statement_takes_the_message_along(shop: sa.Engine, kind: Kind) -> None:
    with kind(shop) as session:
        place(session, 1)
        session.commit()
    with kind(shop) as session:
        place(session, 2)
        with pytest.raises(IntegrityError):
            place_and_commit(session, 1)
    assert agree(shop) == {"1"}


@pytest.mark.invariant("I37")
def test_i37_a_failed_flush_at_the_commit(shop: sa.Engine) -> None:
    """The ORM writes the business rows at the commit, after the message: both go."""
    with Session(shop) as session:
        for number in (1, 2):
            session.add(Order(id=number, number=7))
            send_tx(session, "orders", b"placed", key=str(number))
        assert session.new  # send_tx flushes nothing
        with pytest.raises(IntegrityError):
            session.commit()
    assert agree(shop) == set()


def test_send_tx_flushes_nothing(sqlite_shop: sa.Engine) -> None:
    with Session(sqlite_shop) as session:
        half_made = Order()  # no id yet: a flush would fail
        session.add(half_made)
        send_tx(session, "orders", b"placed", key="1")
        send_batch_tx(session, [mq.Message("orders", b"", key="x")])
        half_made.id = 1
        session.execute(sa.delete(trans_message).where(trans_message.c.key == "x"))
        session.commit()
    assert agree(sqlite_shop) == {"1"}


steps = st.lists(st.sampled_from(["place", "nest", "release", "back", "commit", "rollback"]), max_size=20)


@pytest.mark.invariant("I37")
@settings(max_examples=60)
@given(steps, st.booleans())
def test_i37_any_sequence_of_transactions_and_savepoints(done: list[str], by_orm: bool) -> None:
    engine = recipe()
    with Session(engine) if by_orm else engine.connect() as session:
        nested: list[Any] = []
        kept: set[str] = set()
        levels: list[set[str]] = [set()]
        for number, step in enumerate(done):
            if step == "place":
                place(session, number)
                levels[-1].add(str(number))
            elif step == "nest":
                nested.append(session.begin_nested())
                levels.append(set())
            elif step in ("release", "back") and nested:
                getattr(nested.pop(), "commit" if step == "release" else "rollback")()
                inner = levels.pop()
                levels[-1] |= inner if step == "release" else set()
            elif step in ("commit", "rollback") and not nested:
                getattr(session, step)()
                kept |= levels.pop() if step == "commit" else set()
                levels = [set()]
    assert agree(engine) == kept
    engine.dispose()


def recipe() -> sa.Engine:
    """SQLite in memory with SQLAlchemy's recipe, under which savepoints work from the first statement on."""
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    sa.event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    Base.metadata.create_all(engine)
    migrate(engine)
    return engine


# The relay is woken


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_commit_wakes_the_relay_and_a_rollback_does_not(engine: sa.Engine) -> None:
    import psycopg

    migrate(engine)
    listener = psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True)
    listener.execute(f"LISTEN {CHANNEL}")

    def heard(mark: str) -> int:
        """How many notifications came before one of our own."""
        with psycopg.connect(listener.info.dsn, password=engine.url.password, autocommit=True) as other:
            other.execute("SELECT pg_notify(%s, %s)", (CHANNEL, mark))
        told = 0
        for notification in listener.notifies():
            if notification.payload == mark:
                return told
            told += notification.payload == ""
        raise EOFError

    with engine.connect() as connection:
        send_tx(connection, "orders", b"1")
        send_tx(connection, "orders", b"2")
        send_batch_tx(connection, [mq.Message("orders", b"")] * 10)
        assert heard("not yet") == 0
        connection.commit()
        assert heard("once for all of them") == 1
        send_tx(connection, "orders", b"3")
        connection.rollback()
        assert heard("nothing") == 0
        with connection.begin_nested() as inner:
            send_tx(connection, "orders", b"4")
            inner.rollback()
        connection.commit()
        assert heard("nothing was left") == 0
        with connection.begin_nested() as inner:
            send_tx(connection, "orders", b"5")
            inner.rollback()
        send_batch_tx(connection, [mq.Message("orders", b"")] * 2)
        connection.commit()
        assert heard("what was left") == 1
    listener.close()


# Refused before anything is written

LIMITS = BrokerSettings()
BAD = [
    ({"body": b"x" * (LIMITS.max_body_bytes + 1)}, mq.Rejected, "BODY_TOO_LARGE"),
    ({"body": "text"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"body": None}, mq.Misuse, "BAD_ARGUMENT"),
    ({"topic": ""}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": "%half"}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": "x" * 128}, mq.Rejected, "BAD_TOPIC_NAME"),
    ({"topic": 7}, mq.Misuse, "BAD_TOPIC_NAME"),
    ({"key": "é" * (LIMITS.max_key_bytes // 2 + 1)}, mq.Rejected, "KEY_TOO_LARGE"),
    ({"key": b"k"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"key": "a\0b"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"tag": "x" * (LIMITS.max_tag_bytes + 1)}, mq.Rejected, "TAG_TOO_LARGE"),
    ({"tag": "\0"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"properties": {"a": "x" * LIMITS.max_properties_bytes}}, mq.Rejected, "PROPERTIES_TOO_LARGE"),
    ({"properties": {"a": 1}}, mq.Misuse, "BAD_ARGUMENT"),
    ({"delay": -1}, mq.Rejected, "BAD_DELAY"),
    ({"delay": LIMITS.max_delay + 1}, mq.Rejected, "BAD_DELAY"),
    ({"delay": "1"}, mq.Misuse, "BAD_ARGUMENT"),
    ({"message_id": 7}, mq.Misuse, "BAD_ARGUMENT"),
]


@pytest.mark.parametrize(("wrong", "branch", "code"), BAD, ids=lambda value: str(value)[:40])
def test_what_the_broker_would_refuse_is_refused_before_the_commit(
    sqlite_shop: sa.Engine, wrong: dict[str, Any], branch: type[mq.EscrowError], code: str
) -> None:
    """The caller learns it while it can still roll back; and may also go on without the message."""
    given_ = {"topic": "orders", "body": b"x", **wrong}
    with Session(sqlite_shop) as session:
        session.execute(sa.insert(orders).values(id=1))
        with pytest.raises(branch, match=code):
            send_tx(session, given_.pop("topic"), given_.pop("body"), **given_)
        with pytest.raises(branch, match=code):
            send_batch_tx(
                session, [mq.Message("orders", b"good"), mq.Message(**{"topic": "orders", "body": b"x", **wrong})]
            )
        session.commit()
    assert business_and_outbox(sqlite_shop) == ({"1"}, [])


WRONG_COLUMNS = [
    ({"topic": ["orders", "a b"]}, "BAD_TOPIC_NAME"),
    ({"body": [b"x", b"x" * (LIMITS.max_body_bytes + 1)]}, "BODY_TOO_LARGE: row 1 "),
    ({"key": ["é" * (LIMITS.max_key_bytes // 2 + 1), None]}, "KEY_TOO_LARGE: row 0 "),
    ({"tag": ["x" * (LIMITS.max_tag_bytes + 1)] * 2}, "TAG_TOO_LARGE: row 0 .* and 1 more"),
    ({"properties": [[], [("a", "x" * 20_000), ("b", "x" * 20_000)]]}, "PROPERTIES_TOO_LARGE: row 1 "),
    ({"properties": [[], [("a", None)]]}, "BAD_BATCH: .*null names or values"),
    ({"delay_us": [0, -1]}, "BAD_DELAY"),
    ({"key": ["a\0", None]}, "BAD_ARGUMENT"),
    ({"queue": [-1, 3]}, "BAD_ARGUMENT"),
    ({"immunity_us": [0, 3]}, "BAD_ARGUMENT"),
    ({"colour": [0, 3]}, "BAD_BATCH"),
    ({"body": [1.5, 2.5]}, "BAD_BATCH"),
    ({"topic": [None, "x"]}, "BAD_BATCH"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG_COLUMNS, ids=lambda value: str(value)[:40])
def test_columns_are_held_to_the_same_limits(sqlite_shop: sa.Engine, wrong: dict[str, Any], told: str) -> None:
    made = {"topic": ["orders"] * 2, "body": [b"x"] * 2, **wrong}
    types = {"properties": pa.map_(pa.utf8(), pa.utf8())}
    columns = pa.table({name: pa.array(values, types.get(name)) for name, values in made.items()})
    with sqlite_shop.begin() as connection, pytest.raises(mq.EscrowError, match=told):
        send_batch_tx(connection, columns)
    assert rows(sqlite_shop) == []


def test_another_brokers_limits(sqlite_shop: sa.Engine) -> None:
    small = BrokerSettings(max_body_bytes=3)
    with sqlite_shop.begin() as connection:
        send_tx(connection, "orders", b"123", limits=small)
        with pytest.raises(mq.Rejected, match="BODY_TOO_LARGE"):
            send_tx(connection, "orders", b"1234", limits=small)
        with pytest.raises(mq.Rejected, match="BODY_TOO_LARGE"):
            send_batch_tx(connection, pa.table({"topic": ["orders"], "body": [b"1234"]}), limits=small)


@pytest.mark.parametrize(
    "message",
    [mq.Message("orders", b"", queue=0), mq.Message("orders", b"", check_immunity=1.0)],
    ids=["queue", "immunity"],
)
def test_what_a_row_has_no_place_for(sqlite_shop: sa.Engine, message: mq.Message) -> None:
    with sqlite_shop.begin() as connection:
        with pytest.raises(mq.Misuse, match="no place for it"):
            send_tx(connection, message)
        with pytest.raises(mq.Misuse, match="its own body"):
            send_tx(connection, message, b"another")
        for not_messages in (message, b"x", "x", 7):
            with pytest.raises(mq.Misuse, match="is not messages"):
                send_batch_tx(connection, not_messages)  # type: ignore[arg-type]


# Sessions that cannot hold a message


def refused(session: Any, code: str = "NO_TRANSACTION") -> None:
    with pytest.raises(mq.Misuse, match=code):
        send_tx(session, "orders", b"x")
    with pytest.raises(mq.Misuse, match=code):
        send_batch_tx(session, [mq.Message("orders", b"x")])


def test_autocommit_is_refused(shop: sa.Engine) -> None:
    loose = shop.execution_options(isolation_level="AUTOCOMMIT")
    with loose.connect() as connection:
        refused(connection)
    with Session(loose) as session:
        refused(session)
    with shop.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        refused(connection)
    own = sa.create_engine(shop.url, isolation_level="AUTOCOMMIT")
    with own.connect() as connection:
        refused(connection)
    own.dispose()
    assert rows(shop) == []


@pytest.mark.invariant("I37")
def test_autocommit_by_the_driver_is_refused(shop: sa.Engine) -> None:
    """What SQLAlchemy does not know of."""
    named = {"sqlite": {"isolation_level": None}, "postgresql": {"autocommit": True}, "mysql": {"autocommit": True}}
    if shop.dialect.name == "mysql":
        own = sa.create_engine(shop.url)
        sa.event.listen(own, "checkout", lambda raw, *_: raw.autocommit(True))
    else:
        own = sa.create_engine(shop.url, connect_args=named[shop.dialect.name])
    with own.connect() as connection:
        refused(connection)
    own.dispose()
    assert rows(shop) == []


def test_ended_sessions_and_connections_are_refused(shop: sa.Engine) -> None:
    with shop.connect() as connection:
        pass
    refused(connection)
    with Session(shop) as session, session.begin():
        session.rollback()
        refused(session)
    with shop.connect() as connection, connection.begin() as transaction:
        transaction.rollback()
        refused(connection)
    refused(Session(shop, autobegin=False))
    closed = Session(shop, close_resets_only=False)
    closed.close()
    refused(closed)
    assert rows(shop) == []


def test_a_failed_session_is_refused_until_it_is_rolled_back(shop: sa.Engine) -> None:
    with Session(shop) as session:
        session.add_all([Order(id=1, number=7), Order(id=2, number=7)])
        with pytest.raises(IntegrityError):
            session.flush()
        if session.is_active is False:
            refused(session)
        session.rollback()
        place(session, 3)
        session.commit()
    assert agree(shop) == {"3"}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_failed_transaction_of_postgresql_is_told_from_missing_tables(engine: sa.Engine) -> None:
    migrate(engine)
    with engine.begin() as connection:
        send_tx(connection, "orders", b"x")
    for fresh in (False, True):  # the tables known to be there, and not yet looked for
        other = sa.create_engine(engine.url) if fresh else engine
        with other.connect() as connection:
            with pytest.raises(sa.exc.DataError):
                connection.execute(sa.text("SELECT 1/0"))
            refused(connection)
        other.dispose()


def test_missing_tables(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.execute(sa.insert(orders).values(id=1))
        refused(session, "NO_TABLES")
        session.commit()  # the transaction was not spoiled by looking
    migrate(engine)
    with Session(engine) as session:
        place(session, 2)
        session.commit()
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE trans_message"))
    with engine.connect() as connection:
        refused(connection, "NO_TABLES|NO_TRANSACTION")
        connection.rollback()
        with pytest.raises(mq.Misuse, match="NO_TABLES"):
            send_tx(connection, "orders", b"x")


def test_the_tables_are_looked_for_once(sqlite_shop: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    sa.event.listen(sqlite_shop, "before_cursor_execute", lambda c, u, statement, *_: counted.append(statement))
    with sqlite_shop.begin() as connection:
        send_tx(connection, "orders", b"1")
    first = len(counted)
    for options in ({}, {"logging_token": "another"}):
        with sqlite_shop.execution_options(**options).begin() as connection:
            send_tx(connection, "orders", b"2")
    assert (first > 1, len(counted) - first) == (True, 2)


@pytest.mark.parametrize("thing", [None, "session", sessionmaker()], ids=["None", "str", "sessionmaker"])
def test_what_is_no_session(thing: Any) -> None:
    refused(thing, "BAD_ARGUMENT.*outbox.aio")


def test_an_engine_is_no_session(sqlite_shop: sa.Engine) -> None:
    refused(sqlite_shop, "BAD_ARGUMENT")


def test_a_session_that_has_no_engine_for_the_table(sqlite_shop: sa.Engine) -> None:
    with Session(binds={Order: sqlite_shop}) as session:
        refused(session, "BAD_ARGUMENT.*trans_message: engine")
    with Session(binds={Order: sqlite_shop, trans_message: sqlite_shop}) as session:
        place(session, 1)
        session.commit()
    assert agree(sqlite_shop) == {"1"}


def test_names_of_the_package() -> None:
    assert set(outbox.__all__) <= set(dir(outbox))
    assert all(getattr(outbox, name) is not None for name in outbox.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = outbox.nothing_here


def test_without_sqlalchemy_the_extra_is_named(tmp_path: Any) -> None:
    import subprocess
    import sys

    program = "import sys; sys.modules['sqlalchemy'] = None\nfrom escrowmq import outbox\noutbox.send_tx"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MISSING_PACKAGE" in ran.stderr
    assert "escrowmq[outbox]" in ran.stderr
