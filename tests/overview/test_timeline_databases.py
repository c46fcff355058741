"""What databases say of a message: outbox, inbox, barrier, the delivery modes and compensations, each produced for
real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox
from escrowmq.compensation import open_sets
from escrowmq.compensation.cases import Cases, retry_cases, settle_cases
from escrowmq.errors import Code
from escrowmq.outbox import attention, callbacks, inbox
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.tables import State, trans_driven, trans_message, trans_prepared, trans_recv_log
from escrowmq.overview import Story, status, timeline, waiting
from escrowmq.overview.stories import databases
from escrowmq.testing.memory_target import MemoryTarget

Open = Callable[..., mq.Bus]
NEVER = 600.0


def the_one(bus: mq.Bus, wanted: str, *engines: sa.Engine) -> Story:
    (story,) = timeline(bus, wanted, engines).stories
    return story


def words(story: Story) -> list[str]:
    return [event.event for event in story.events]


def write(engine: sa.Engine, key: str | None = "order-17", message_id: str = "m") -> bytes:
    with engine.begin() as connection:
        return outbox.send_tx(connection, "orders", b"body", key=key, message_id=message_id)


def test_a_row_on_its_way(opened: Open, shop: sa.Engine) -> None:
    bus = opened()
    identity = write(shop)
    story = the_one(bus, "order-17", shop)
    assert (words(story), story.state, story.body_bytes) == (["written"], "outbox_pending", 4)
    assert story.why.endswith(": no relay has sent it yet.")
    assert story.notes == ("None of the brokers that answered has it.",)
    for wanted in ("m", identity.hex()):
        assert the_one(bus, wanted, shop).events == story.events


def test_a_row_that_is_refused_given_up_and_acted_on(opened: Open, shop: sa.Engine) -> None:
    bus, target = opened(), MemoryTarget()
    target.answer = lambda _: Code.BODY_TOO_LARGE
    write(shop)
    write(shop, message_id="behind")
    Relay(shop, target, redeliveries=1, redelivery_interval=NEVER).drain(60.0)
    story = the_one(bus, "m", shop)
    assert (words(story), story.state) == (["written", "tried"], "outbox_retrying")
    assert "BODY_TOO_LARGE" in story.why
    assert "it is sent again at " in story.why
    behind = the_one(bus, "behind", shop)
    assert (behind.state, behind.waits) == ("outbox_held", True)
    with shop.begin() as connection:
        connection.execute(sa.update(trans_message).values(due_us=0))
    Relay(shop, target, redeliveries=1, redelivery_interval=NEVER).drain(60.0)
    story = the_one(bus, "m", shop)
    assert (words(story), story.state) == (["written", "tried"], "outbox_waiting")
    assert [offer.act for offer in story.offers] == ["outbox.retry", "outbox.discard", "outbox.settle"]
    attention.discard(shop, ["m"], by="ann\x1b[2J", why="sold out")
    story = the_one(bus, "m", shop)
    assert not story.waits
    assert words(story) == ["written", "tried", "discarded", "by_hand"]
    assert story.events[-1].sentence == r"outbox.discard by ann\x1b[2J (act 1): sold out."
    attention.settle(shop, ["m"], by="bob")
    attention.discard(shop, ["m"], by="bob")
    assert the_one(bus, "m", shop).events[-1].sentence.endswith("no reason was given. Its result was CONFLICT.")


def test_a_row_that_was_sent_and_called_back(opened: Open, shop: sa.Engine) -> None:
    bus = opened()
    write(shop)
    assert Relay(shop, MemoryTarget(), await_callback=True, redelivery_interval=NEVER).run_once() == 1
    story = the_one(bus, "m", shop)
    assert (words(story), story.state, story.waits) == (["written", "sent"], "outbox_sent", False)
    callbacks.mark_done(shop, ["m"])
    assert words(the_one(bus, "m", shop)) == ["written", "sent", "called_back"]


def test_one_story_over_broker_and_databases(opened: Open, shop: sa.Engine, tmp_path: Path) -> None:
    """From the outbox over the broker to the mark in the consumer's own database."""
    bus = opened()
    cart = sa.create_engine(f"sqlite:///{tmp_path / 'cart.db'}")
    outbox.migrate(cart)
    identity = write(shop)
    assert Relay(shop, MemoryTarget(), keep=NEVER).run_once() == 1
    bus.producer("relay").send("orders", b"body", key="order-17", message_id=identity)
    with bus.consumer("cart", "orders") as consumer:
        handled = 0
        while not handled:
            handled += inbox.consume(consumer, cart, lambda session, message: None, idle_timeout=0.1)
        assert handled == 1
    found = timeline(bus, "order-17", [shop, cart])
    (story,) = found.stories
    assert set(words(story)) == {"written", "sent", "stored", "placed", "leased", "consumed", "acked"}
    assert words(story)[:1] == ["written"]
    assert len({event.where for event in story.events}) == 3
    assert story.why == "It does not wait: cart has acknowledged it."
    assert found.notes == ("Times of a database are by its clock, those of a broker by its own.",)
    # by a key that only the database has, the broker's half is found, too
    with cart.begin() as connection:
        connection.execute(sa.delete(trans_recv_log))
    cart.dispose()


def test_a_local_transaction_and_its_barrier(opened: Open, shop: sa.Engine) -> None:
    bus = opened()
    producer = bus.producer("shop", unasked=True)
    with producer.transaction() as txn:
        txn.send("orders", b"", message_id="m")
        with shop.begin() as connection:
            outbox.bind_tx(connection, txn)
    story = the_one(bus, "m", shop)
    assert words(story) == ["prepared", "local", "committed", "placed"] or set(words(story)) == {
        "prepared", "local", "committed", "placed"
    }  # fmt: skip
    late = producer.prepare("orders", b"", message_id="late").transaction_id
    assert outbox.Barrier(shop).decide(late) is mq.ROLLBACK
    story = the_one(bus, "late", shop)
    assert any("can no longer commit" in event.sentence for event in story.events)


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_a_producer_that_drives_its_transactions(opened: Open, shop: sa.Engine, stage: Stage) -> None:
    row = {
        "id": b"m" * 16,
        "producer_group": "shop",
        "state": stage.value,
        "topic": "orders",
        "body": b"",
        "delay_us": 0,
    }
    with shop.begin() as connection:
        connection.execute(sa.insert(trans_driven), {**row, "key": "order-17", "attempts": 3, "created_us": 1})
    story = the_one(opened(), "order-17", shop)
    assert (words(story), story.state, story.waits) == (["driven"], stage.name.lower(), True)
    assert story.why.startswith("In the table of producer group shop: ")
    assert bool(story.offers) == (stage is Stage.STUCK)


def test_what_a_consumer_keeps_until_it_is_decided(opened: Open, shop: sa.Engine) -> None:
    row = {"consumer_group": "cart", "message_id": b"m" * 16, "topic": "orders", "body": b"", "prepared_us": 1}
    with shop.begin() as connection:
        connection.execute(sa.insert(trans_prepared), row)
    assert words(the_one(opened(), (b"m" * 16).hex(), shop)) == ["kept"]


def test_compensations(opened: Open, shop: sa.Engine) -> None:
    """Announced, taken, handled; a case, and what a person does about it."""
    bus, identity = opened(), b"m" * 16
    sets = open_sets(shop, "cart")
    sets.add_halves([identity], [1])
    story = the_one(bus, identity.hex(), shop)
    assert (words(story), story.state) == (["announced"], "announced")
    sets.take(10, 10, NEVER)
    story = the_one(bus, identity.hex(), shop)
    assert (words(story), story.state) == (["taken"], "taken")
    Cases(shop, "cart", 1).record_failures({identity: "found nowhere"})
    story = the_one(bus, identity.hex(), shop)
    assert story.state == "stuck"
    assert story.why.startswith("Compensation cart could not resolve it (found nowhere); an operator must decide.")
    assert [offer.act for offer in story.offers] == ["compensation.retry", "compensation.settle"]
    assert all("shop" in offer.selection["database"] for offer in story.offers)
    retry_cases(shop, "cart", [identity], by="ann", why="the shop is back")
    assert the_one(bus, identity.hex(), shop).why.startswith("Compensation cart retries it in the next run")
    settle_cases(shop, "cart", [identity], by="ann", why="looked")
    story = the_one(bus, identity.hex(), shop)
    assert sum(event.event == "by_hand" for event in story.events) == 2
    other = b"h" * 16
    sets.add_commits([other], 5)
    assert words(the_one(bus, other.hex(), shop)) == ["handled"]
    sets.close()


def test_a_database_that_does_not_answer_is_named(opened: Open, shop: sa.Engine, tmp_path: Path) -> None:
    write(shop)
    empty = sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database, whatever its name says" * 100)
    bad = sa.create_engine(f"sqlite:///{broken}")
    found = timeline(opened(), "m", [empty, bad, shop])
    assert [story.state for story in found.stories] == ["outbox_pending"]
    reasons = {one["broker"]: one["reason"] for one in found.missing}
    assert "no tables of EscrowMQ" in reasons[str(empty.url)]
    assert "not a database" in reasons[str(bad.url)]


def test_a_search_by_key_that_is_not_complete_says_so(
    opened: Open, shop: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = opened()
    for number in range(4):
        write(shop, message_id=f"m{number}")
    with shop.begin() as connection:
        connection.execute(sa.update(trans_message).values(state=State.SENT.value, sent_us=1))
    assert len(timeline(bus, "order-17", [shop]).stories) == 4
    monkeypatch.setattr(databases, "KEPT_ROWS", 2)
    found = timeline(bus, "order-17", [shop])
    assert len(found.stories) == 2
    assert any("only the newest 2 were searched" in note for note in found.notes)


def test_many_rows_are_bounded(opened: Open, shop: sa.Engine) -> None:
    for number in range(25):
        write(shop, message_id=f"m{number}")
    found: Any = timeline(opened(), "order-17", [shop])
    assert (len(found.stories), found.more) == (20, True)


def test_every_kind_of_database(opened: Open, engine: sa.Engine) -> None:
    """What is read is read alike: outbox, inbox, barrier, sets, cases, acts."""
    bus, identity = opened(), b"m" * 16
    outbox.migrate(engine)
    write(engine)
    attention.discard(engine, ["m"], by="ann", why="sold out")
    assert words(the_one(bus, "order-17", engine)) == ["written", "discarded", "by_hand"]
    with engine.begin() as connection:
        inbox.claim_tx(connection, group="cart", message_id=identity, topic="orders")
    sets = open_sets(engine, "cart")
    sets.add_halves([identity], [1])
    Cases(engine, "cart", 1).record_failures({identity: "found nowhere"})
    assert set(words(the_one(bus, identity.hex(), engine))) == {"consumed", "announced", "case"}
    row = {
        "id": identity,
        "producer_group": "shop",
        "state": Stage.STUCK.value,
        "topic": "orders",
        "body": b"",
        "delay_us": 0,
    }
    with engine.begin() as connection:
        connection.execute(sa.insert(trans_driven), {**row, "key": "k", "attempts": 3, "created_us": 1})
    write(engine, message_id="other")
    with engine.begin() as connection:
        connection.execute(sa.update(trans_message).values(created_us=1))
    causes = waiting(bus, [engine])
    assert causes.missing == []
    assert {cause.kind for cause in causes} == {"outbox", "stuck", "case"}
    assert [(one.pending, one.waiting) for one in status(bus, [engine]).databases] == [(1, 0)]
    sets.close()
