"""Transactions that are ended by the message id that their producer chose; systems.md 1.16."""

from __future__ import annotations

import pytest

import escrowmq as mq
from escrowmq.errors import Code, Misuse, Rejected


@pytest.fixture
def shop(bus, g):
    return bus.producer(g, checker=lambda check: mq.UNKNOWN)


def state(bus, receipt):
    return bus.admin.transaction(receipt.transaction_id)["state"]


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_producer_ends_by_its_own_id(bus, shop, t, g, outcome):
    half = shop.prepare(t, b"paid", message_id=f"{g}-17")
    other = shop.prepare(t, b"open", message_id=f"{g}-18")
    first, again, state_then = {
        "commit": (Code.COMMITTED, Code.ALREADY_COMMITTED, "committed"),
        "rollback": (Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK, "rolled_back"),
    }[outcome]
    end = getattr(shop, outcome)
    assert end(f"{g}-17") is first
    assert end(f"{g}-17") is again
    assert (state(bus, half), state(bus, other)) == (state_then, "open")


def test_end_takes_it_too_and_the_other_outcome_is_a_conflict(bus, shop, t, g):
    shop.prepare(t, b"", message_id=f"{g}-17")
    assert shop.end(f"{g}-17", mq.COMMIT) is Code.COMMITTED
    with pytest.raises(Rejected, match="CONFLICT"):
        shop.rollback(f"{g}-17")


def test_an_id_of_nobody_and_of_another_group_is_unknown(bus, shop, t, g):
    half = shop.prepare(t, b"", message_id=f"{g}-17")
    bus.producer(f"{g}-plain").send(t, b"", message_id=f"{g}-plain")
    stranger = bus.producer(f"{g}-other", checker=lambda check: mq.UNKNOWN)
    for producer, text in ((shop, f"{g}-99"), (shop, f"{g}-plain"), (stranger, f"{g}-17")):
        with pytest.raises(Rejected, match="UNKNOWN_TRANSACTION") as caught:
            producer.commit(text)
        assert text in caught.value.message
    assert state(bus, half) == "open"


def test_an_id_of_several_transactions_is_refused_and_they_are_named(bus, shop, t, g):
    halves = [shop.prepare(topic, b"", message_id=f"{g}-17") for topic in (t, f"{t}-2")]
    with pytest.raises(Misuse, match="BAD_ARGUMENT") as caught:
        shop.commit(f"{g}-17")
    for half in halves:
        assert str(half.transaction_id) in caught.value.message
        assert state(bus, half) == "open"
    shop.commit(halves[0].transaction_id)
    assert shop.rollback(f"{g}-17") is Code.ROLLED_BACK, "one of them is undecided"
    assert [state(bus, half) for half in halves] == ["committed", "rolled_back"]


def test_several_messages_of_one_transaction_are_no_doubt(bus, shop, t, g):
    with shop.transaction() as txn:
        txn.send(t, b"one", message_id=f"{g}-1")
        txn.send(f"{t}-2", b"two", message_id=f"{g}-1")
    assert shop.commit(f"{g}-1") is Code.ALREADY_COMMITTED


def test_an_operator_ends_by_it(bus, shop, t, g):
    halves = [shop.prepare(t, b"", message_id=f"{g}-{number}") for number in range(3)]
    assert bus.admin.commit(f"{g}-0", group=g) is Code.COMMITTED
    assert bus.admin.rollback(f"{g}-1") is Code.ROLLED_BACK
    with pytest.raises(Rejected, match="UNKNOWN_TRANSACTION"):
        bus.admin.commit(f"{g}-2", group=f"{g}-other")
    assert [state(bus, half) for half in halves] == ["committed", "rolled_back", "open"]


async def test_it_is_awaited_too(broker, t, g):
    async with await broker.aconnect() as bus:
        shop = bus.producer(g, checker=lambda check: mq.UNKNOWN)
        await shop.prepare(t, b"", message_id=f"{g}-17")
        assert await shop.commit(f"{g}-17") is Code.COMMITTED
