"""The consumer's success sets the sender's row to DONE (row 3.4)."""

from typing import Any

import pytest
import sqlalchemy as sa
from outbox_world import Order, orders, until_settled
from sqlalchemy.orm import Session, sessionmaker

import escrowmq as mq
from escrowmq.acts.telling import acting_user
from escrowmq.outbox import (
    CallbackListener,
    State,
    attention,
    confirm_batch_tx,
    confirm_tx,
    inbox,
    mark_done,
    migrate,
    report,
    send_batch_tx,
    send_tx,
)
from escrowmq.outbox.acts import list_acts, verify_acts
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay import marking
from escrowmq.outbox.relay.holding import Holding
from escrowmq.outbox.tables import LANES, trans_message


def states(engine: sa.Engine) -> list[tuple[str, bool]]:
    with engine.connect() as connection:
        found = connection.execute(sa.select(trans_message.c.state, trans_message.c.done_us).order_by("seq")).all()
    return [(State(state).name, done is not None) for state, done in found]


def send(engine: sa.Engine, count: int, state: State = State.SENT) -> list[bytes]:
    """Messages in the table as a relay leaves them."""
    with engine.begin() as connection:
        ids = send_batch_tx(connection, [mq.Message("orders", b"%d" % n) for n in range(count)])
        connection.execute(sa.update(trans_message).where(trans_message.c.id.in_(ids)).values(state=state))
    return ids


@pytest.fixture
def bus(tmp_path: Any) -> Any:
    with mq.connect(f"file:{tmp_path / 'data'}") as opened:
        yield opened


def test_rows_are_marked_done_from_every_open_state(shop: sa.Engine) -> None:
    """PENDING too: the consumer can be quicker than the relay's own mark. What a person discarded stays discarded."""
    by_state = {state: send(shop, 1, state)[0] for state in State}
    asked = [*by_state.values(), *by_state.values(), b"unknown"]
    assert mark_done(shop, asked) == len(State) - 2
    assert [name for name, _ in states(shop)] == [s.name if s is State.DISCARDED else "DONE" for s in State]
    assert [done for _, done in states(shop)] == [s not in (State.DONE, State.DISCARDED) for s in State]
    assert mark_done(shop, asked) == 0
    assert mark_done(shop, []) == 0


def test_thousands_are_few_statements(shop: sa.Engine) -> None:
    ids = send(shop, 2_500)
    counted: list[str] = []
    sa.event.listen(shop, "before_cursor_execute", lambda c, u, statement, *_: counted.append(statement))
    assert mark_done(shop, (identity.hex() for identity in ids)) == 2_500
    assert len([statement for statement in counted if statement.startswith("UPDATE")]) == 3


def test_from_the_consumers_transaction_to_the_senders_row(sqlite_shop: sa.Engine, bus: mq.Bus, tmp_path: Any) -> None:
    """Two databases and a broker. The consumer's word is in the effect's transaction: it leaves when the effect is
    committed."""
    theirs = sa.create_engine(f"sqlite:///{tmp_path / 'cart.db'}")
    migrate(theirs)
    orders.create(theirs)
    ids = send(sqlite_shop, 6)
    producer = bus.producer("shop")
    producer.send_batch([mq.Message("orders", b"%d" % n, message_id=identity) for n, identity in enumerate(ids)]).ok

    def handle(session: Session, message: Any) -> None:
        session.add(Order(id=int(message.body)))
        confirm_tx(session, message, to="orders.done")
        if message.body == b"3":
            raise KeyError("not today")

    with bus.consumer("cart", ["orders"], max_attempts=1) as consumer:
        database = sessionmaker(theirs)
        assert until_settled(bus, "cart", lambda: inbox.consume(consumer, database, handle, idle_timeout=0.5)) == 5
    with theirs.connect() as connection:
        words = connection.execute(sa.select(trans_message.c.topic, trans_message.c.body)).all()
    assert sorted(words) == sorted(("orders.done", identity) for n, identity in enumerate(ids) if n != 3)
    for topic, body in [*words, *words[:2]]:  # what a relay does, with repeats
        producer.send(topic, body)
    with bus.consumer("orders-callbacks", ["orders.done"]) as consumer:
        listener = CallbackListener(consumer, sqlite_shop)
        assert until_settled(bus, "orders-callbacks", lambda: listener.run(idle_timeout=0.5)) == 5
        assert consumer.flush() == 0
    assert [name for name, _ in states(sqlite_shop)] == ["DONE"] * 3 + ["SENT"] + ["DONE"] * 2
    theirs.dispose()


def test_one_word_can_speak_of_many(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    ids = send(sqlite_shop, 1_500)
    with sqlite_shop.begin() as connection:
        confirm_batch_tx(connection, ids[:600], "orders.done")
        confirm_batch_tx(connection, [], "orders.done")
        (word,) = connection.scalars(sa.select(trans_message.c.body).where(trans_message.c.topic == "orders.done"))
    assert word == b"".join(ids[:600])
    producer = bus.producer("cart")
    report(producer, ids[600:1400], to="orders.done")
    producer.send("orders.done", word)
    with bus.consumer("callbacks", ["orders.done"]) as consumer:
        listener = CallbackListener(consumer, sqlite_shop)
        assert until_settled(bus, "callbacks", lambda: listener.run(idle_timeout=0.5)) == 1_400


def test_a_word_that_is_none_goes_to_the_dead_letters(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    ids = send(sqlite_shop, 2)
    producer = bus.producer("cart")
    for body in (ids[0], b"not an id", ids[1]):
        producer.send("outbox.done", body, queue=0)
    with bus.consumer("callbacks", ["outbox.done"], max_attempts=1) as consumer:
        listener = CallbackListener(consumer, sqlite_shop)
        assert until_settled(bus, "callbacks", lambda: listener.run(idle_timeout=0.5)) == listener.marked == 2
    (letter,) = bus.admin.dead_letters("callbacks")
    assert "no list of 16-byte message ids" in letter["cause"]


def test_a_database_that_is_away_is_tried_again(sqlite_shop: sa.Engine, bus: mq.Bus) -> None:
    (identity,) = send(sqlite_shop, 1)
    report(bus.producer("cart"), [identity])
    away = [True, True]

    def refuse(connection: Any) -> None:
        if away:
            away.pop()
            raise sa.exc.OperationalError("BEGIN", {}, Exception("the database is away"))

    sa.event.listen(sqlite_shop, "begin", refuse)
    with bus.consumer("callbacks", ["outbox.done"], retry_backoff=0.01) as consumer:
        listener = CallbackListener(consumer, sqlite_shop)
        assert until_settled(bus, "callbacks", lambda: listener.run(idle_timeout=0.5)) == 1
    assert states(sqlite_shop) == [("DONE", True)]


def test_a_listener_without_tables_stops_and_gives_the_words_back(bus: mq.Bus, tmp_path: Any) -> None:
    empty = sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    report(bus.producer("cart"), [b"x" * 16])
    with bus.consumer("callbacks", ["outbox.done"]) as consumer:
        with pytest.raises(mq.Misuse, match="NO_TABLES"):
            CallbackListener(consumer, empty).run(idle_timeout=60)
        assert next(consumer.messages(idle_timeout=60)).body == b"x" * 16
        with pytest.raises(mq.Misuse, match="BAD_ARGUMENT"):
            CallbackListener(consumer, "sqlite://")  # type: ignore[arg-type]
    empty.dispose()


# What a person does with rows that wait


def wait(engine: sa.Engine, count: int) -> list[bytes]:
    ids = send(engine, count, State.WAITING)
    with engine.begin() as connection:
        connection.execute(sa.update(trans_message).values(attempts=4, error="UNKNOWN_TOPIC", due_us=77))
    return ids


def test_waiting_rows_are_listed_page_by_page(shop: sa.Engine) -> None:
    ids = wait(shop, 5)
    send(shop, 2)
    first = attention.list_messages(shop, limit=3)
    rest = attention.list_messages(shop, limit=3, after=first[-1].seq)
    assert [row.id for row in first + rest] == ids
    row = first[0]
    assert (row.state, row.topic, row.attempts, row.error, row.body, row.body_bytes) == (
        State.WAITING,
        "orders",
        4,
        "UNKNOWN_TOPIC",
        None,
        1,
    )
    assert len(attention.list_messages(shop, state=None)) == 7
    assert len(attention.list_messages(shop, state=State.SENT)) == 2


def test_a_row_is_shown_whole(shop: sa.Engine) -> None:
    with shop.begin() as connection:
        given = {"key": "o-1", "tag": "paid", "properties": {"a": "b"}}
        identity = send_tx(connection, "orders", b"\0body", **given)
    row = attention.show(shop, identity)
    assert (row.body, row.body_bytes, row.key, row.tag, row.properties) == (b"\0body", 5, "o-1", "paid", {"a": "b"})
    assert attention.show(shop, identity.hex()) == row
    with pytest.raises(mq.Rejected, match="NOT_FOUND"):
        attention.show(shop, b"x" * 16)


def test_retry_discard_and_settle_are_recorded_and_leave_the_error_alone(
    shop: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second, third = wait(shop, 3)
    done = attention.retry(shop, [first, third.hex(), b"?" * 16], by="ada", why="the topic is there now")
    assert [(d.code.name, getattr(d.state, "name", None)) for d in done] == [
        ("OK", "PENDING"),
        ("OK", "PENDING"),
        ("NOT_FOUND", None),
    ]
    row = attention.show(shop, first)
    assert (row.state, row.attempts, row.due_us, row.error) == (State.PENDING, 0, 0, "UNKNOWN_TOPIC")
    (discarded,) = attention.discard(shop, [second], by="bob")
    assert (discarded.code, attention.show(shop, second).state) == (mq.Code.OK, State.DISCARDED)
    (again,) = attention.retry(shop, [second])
    assert again.code is mq.Code.OK
    (settled,) = attention.settle(shop, [second], why="the shop telephoned")
    assert (settled.code, settled.state) == (mq.Code.OK, State.DONE)
    row = attention.show(shop, second)
    assert row.state is State.DONE
    assert row.sent_us == row.done_us
    assert row.done_us is not None
    assert row.error == "UNKNOWN_TOPIC"
    found = list_acts(shop)
    assert [(act["act"], act["by"], act["why"]) for act in found] == [
        ("outbox.retry", "ada", "the topic is there now"),
        ("outbox.discard", "bob", None),
        ("outbox.retry", acting_user(), None),
        ("outbox.settle", acting_user(), "the shop telephoned"),
    ]
    assert found[0]["what"] == {"messages": [first.hex(), third.hex(), (b"?" * 16).hex()]}
    assert found[0]["ended"] == {"results": {"OK": 2, "NOT_FOUND": 1}, "each": ["OK", "OK", "NOT_FOUND"]}
    assert verify_acts(shop)["broken"] == []
    assert "act 1, outbox.retry by ada: 2 OK, 1 NOT_FOUND" in caplog.messages


@pytest.mark.parametrize(
    ("act", "state"),
    [
        ("retry", State.SENT),
        ("retry", State.DONE),
        ("retry", State.PENDING),
        ("retry", State.HELD),
        ("discard", State.SENT),
        ("discard", State.DONE),
        ("discard", State.DISCARDED),
        ("settle", State.DONE),
    ],
)
def test_what_is_done_stays_done(sqlite_shop: sa.Engine, act: str, state: State) -> None:
    (identity,) = send(sqlite_shop, 1, state)
    before = attention.show(sqlite_shop, identity)
    (done,) = getattr(attention, act)(sqlite_shop, [identity])
    assert (done.code, done.state) == (mq.Code.CONFLICT, state)
    assert attention.show(sqlite_shop, identity) == before


def test_notes_of_versions_before_the_record_stay_readable(sqlite_shop: sa.Engine) -> None:
    (identity,) = wait(sqlite_shop, 1)
    noted = "2026-01-02 03:04:05Z discard by bob\nUNKNOWN_TOPIC"
    with sqlite_shop.begin() as connection:
        connection.execute(sa.update(trans_message).values(error=noted))
    attention.retry(sqlite_shop, [identity])
    assert attention.show(sqlite_shop, identity).error == noted


def test_a_settled_row_lets_the_later_ones_of_its_key_go_and_leaves_the_table(sqlite_shop: sa.Engine) -> None:
    (identity,) = wait(sqlite_shop, 1)
    with sqlite_shop.begin() as connection:
        connection.execute(sa.update(trans_message).values(key="o-1"))
        later = send_tx(connection, "orders", b"later", key="o-1")
    dialect = Dialect(sqlite_shop)
    holding = Holding(dialect, True, 0.0)
    holding.refresh(range(LANES))
    assert len(holding.heads) == 1
    attention.settle(sqlite_shop, [identity])
    holding.invalidate()
    holding.refresh(range(LANES))
    assert not holding.heads
    with dialect.transaction() as connection:
        assert marking.purge(dialect, connection, 1 << 62, (State.SENT, State.DONE)) == 1
    assert [row.id for row in attention.list_messages(sqlite_shop, state=None)] == [later]


def test_one_id_is_no_list(sqlite_shop: sa.Engine) -> None:
    with pytest.raises(mq.Misuse, match="many were expected"):
        attention.retry(sqlite_shop, b"x" * 16)  # type: ignore[arg-type]
