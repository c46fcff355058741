"""``view_message``: one message of a topic by id or key, prepared, committed or plain (systems.md 2.1, 2.2)."""

from __future__ import annotations

import uuid

import pytest

import escrowmq as mq
from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Misuse, Overloaded, Rejected


def unknown(check):
    return mq.UNKNOWN


def test_a_message_is_seen_by_its_id_from_prepare_to_commit(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    txn = producer.transaction()
    with txn:
        receipt = txn.send(t, b"\x00body", key="k", tag="paid", properties={"a": "1"})
        half = bus.view_message(t, receipt.message_id)
        assert (half.state, half.visible, half.offset) == ("open", False, None)
        assert (half.topic, half.body, half.key, half.tag, dict(half.properties)) == (
            t,
            b"\x00body",
            "k",
            "paid",
            {"a": "1"},
        )
        assert half.transaction_id == receipt.transaction_id
        assert half.position == receipt.position
        assert bus.view_message(t, "k") == bus.view_message(t, receipt.message_id.hex()) == half
        assert bus.view_message(t, uuid.UUID(bytes=receipt.message_id)) == half
        assert bus.view_message(f"{t}-other", receipt.message_id) is None
    seen = bus.view_message(t, receipt.message_id)
    assert (seen.state, seen.visible, seen.offset is not None) == ("committed", True, True)


def test_what_was_undone_is_found_by_nobody_but_an_operator(bus, t, g):
    producer = bus.producer(g, checker=unknown)
    plain = bus.producer(f"{g}-plain").send(t, b"plain", key="k", message_id="order-17")
    undone = producer.prepare(t, b"undone", key="k")
    assert bus.view_message(t, "k").body == b"undone"
    producer.rollback(undone.transaction_id)
    assert bus.view_message(t, undone.message_id) is None
    assert [row["state"] for row in bus.admin.lookup(message_id=undone.message_id)] == ["rolled_back"]
    newest = bus.view_message(t, "k")
    assert (newest.body, newest.state, newest.transaction_id, newest.visible) == (b"plain", "plain", None, True)
    assert bus.view_message(t, "order-17") == newest  # the text that its id was made of
    assert newest.message_id == plain.message_id
    assert bus.view_message(t, "nothing") is None


def test_of_one_key_the_newest_in_that_topic_however_many_there_are(bus, t, g):
    producer = bus.producer(g)
    producer.send_batch([mq.Message(t, str(n).encode(), key="often") for n in range(3000)])
    producer.send_batch([mq.Message(f"{t}-2", b"there", key="often")])
    assert bus.view_message(f"{t}-2", "often").body == b"there"
    assert bus.view_message(t, "often").body == b"2999"
    found = bus.admin.lookup(key="often", topic=t, limit=5)
    assert [row["body"] for row in found] == [b"2999", b"2998", b"2997", b"2996", b"2995"]


def test_what_cannot_be_a_question_is_refused(bus, t):
    with pytest.raises(Misuse):
        bus.view_message(t, "")
    with pytest.raises(Rejected) as refused:
        bus.view_message("a bad/name", "k")
    assert refused.value.code is Code.BAD_TOPIC_NAME


async def test_the_same_to_await_and_after_a_restart(own, t, g):
    broker = own()
    async with await broker.aconnect() as bus:
        producer = bus.producer(g)
        receipt = await producer.send(t, b"x", key="k")
        seen = await bus.view_message(t, receipt.message_id)
    broker.restart(kill=True)
    async with await broker.aconnect() as bus:
        again = await bus.view_message(t, "k")
        assert (again.body, again.message_id, again.position) == (seen.body, receipt.message_id, seen.position)


class _Away:
    """A link to a broker that is not there."""

    def __init__(self, link, address):
        self._link, self.address = link, address

    def __getattr__(self, name):
        return getattr(self._link, name)

    def action(self, name, request, timeout):
        raise mq.Unknown(Code.DISCONNECTED, "nobody is there")


def test_of_several_brokers_all_are_asked_and_one_that_is_away_is_no_answer(tmp_path):
    with mq.connect(f"file:{tmp_path}/a") as one, mq.connect(f"file:{tmp_path}/b") as other:
        links = [one.router.links[0], other.router.links[0]]
        one.producer("p").send("t", b"older", key="k")
        other.producer("p").send("t", b"newer", key="k", message_id="at-b")
        both = Bus(links)
        assert both.view_message("t", "k").body == b"newer"
        assert both.view_message("t", "at-b").broker == links[1].address
        half = Bus([links[0], _Away(links[1], "escrow://b:1")])
        assert half.view_message("t", "k", timeout=60).body == b"older"
        with pytest.raises(Overloaded) as refused:
            half.view_message("t", "at-b", timeout=60)
        assert refused.value.code is Code.BROKER_AWAY
        assert "escrow://b:1" in refused.value.message
