"""Operators' acts are recorded before they are done, with who, what and why; embedded and served."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.broker.actions import act
from escrowmq.broker.embedded import open_engine
from escrowmq.client.admin import Admin
from escrowmq.errors import Code
from escrowmq.overview import timeline
from escrowmq.platform.disk import RealDisk
from escrowmq.platform.failpoints import VARIABLE
from escrowmq.settings import BrokerSettings

Own = Callable[..., Any]


def prepared(bus: mq.Bus, count: int, topic: str = "orders") -> list[mq.TransactionId]:
    """Undecided transactions, whose producer does not know what became of them."""
    producer = bus.producer("shop", checker=lambda message: mq.UNKNOWN)
    found = [producer.prepare(topic, b"one") for _ in range(count)]
    return [receipt.transaction_id for receipt in found if receipt.transaction_id is not None]


@pytest.mark.invariant("I44")
def test_each_act_is_recorded_with_who_what_why_and_what_came_of_it(own: Own) -> None:
    with own(check_interval=60.0, transaction_timeout=60.0).connect() as bus:
        one, two, three = prepared(bus, 3)
        admin = bus.admin
        admin.commit(one, why="the customer paid")
        admin.rollback(two)
        admin.recheck(three, why="the shop is back")
        with pytest.raises(mq.Rejected):
            admin.rollback(one)
        with bus.consumer("cart", "orders", max_attempts=1) as consumer:
            (message,) = consumer.receive(10, wait=60.0)
            message.nack(0.0, "spoilt")
        letters = admin.dead_letters("cart")
        admin.discard_dead_letters("cart", letters, why="poison")
        admin.alter_group("cart", max_attempts=9, why="once is too little")
        admin.alter_producers("shop", check_max=4)
        with pytest.raises(mq.Rejected):
            admin.fence("cart", "nobody")
        found = admin.acts()
        assert [(one["act"], one["why"]) for one in found] == [
            ("transactions.settle", "the customer paid"),
            ("transactions.settle", None),
            ("transactions.recheck", "the shop is back"),
            ("transactions.settle", None),
            ("dead_letters.settle", "poison"),
            ("groups.alter", "once is too little"),
            ("producers.alter", None),
            ("groups.fence", None),
        ]
        assert {one["by"] for one in found} == {f"{getpass.getuser()}@{socket.gethostname()}"}
        assert [one["ended"].get("results") for one in found[:5]] == [
            {"COMMITTED": 1}, {"ROLLED_BACK": 1}, {"OK": 1}, {"CONFLICT": 1}, {"OK": 1},
        ]  # fmt: skip
        assert found[0]["what"] == {"ids": [str(one)], "outcome": "commit"}
        (letter,) = letters
        assert found[4]["what"]["items"] == [[letter[name] for name in ("topic", "queue", "offset", "dead_us")]]
        assert found[5]["ended"]["max_attempts"] == 9
        assert found[7]["ended"] == {"refused": "NOT_FOUND"}
        (verified,) = admin.verify_acts()
        assert (verified["records"], verified["broken"]) == (16, [])


def test_2_10_the_body_of_what_was_rolled_back_is_shown_on_request_alone_and_that_is_recorded(own: Own) -> None:
    broker = own()
    with broker.connect() as bus:
        with bus.producer("shop", unasked=True) as producer:
            receipt = producer.prepare("orders", b"not for you", key="o-1", message_id="order-17")
            producer.rollback(receipt.transaction_id)
        assert receipt.transaction_id is not None
        shown = bus.admin.transaction(receipt.transaction_id)
        assert shown["state"] == "rolled_back"
        assert shown["timeline"][-1]["event"] == "rolled_back"
        (found,) = bus.admin.lookup(message_id="order-17")
        for message in (*shown["messages"], found):
            assert (message["body"], message["withheld"], message["key"]) == (None, True, "o-1")
        assert bus.view_message("orders", "order-17") is None
        assert "not for you" not in repr(timeline(bus, "order-17").to_json())
        assert bus.admin.acts() == []
        revealed = bus.admin.transaction(receipt.transaction_id, bodies=True, why="ticket 4711")
        assert [message["body"] for message in revealed["messages"]] == [b"not for you"]
        (act,) = bus.admin.acts()
        assert (act["act"], act["why"]) == ("transactions.reveal", "ticket 4711")
        assert (act["what"], act["ended"]) == ({"id": str(receipt.transaction_id)}, {"messages": 1})
    broker.stop()
    with mq.connect(f"file:{broker.folder}", read_only=True) as bus:
        assert bus.admin.transaction(receipt.transaction_id)["messages"][0]["body"] is None
        with pytest.raises(mq.EscrowError):  # nothing could record it
            bus.admin.transaction(receipt.transaction_id, bodies=True)


@pytest.mark.invariant("I44")
def test_the_record_outlives_the_broker_and_what_is_read_without_one(own: Own) -> None:
    broker = own()
    with broker.connect() as bus:
        (one,) = prepared(bus, 1)
        bus.admin.commit(one, why="so")
    broker.restart(kill=True)
    with broker.connect() as bus:
        assert [act["why"] for act in bus.admin.acts()] == ["so"]
    broker.stop()
    with mq.connect(f"file:{broker.folder}", read_only=broker.log is not None) as bus:  # a mirror has no other way
        assert [act["number"] for act in bus.admin.acts(newest=True)] == [1]


def test_a_request_of_an_older_client_is_recorded_without_a_name(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, BrokerSettings())
    engine.start()
    act(engine, "producers.alter", {"group": "shop", "check_max": 3})
    assert act(engine, "acts.list", {})["acts"][0]["by"] is None
    engine.stop()


class Fillable(RealDisk):
    """A disk on which the journal of acts finds no place."""

    def open(self, name: str, *, create: bool = False) -> Any:
        if name == "acts.journal" and create:
            raise OSError(28, "No space left on device")
        return super().open(name, create=create)


@pytest.mark.invariant("I44")
def test_what_cannot_be_recorded_is_not_done(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, BrokerSettings(), Fillable)
    engine.start()
    with pytest.raises(mq.Overloaded) as refused:
        act(engine, "producers.alter", {"group": "shop", "check_max": 3})
    assert refused.value.code is Code.DISK_FULL
    assert act(engine, "producers.list", {})["producers"] == []
    engine.stop()


@pytest.mark.invariant("I44")
@pytest.mark.parametrize("step", ["acts.recorded", "acts.done"])
def test_killed_before_or_after_an_act_the_record_says_what_was_done(
    step: str, make_broker: Own, served_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, step)
    broker = make_broker(served_kind, check_interval=60.0, transaction_timeout=60.0)
    monkeypatch.delenv(VARIABLE)
    with broker.connect() as bus:
        (identity,) = prepared(bus, 1)
        broker.dies_of(lambda: Admin(bus.router, 2.0).commit(identity, why=step))
    broker.restart(kill=True)
    with broker.connect() as bus:
        (one,) = bus.admin.acts()
        assert bus.admin.transaction(identity)["state"] == ("open" if step == "acts.recorded" else "committed")
        told = "open" if step == "acts.recorded" else "committed by operator"
        assert one["ended"] == {"interrupted": True, "found": {"results": {told: 1}}}
        assert bus.admin.verify_acts()[0]["broken"] == []
