"""Marks that a person takes away or sets: the message is handled once more, or passed over; and it is recorded."""

from __future__ import annotations

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.pool import StaticPool

from escrowmq.compensation.journal import Journal
from escrowmq.errors import Code
from escrowmq.outbox import claim_tx, migrate
from escrowmq.outbox.acts import list_acts
from escrowmq.outbox.handled import forget_marks, list_marks, settle_marks, show_marks
from escrowmq.outbox.inbox import claim_batch_tx, purge_seen

ID, OTHER = b"0123456789abcdef", b"fedcba9876543210"


def claim(engine: sa.Engine, message_id: bytes = ID, topic: str | None = "orders", group: str = "cart") -> bool:
    with engine.begin() as connection:
        return claim_tx(connection, group=group, message_id=message_id, topic=topic)


def test_a_forgotten_message_is_handled_once_more_and_a_settled_one_never(shop: sa.Engine) -> None:
    assert claim(shop)
    assert not claim(shop)
    done = forget_marks(shop, "cart", [ID, OTHER], by="ann", why="a bad release")
    assert [one.code for one in done] == [Code.OK, Code.NOT_FOUND]
    (mark,) = list_marks(shop, "cart")
    assert (mark.message_id, mark.topic, mark.is_forgotten) == (ID, "orders", True)
    assert [one.code for one in forget_marks(shop, "cart", [ID])] == [Code.NOT_FOUND], "once is enough"
    assert claim(shop)
    assert not claim(shop)
    assert [one.is_forgotten for one in show_marks(shop, "cart", [ID, OTHER])] == [False]
    settled = settle_marks(shop, "cart", [ID, OTHER.hex()], topic="orders", why="shipped by hand")
    assert [one.code for one in settled] == [Code.CONFLICT, Code.OK]
    assert not claim(shop, OTHER)
    assert claim(shop, OTHER, group="points"), "another group is another matter"
    assert len(list_marks(shop, "cart", limit=1, after=ID)) == 1
    first, second, third = list_acts(shop)
    assert (first["act"], first["by"], first["what"]["group"]) == ("inbox.forget", "ann", "cart")
    assert first["ended"]["results"] == {"OK": 1, "NOT_FOUND": 1}
    assert "topic orders" in first["ended"]["notes"][ID.hex()]
    assert second["ended"]["results"] == {"NOT_FOUND": 1}
    assert (third["act"], third["why"]) == ("inbox.settle", "shipped by hand")


def test_a_settled_mark_can_be_forgotten_and_the_other_way_round(sqlite_shop: sa.Engine) -> None:
    settle_marks(sqlite_shop, "cart", [ID], topic="orders")
    forget_marks(sqlite_shop, "cart", [ID])
    assert [one.code for one in settle_marks(sqlite_shop, "cart", [ID], topic="orders")] == [Code.OK]
    assert not claim(sqlite_shop)


def test_a_mark_for_every_topic_goes_as_a_whole(sqlite_shop: sa.Engine) -> None:
    assert claim(sqlite_shop, topic=None)
    assert not claim(sqlite_shop, topic="orders")
    assert [one.code for one in forget_marks(sqlite_shop, "cart", [ID], topic="orders")] == [Code.OK]
    assert list_marks(sqlite_shop, "cart") == []
    assert claim(sqlite_shop, topic="orders")


def test_a_purge_takes_a_forgotten_mark_along(sqlite_shop: sa.Engine) -> None:
    claim(sqlite_shop)
    forget_marks(sqlite_shop, "cart", [ID])
    assert purge_seen(sqlite_shop, 0.0) == 1
    assert claim(sqlite_shop)


def test_a_recovery_of_a_compensation_does_not_take_a_forgotten_mark_for_an_effect(sqlite_shop: sa.Engine) -> None:
    claim(sqlite_shop)
    claim(sqlite_shop, OTHER)
    forget_marks(sqlite_shop, "cart", [ID])
    assert list(Journal(sqlite_shop, "cart").marks("cart", 0)) == [[OTHER]]


LONG = "x" * 127
topics = st.sampled_from(["orders", "hints", LONG])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["claim", "claim", "forget", "settle"]), topics), max_size=12))
def test_messages_of_several_topics_under_one_id_as_a_set_would_have_them(steps: list[tuple[str, str]]) -> None:
    """Against the plainest model: a set of the topics whose message has been handled."""
    engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    migrate(engine)
    handled: set[str] = set()
    for step, topic in steps:
        if step == "claim":
            with engine.begin() as connection:
                assert claim_batch_tx(connection, [Named(topic)], "cart") == [topic not in handled]
            handled.add(topic)
        elif step == "settle":
            (done,) = settle_marks(engine, "cart", [ID], topic=topic)
            assert done.code is (Code.CONFLICT if topic in handled else Code.OK)
            handled.add(topic)
        else:
            (done,) = forget_marks(engine, "cart", [ID], topic=topic)
            assert done.code is (Code.OK if topic in handled else Code.NOT_FOUND)
            handled.discard(topic)
    engine.dispose()


class Named:
    """A message of a topic."""

    message_id = ID

    def __init__(self, topic: str) -> None:
        self.topic = topic
