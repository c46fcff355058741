"""I24 with claim_tx: each id has exactly one effect, whatever repeats and whoever claims at once."""

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from outbox_world import Order, orders, until_settled
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

import escrowmq as mq
from escrowmq.outbox import claim_batch_tx, claim_tx, inbox, migrate
from escrowmq.outbox.inbox import CHUNK_ROWS
from escrowmq.outbox.tables import trans_recv_log

ID = b"0123456789abcdef"


def ids(count: int, start: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(start, start + count)]


def marks(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(trans_recv_log))


# One consumer


def test_the_first_time_is_true_and_every_repeat_false(shop: sa.Engine) -> None:
    with shop.begin() as connection:
        assert claim_tx(connection, message_id=ID, group="cart")
        assert not claim_tx(connection, message_id=ID, group="cart")
        assert claim_tx(connection, message_id=ID, group="points")
    with Session(shop) as session, session.begin():
        assert not claim_tx(session, message_id=ID, group="cart")
        assert claim_tx(session, message_id=ID[::-1], group="cart")


def test_a_rollback_takes_the_mark_along(shop: sa.Engine) -> None:
    with shop.connect() as connection:
        assert claim_tx(connection, message_id=ID, group="cart")
        connection.rollback()
        assert claim_tx(connection, message_id=ID, group="cart")
        with connection.begin_nested() as inner:
            assert claim_tx(connection, message_id=b"x", group="cart")
            inner.rollback()
        assert claim_tx(connection, message_id=b"x", group="cart")
        connection.commit()
        assert not claim_tx(connection, message_id=ID, group="cart")


def test_a_repeat_does_not_spoil_the_transaction(shop: sa.Engine) -> None:
    """PostgreSQL aborts a transaction at any error; a repeat is none."""
    for _ in range(2):
        with Session(shop) as session, session.begin():
            session.add(Order(id=session.query(Order).count()))
            claim_tx(session, message_id=ID, group="cart")
            claim_batch_tx(session, [ID, b"y" * 16], "cart")
    with Session(shop) as session:
        assert session.query(Order).count() == 2


@pytest.mark.parametrize("dirty", [0, 1, 500, CHUNK_ROWS + 500], ids=str)
def test_a_batch_tells_one_by_one(shop: sa.Engine, dirty: int) -> None:
    """Repeats of earlier transactions, of this one, and within the batch itself."""
    batch = ids(CHUNK_ROWS + 600)
    with shop.begin() as connection:
        claim_batch_tx(connection, batch[:dirty], "cart")
    with shop.begin() as connection:
        claim_tx(connection, message_id=batch[-1], group="cart")
        asked = [*batch[:3], *batch, batch[-2]]
        expected = [n >= dirty for n in range(3)] + [False] * 3 + [n >= dirty for n in range(3, len(batch) - 1)]
        assert claim_batch_tx(connection, asked, "cart") == [*expected, False, False]
        assert claim_batch_tx(connection, [], "cart") == []
    assert marks(shop) == len(batch)


def test_a_thousand_claims_are_one_statement(shop: sa.Engine) -> None:
    with shop.connect() as connection:
        claim_tx(connection, message_id=b"first", group="cart")
        counted: list[str] = []
        sa.event.listen(connection, "before_cursor_execute", lambda c, u, statement, *_: counted.append(statement))
        assert all(claim_batch_tx(connection, ids(CHUNK_ROWS), "cart"))
        assert [statement.split()[0] for statement in counted if "SAVEPOINT" not in statement] == ["INSERT"]
        assert not any(claim_batch_tx(connection, ids(CHUNK_ROWS), "cart"))
        assert len(counted) <= 8


@pytest.mark.invariant("I24")
def test_other_errors_are_not_taken_for_repeats(shop: sa.Engine) -> None:
    """INSERT IGNORE would answer "seen before" here, and the message would be lost."""
    guards = {
        "sqlite": ["CREATE TRIGGER t BEFORE INSERT ON trans_recv_log BEGIN SELECT RAISE(ABORT, 'refused'); END"],
        "postgresql": ["ALTER TABLE trans_recv_log ADD CONSTRAINT refused CHECK (seen_us < 0)"],
        "mysql": [
            "CREATE TABLE known (name VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY)",
            "ALTER TABLE trans_recv_log ADD CONSTRAINT refused FOREIGN KEY (consumer_group) REFERENCES known (name)",
        ],
    }
    with shop.begin() as connection:
        for guard in guards[shop.dialect.name]:
            connection.exec_driver_sql(guard)
    with shop.connect() as connection, pytest.raises(DBAPIError, match="refused"):
        claim_tx(connection, message_id=ID, group="cart")
    with shop.connect() as connection, pytest.raises(DBAPIError, match="refused"):
        claim_batch_tx(connection, ids(3), "cart")


# Several consumers


def blocked(engine: sa.Engine) -> bool:
    """Whether a transaction waits for another (SQLite does not tell: there a claim waits for the file, or fails)."""
    asked = {
        "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    }
    if engine.dialect.name == "sqlite":
        return True
    with engine.connect() as connection:
        return bool(connection.exec_driver_sql(asked[engine.dialect.name]).scalar())


POLL_SECONDS = 0.15
"""MariaDB and MySQL renew ``innodb_trx`` only when nobody has read it for 0.1 s: who asks more often sees the first
answer for ever.
"""


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)


@pytest.mark.invariant("I24")
@pytest.mark.parametrize("many", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls_back"])
def test_the_second_waits_for_the_first_and_never_are_both_true(shop: sa.Engine, commits: bool, many: bool) -> None:
    wanted = ids(5)

    def claim(connection: sa.Connection) -> list[bool]:
        if many:
            return claim_batch_tx(connection, wanted, "cart")
        return [claim_tx(connection, message_id=wanted[0], group="cart")]

    second: list[Any] = []
    began = threading.Event()

    def other() -> None:
        with shop.begin() as connection:
            began.set()
            second.extend(claim(connection))

    with shop.begin() as connection:
        claim_tx(connection, message_id=b"the tables are looked for", group="cart")
    with shop.connect() as connection:
        assert all(claim(connection))
        thread = threading.Thread(target=other)
        thread.start()
        began.wait()
        await_(lambda: blocked(shop))
        assert second == []
        connection.commit() if commits else connection.rollback()
        thread.join()
    assert second == [not commits] * len(second)
    assert second


@pytest.mark.invariant("I24")
def test_i24_a_storm_of_consumers_has_each_effect_once(shop: sa.Engine) -> None:
    """Six consumers, the same ids in every order, singles and batches; failures and rollbacks are done again."""
    if shop.dialect.name == "sqlite":
        rounds, engine = 2, sa.create_engine(shop.url, connect_args={"timeout": 60})
    else:
        rounds, engine = 4, shop
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effects (id INTEGER, consumer INTEGER)")
    wanted = ids(40)
    problems: list[Exception] = []

    def consumer(number: int) -> None:
        import random

        chosen = random.Random(number)
        for turn in range(rounds):
            batches = chosen.sample(wanted, len(wanted))
            size = chosen.choice([1, 7, 40])
            for at in range(0, len(batches), size):
                handle(number, batches[at : at + size], chosen.random() < 0.2, turn)

    def handle(number: int, batch: list[bytes], give_up: bool, turn: int) -> None:
        while True:
            try:
                with engine.connect() as connection:
                    first = claim_batch_tx(connection, batch, "cart")
                    for identity, new in zip(batch, first, strict=True):
                        if new:
                            effect = {"id": int.from_bytes(identity, "big"), "consumer": number}
                            connection.execute(sa.text("INSERT INTO effects VALUES (:id, :consumer)"), effect)
                    if not give_up:
                        connection.commit()
                        return
                    give_up = False
            except DBAPIError:  # a deadlock, a lock that took too long: nothing was done
                continue
            except Exception as problem:
                problems.append(problem)
                return

    threads = [threading.Thread(target=consumer, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    with engine.connect() as connection:
        effects = sorted(connection.scalars(sa.text("SELECT id FROM effects")))
    assert effects == list(range(40))
    if engine is not shop:
        engine.dispose()


# What can be claimed


def test_messages_of_any_broker_can_be_claimed(sqlite_shop: sa.Engine) -> None:
    made = uuid.uuid4()
    with sqlite_shop.begin() as connection:
        assert claim_tx(connection, SimpleNamespace(message_id=made.bytes), group="cart")
        for same in (made, made.bytes, made.hex, SimpleNamespace(message_id=made.hex)):
            assert claim_batch_tx(connection, [same], "cart") == [False]
        kafka = [("other", b"x"), ("escrowmq-message-id", made.hex.encode())]
        redis = {b"escrowmq-message-id": made.hex.encode()}
        for headers in (kafka, redis, {"escrowmq-message-id": made.hex}):
            assert not claim_tx(connection, message_id=inbox.header_id(headers), group="cart")
        assert claim_tx(connection, message_id="order-17", group="cart")
        assert not claim_tx(connection, message_id=b"order-17", group="cart")


@pytest.mark.parametrize("headers", [None, [], {"x": "y"}])
def test_a_message_without_the_header(headers: Any) -> None:
    with pytest.raises(mq.Misuse, match="escrowmq-message-id"):
        inbox.header_id(headers)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "what is to be claimed"),
        ({"message": SimpleNamespace(message_id=ID), "message_id": ID}, "not both"),
        ({"message": SimpleNamespace(message_id=None)}, "has no message id.*header_id"),
        ({"message": object()}, "has no message id"),
        ({"message_id": b""}, "has no message id"),
        ({"message_id": 7}, "has no message id"),
        ({"message_id": ID, "group": "a b"}, "BAD_GROUP_NAME"),
        ({"message_id": ID, "group": 7}, "BAD_GROUP_NAME"),
    ],
)
def test_what_cannot_be_claimed(sqlite_shop: sa.Engine, given: dict[str, Any], told: str) -> None:
    with sqlite_shop.begin() as connection, pytest.raises(mq.EscrowError, match=told):
        claim_tx(connection, **{"group": "cart", **given})
    assert marks(sqlite_shop) == 0


def test_claiming_without_tables_or_transaction(engine: sa.Engine) -> None:
    with engine.begin() as connection, pytest.raises(mq.Misuse, match="NO_TABLES"):
        claim_tx(connection, message_id=ID, group="cart")
    migrate(engine)
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        with pytest.raises(mq.Misuse, match="NO_TRANSACTION"):
            claim_tx(connection, message_id=ID, group="cart")
        with pytest.raises(mq.Misuse, match="NO_TRANSACTION"):
            claim_batch_tx(connection, [ID], "cart")
    assert marks(engine) == 0


# Topics


def named(topic: str, identity: bytes = ID) -> SimpleNamespace:
    return SimpleNamespace(topic=topic, message_id=identity)


@pytest.mark.invariant("I24")
def test_the_same_id_in_another_topic_is_another_message(shop: sa.Engine) -> None:
    for first in (True, False):  # and each has its effect once, however often and in whatever order it comes
        for topic in ("points", "orders", "hints"):
            with shop.begin() as connection:
                assert claim_tx(connection, named(topic), group="cart") is first
    with shop.begin() as connection:
        assert claim_tx(connection, message_id=ID, topic="bills", group="cart")
        assert not claim_tx(connection, named("bills"), group="cart")
        assert not claim_tx(connection, message_id=ID, group="cart"), "without a topic it is every topic's"
    assert marks(shop) == 4


def test_what_was_claimed_by_its_id_alone_is_claimed_for_every_topic(shop: sa.Engine) -> None:
    with shop.begin() as connection:
        assert claim_tx(connection, message_id=ID, group="cart")
        assert not claim_tx(connection, named("orders"), group="cart")
        assert claim_tx(connection, named("orders"), group="points")


def test_a_batch_with_one_id_in_several_topics(shop: sa.Engine) -> None:
    messages = [named(topic, identity) for topic in ("orders", "points", "hints") for identity in ids(CHUNK_ROWS // 2)]
    with shop.begin() as connection:
        assert claim_batch_tx(connection, messages[:300], "cart") == [True] * 300
        answers = claim_batch_tx(connection, [*messages, *messages[-9:]], "cart")
    assert answers == [False] * 300 + [True] * (len(messages) - 300) + [False] * 9
    with shop.begin() as connection:
        assert not any(claim_batch_tx(connection, messages, "cart"))


@pytest.mark.invariant("I24")
def test_a_purge_lets_no_first_mark_go_before_that_of_another_topic(shop: sa.Engine) -> None:
    """Else a repeat in the other topic would take the first one's place, and have its effect again."""
    with shop.begin() as connection:
        assert claim_tx(connection, named("orders"), group="cart")
        connection.execute(sa.update(trans_recv_log).values(seen_us=trans_recv_log.c.seen_us - 7_200_000_000))
        assert claim_tx(connection, named("points"), group="cart")
    assert inbox.purge_seen(shop, 3600) == 0
    with shop.begin() as connection:
        assert not claim_tx(connection, named("points"), group="cart")
        assert not claim_tx(connection, named("orders"), group="cart")


@pytest.mark.invariant("I24")
def test_a_consumer_of_two_topics_has_both_effects_of_one_id(shop: sa.Engine, tmp_path: Path) -> None:
    done: list[str] = []
    with mq.connect(f"file:{tmp_path / 'broker'}") as bus:
        for topic in ("orders", "points"):
            bus.producer("shop", qos=2).send(topic, b"", message_id="order-17")
        consumer = bus.consumer("cart", ["orders", "points"])

        def consume() -> int:
            return inbox.consume(consumer, shop, lambda _, message: done.append(message.topic), idle_timeout=0.5)

        handled = until_settled(bus, "cart", consume)
    assert handled == 2
    assert sorted(done) == ["orders", "points"]


# Purging


def test_purging_takes_the_old_and_leaves_the_young(shop: sa.Engine) -> None:
    now = time.time_ns() // 1000
    old = [
        {"consumer_group": group, "message_id": identity, "seen_us": now - 7_200_000_000 - 7 * n}
        for group in ("cart", "points")
        for n, identity in enumerate(ids(CHUNK_ROWS + 300))
    ]
    equal = [{"consumer_group": "ties", "message_id": i, "seen_us": 5} for i in ids(2 * CHUNK_ROWS + 1)]
    with shop.begin() as connection:
        connection.execute(sa.insert(trans_recv_log), old + equal)
        claim_batch_tx(connection, ids(10, 10_000), "cart")
    deletes: list[int] = []
    sa.event.listen(
        shop,
        "after_cursor_execute",
        lambda c, cursor, statement, *_: deletes.append(cursor.rowcount) if statement.startswith("DELETE") else None,
    )
    assert inbox.purge_seen(shop, 3600, group="cart") == CHUNK_ROWS + 300
    assert deletes == [CHUNK_ROWS, 300]
    assert inbox.purge_seen(shop, 3600.0) == 3 * CHUNK_ROWS + 301
    assert inbox.purge_seen(shop, 3600) == 0
    with shop.begin() as connection:
        assert not any(claim_batch_tx(connection, ids(10, 10_000), "cart"))
        assert claim_tx(connection, message_id=ids(1)[0], group="cart")


@pytest.mark.parametrize("age", [-1, "1d", None, True, float("nan")])
def test_wrong_ages(sqlite_shop: sa.Engine, age: Any) -> None:
    with pytest.raises(mq.Misuse, match="older_than"):
        inbox.purge_seen(sqlite_shop, age)


# The loop


@pytest.fixture
def bus(tmp_path: Any) -> Any:
    with mq.connect(f"file:{tmp_path / 'data'}") as opened:
        yield opened


@pytest.mark.invariant("I24")
def test_i24_consume_repeats_nothing_that_was_committed(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    """The first consumer dies after its commit and before its acknowledgement; one message fails once."""
    producer = bus.producer("shop")
    for number in range(20):
        producer.send("orders", b"%d" % number, key=str(number), message_id=f"o-{number}")
    failing = {7}

    def place(session: Any, message: Any) -> None:
        number = int(message.body)
        session.add(Order(id=number)) if isinstance(session, Session) else session.execute(
            sa.insert(orders).values(id=number)
        )
        if number in failing:
            failing.discard(number)
            failing.add(-1)
            raise KeyError(number)

    with bus.consumer("cart", ["orders"], lease=0.2) as dying:
        received = dying.receive(10, wait=60)
        with sessionmaker(sqlite_shop).begin() as session:
            assert all(claim_batch_tx(session, received, "cart"))
            session.add_all(Order(id=int(message.body)) for message in received)
        failing -= {int(message.body) for message in received}
    with bus.consumer("cart", ["orders"], retry_backoff=None) as consumer:
        database: Any = sessionmaker(sqlite_shop) if failing else sqlite_shop

        def consume() -> int:
            return inbox.consume(consumer, database, place, max_messages=6, idle_timeout=0.5)

        effects = until_settled(bus, "cart", consume)
    with sqlite_shop.connect() as connection:
        assert sorted(connection.scalars(sa.select(orders.c.id))) == list(range(20))
    assert effects == 20 - len(received)
    assert marks(sqlite_shop) == 20


def test_consume_sends_back_only_what_fails(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    producer = bus.producer("shop")
    for number in range(9):
        producer.send("orders", b"%d" % number, queue=0)

    def place(connection: sa.Connection, message: Any) -> None:
        connection.execute(sa.insert(orders).values(id=int(message.body)))
        if message.body == b"4":
            raise ValueError("four")

    with bus.consumer("cart", ["orders"], max_attempts=2, retry_backoff=0.01) as consumer:
        assert until_settled(bus, "cart", lambda: inbox.consume(consumer, sqlite_shop, place, idle_timeout=0.5)) == 8
        (letter,) = bus.admin.dead_letters("cart")
    assert letter["cause"].startswith("ValueError: four")
    with sqlite_shop.connect() as connection:
        assert sorted(connection.scalars(sa.select(orders.c.id))) == [0, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.invariant("I20")
def test_consume_keeps_the_order_of_each_key_after_a_failure(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    producer = bus.producer("shop")
    for number in range(8):
        producer.send("orders", b"%d" % number, key="ab"[number % 2], queue=0)
    done: list[int] = []
    fails = {2: 2, 5: 1}  # the second time by itself, not with the batch

    def place(session: Session, message: Any) -> None:
        number = int(message.body)
        session.execute(sa.insert(orders).values(id=number))
        if fails.get(number):
            fails[number] -= 1
            raise ValueError(number)
        sa.event.listen(session, "after_commit", lambda _: done.append(number), once=True)

    with bus.consumer("cart", ["orders"], ordered=True, retry_backoff=0.05) as consumer:
        database = sessionmaker(sqlite_shop)

        def consume() -> int:
            return inbox.consume(consumer, database, place, max_messages=1000, idle_timeout=0.5)

        assert until_settled(bus, "cart", consume) == 8
        assert consumer.refused == 0
    assert [number for number in done if number % 2 == 0] == [0, 2, 4, 6]
    assert [number for number in done if number % 2] == [1, 3, 5, 7]


def test_consume_stops_when_there_are_no_tables_and_gives_everything_back(bus: mq.Bus, tmp_path: Any) -> None:
    empty = sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    bus.producer("shop").send("orders", b"1")
    with bus.consumer("cart", ["orders"]) as consumer:
        with pytest.raises(mq.Misuse, match="NO_TABLES"):
            inbox.consume(consumer, empty, lambda session, message: None, idle_timeout=60)
        assert next(consumer.messages(idle_timeout=60)).body == b"1"
    empty.dispose()


@pytest.mark.invariant("I20")
@pytest.mark.parametrize("how", ["event", "function", "consumer"])
def test_consume_stops_between_messages(sqlite_shop: sa.Engine, bus: mq.Bus, how: str) -> None:
    """What was handled is committed and acknowledged; the rest of the batch goes back at once, uncounted and without a
    mark."""
    producer = bus.producer("shop")
    for number in range(9):
        producer.send("orders", b"%d" % number, queue=0)
    event = threading.Event()
    consumer = bus.consumer("cart", ["orders"])
    asked = {"event": event, "function": event.is_set, "consumer": None}[how]

    def place(connection: sa.Connection, message: Any) -> None:
        connection.execute(sa.insert(orders).values(id=int(message.body)))
        if message.body == b"3":
            event.set()
            if how == "consumer":
                consumer.stop()

    assert inbox.consume(consumer, sqlite_shop, place, stop=asked) == 4
    consumer.close()
    assert marks(sqlite_shop) == 4
    with bus.consumer("cart", ["orders"]) as other:
        attempts: list[int] = []

        def place_rest(connection: sa.Connection, message: Any) -> None:
            attempts.append(message.attempt)
            place(connection, message)

        event.clear()
        assert until_settled(bus, "cart", lambda: inbox.consume(other, sqlite_shop, place_rest, idle_timeout=0.5)) == 5
    assert attempts == [1] * 5
    with sqlite_shop.connect() as connection:
        assert sorted(connection.scalars(sa.select(orders.c.id))) == list(range(9))


def test_an_idle_consume_notices_stop(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    bus.admin.create_topic("orders")
    event = threading.Event()
    with bus.consumer("cart", ["orders"]) as consumer:
        threading.Timer(0.2, event.set).start()
        assert inbox.consume(consumer, sqlite_shop, lambda *_: None, stop=event) == 0


def test_a_claim_that_is_taken_back_is_new_again(shop: sa.Engine) -> None:
    messages = [named("orders"), named("points"), b"y" * 16]
    with shop.begin() as connection:
        assert claim_batch_tx(connection, messages, "cart") == [True, True, True]
        inbox.unclaim_tx(connection, messages[1:], "cart")
    with shop.begin() as connection:
        assert claim_batch_tx(connection, messages, "cart") == [False, True, True]


def test_a_failure_is_logged_once(sqlite_shop: sa.Engine, bus: mq.Bus, caplog: pytest.LogCaptureFixture) -> None:
    bus.producer("shop").send("orders", b"1")

    def place(connection: sa.Connection, message: Any) -> None:
        raise ValueError("no field price")

    with bus.consumer("cart", ["orders"], max_attempts=1) as consumer:
        assert until_settled(bus, "cart", lambda: inbox.consume(consumer, sqlite_shop, place, idle_timeout=0.3)) == 0
    (told,) = [record for record in caplog.records if record.levelname == "WARNING" and "failed" in record.message]
    assert told.exc_info is not None
    assert told.exc_info[1].__context__ is None  # type: ignore[union-attr]
