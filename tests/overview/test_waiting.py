"""What waits: every cause is produced for real, with how many, since when, samples, and what a plan can do."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import escrowmq as mq
from damaging import FILLER, flip
from escrowmq import outbox
from escrowmq.broker.embedded import open_embedded
from escrowmq.client.bus import Bus
from escrowmq.client.links.answers import Listing
from escrowmq.client.links.link import ServedLink
from escrowmq.compensation.cases import Cases
from escrowmq.compensation.journal import Journal
from escrowmq.errors import Code
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.tables import State, trans_driven, trans_message, trans_relay
from escrowmq.overview import Cause, status, waiting
from escrowmq.overview.waits import brokers, databases, grouping
from escrowmq.overview.waits.grouping import mask
from escrowmq.settings import BrokerSettings
from escrowmq.testing.memory_target import MemoryTarget
from escrowmq.wire.addresses import Address
from escrowmq_lab.servers.process import free_port

Open = Callable[..., mq.Bus]
Until = Callable[[Callable[[], Any]], Any]
NEVER = 600.0


def the_one(bus: mq.Bus, *engines: sa.Engine, lag_seconds: float = NEVER) -> Cause:
    causes = waiting(bus, engines, lag_seconds=lag_seconds)
    assert causes.missing == []
    (cause,) = causes
    assert json.dumps(cause.to_json())
    assert cause.oldest_us is None or cause.oldest_us > 0
    return cause


def short(cause: Cause) -> tuple[str, str, int, bool]:
    return cause.kind, cause.of, cause.count, cause.needs_person


def test_nothing_waits(opened: Open, shop: sa.Engine) -> None:
    assert waiting(opened(), [shop]) == []


# Brokers


def test_parked_and_undecided_transactions(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.01, check_interval=0.01, check_max=1)
    producer = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
    ids = [producer.prepare("orders", b"").transaction_id for _ in range(2)]
    until(lambda: len(bus.admin.transactions("parked")) == 2)
    cause = the_one(bus)
    assert short(cause) == ("parked", "shop", 2, True)
    assert cause.cause == "the last check was without a decision"
    assert {sample["id"] for sample in cause.samples} == {str(one) for one in ids}
    assert cause.selection == {"group": "shop", "state": "parked", "cause": "asked_out"}
    assert cause.acts == ("transactions.commit", "transactions.rollback", "transactions.recheck")
    for identity in ids:
        bus.admin.rollback(identity)
    bus.producer("away", unasked=True).prepare("orders", b"")
    until(lambda: waiting(bus))
    cause = the_one(bus)
    assert short(cause) == ("undecided", "away", 1, True)
    assert cause.cause == "a check is due; no process of the group is connected"
    assert cause.selection == {"group": "away", "state": "open", "cause": "due"}


def test_undecided_ones_that_are_asked_need_nobody(opened: Open, until: Until) -> None:
    bus = opened(transaction_timeout=0.01, check_interval=NEVER)
    bus.producer("shop", checker=lambda _: mq.UNKNOWN).prepare("orders", b"")
    until(lambda: [one for one in waiting(bus) if "checked" in one.cause])
    assert short(the_one(bus)) == ("undecided", "shop", 1, False)


def test_dead_letters_by_their_cause(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"", key=f"k{n}") for n in range(7)])
    with bus.consumer("cart", "orders", max_attempts=1) as consumer:
        for number, message in enumerate(consumer.receive(7, wait=60.0)):
            message.nack(cause=f"ValueError: order {number} is bad" if number < 4 else "TimeoutError\nat line 3")
        consumer.flush()
    first, second = waiting(bus)
    assert short(first) == ("dead", "cart", 4, True)
    assert short(second) == ("dead", "cart", 3, True)
    assert first.cause.startswith("ValueError: order # is bad")
    assert second.cause.startswith("TimeoutError")
    assert first.samples[0]["place"] == "orders/0/0"
    assert first.acts == ("dead_letters.retry", "dead_letters.discard")
    assert first.selection == {"group": "cart", "cause": first.cause}
    monkeypatch.setattr(brokers, "MOST_GROUPS", 1)
    first, others = waiting(bus)
    assert (others.count, others.cause, others.selection, others.acts) == (3, "1 other causes", {}, ())


@pytest.mark.parametrize(
    "kind", ["there is no consumer", "without a result yet", "failed and are delivered again", "are behind"]
)
def test_groups_that_lag(opened: Open, until: Until, kind: str) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(2)])
    with bus.consumer("cart", "orders", prefetch=1) as consumer:
        taken = consumer.receive(1 if kind == "are behind" else 2, wait=60.0)
        if kind in ("there is no consumer", "failed and are delivered again"):
            for message in taken:
                message.nack()
            consumer.flush()
        if kind == "failed and are delivered again":

            def receive() -> None:
                with contextlib.suppress(Exception):  # it is closed meanwhile
                    consumer.receive(1, wait=60.0)

            threading.Thread(target=receive, daemon=True).start()
            until(lambda: status(bus).groups[0].receiving)
        cause = the_one(bus, lag_seconds=0.0)
    assert (cause.kind, cause.of, cause.count) == ("lagging", "cart", 2)
    assert cause.needs_person == (kind == "there is no consumer")
    assert kind in cause.sentence
    assert waiting(bus, lag_seconds=NEVER) == []


def test_a_group_that_is_paused(opened: Open, until: Until) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"")
    bus.consumer("cart", "orders").close()
    bus.admin.pause_group("cart")
    until(lambda: waiting(bus, lag_seconds=0.0))
    cause = the_one(bus, lag_seconds=0.0)
    assert (cause.cause, cause.needs_person) == ("the group is paused", True)
    assert status(bus).groups[0].paused


def test_a_group_with_limits(opened: Open, until: Until) -> None:
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"")] * 3)
    with bus.consumer("cart", "orders") as consumer:
        bus.admin.limit_group("cart", in_flight=1)
        assert len(consumer.receive(3, wait=60.0)) == 1
        until(lambda: waiting(bus, lag_seconds=0.0))
        cause = the_one(bus, lag_seconds=0.0)
        assert (cause.cause, cause.needs_person) == ("its consumers are behind, and the group has limits", False)
        assert status(bus).groups[0].limited


def test_a_broker_that_is_away_full_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BrokerSettings(segment_bytes=1 << 12, default_queues=1)
    with Bus([open_embedded(tmp_path / "data", settings)]) as bus:
        bus.producer("shop").send("orders", b"its body is lost")
        bus.producer("shop").send("filler", FILLER * 5)
    flip(tmp_path / "data", b"its body is lost")
    there = open_embedded(tmp_path / "data", settings)
    with Bus([there]) as bus:
        bus.admin.read("orders", columns=["offset"]).read_all()
        bus.admin.lookup(key="k")
        (cause,) = waiting(bus)
        assert short(cause)[0] == "damaged"
        assert (cause.count, cause.unit, cause.needs_person) == (1, "frame", True)
    away = ServedLink([Address("127.0.0.1", free_port())], stays=True)
    there = open_embedded(tmp_path / "data", settings)
    with Bus([there, away]) as bus:
        causes = waiting(bus)
        assert [cause.kind for cause in causes] == ["broker", "damaged"]
        assert [one["broker"] for one in causes.missing] == [away.address]
        now = status(bus)
        assert [one.status for one in now.brokers] == ["damaged", "unreachable"]
        assert now.needs_person
        full = {"status": "full", "reason": "DISK_FULL: messages are refused", "broker": there.address}
        monkeypatch.setattr(type(bus.admin), "health", lambda self: Listing([full]))
        assert ("disk", True) in [(cause.kind, cause.needs_person) for cause in waiting(bus)]


# Databases


def write(engine: sa.Engine, key: str | None = None, count: int = 1) -> None:
    with engine.begin() as connection:
        for _ in range(count):
            outbox.send_tx(connection, "orders", b"body", key=key)


def test_rows_that_nobody_sends(opened: Open, shop: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "LATE_SECONDS", NEVER)
    bus = opened()
    write(shop, count=3)
    assert waiting(bus, [shop]) == []  # they are young
    with shop.begin() as connection:
        connection.execute(sa.update(trans_message).values(created_us=1))
    cause = the_one(bus, shop)
    assert short(cause) == ("outbox", "outbox", 3, True)
    assert cause.cause == "no relay is running"
    with shop.begin() as connection:
        connection.execute(
            sa.insert(trans_relay), [{"owner": f"r-{number}", "alive_until_us": 1 << 60} for number in range(2)]
        )
    assert short(the_one(bus, shop)) == ("outbox", "outbox", 3, False)
    (stands,) = status(bus, [shop]).databases
    assert (stands.pending, stands.relays) == (3, 1)
    assert stands.lag_seconds > 1e6


def test_rows_that_are_refused_and_what_they_hold(opened: Open, shop: sa.Engine) -> None:
    bus, target = opened(), MemoryTarget()
    target.answer = lambda taken: Code.BODY_TOO_LARGE if taken.key == "k" else Code.BAD_DELAY
    write(shop, "k", 3)
    write(shop)
    Relay(shop, target, redeliveries=1, redelivery_interval=NEVER).drain(60.0)
    found = {(cause.kind, cause.cause.partition(":")[0]): short(cause)[2:] for cause in waiting(bus, [shop])}
    assert found == {
        ("outbox", "BODY_TOO_LARGE"): (1, False),
        ("outbox", "BAD_DELAY"): (1, False),
        ("held", "behind an earlier row of the same key"): (2, False),
    }
    with shop.begin() as connection:
        connection.execute(
            sa.update(trans_message)
            .where(trans_message.c.state == State.RETRYING.value)
            .values(state=State.WAITING.value)
        )
    causes = [cause for cause in waiting(bus, [shop]) if cause.needs_person]
    assert sorted(cause.count for cause in causes) == [1, 1]
    assert causes[0].acts == ("outbox.retry", "outbox.discard", "outbox.settle")
    assert causes[0].selection["state"] == "waiting"


def test_stuck_and_unfinished_transactions_of_producers(
    opened: Open, shop: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "LATE_SECONDS", NEVER)
    now_us = time.time_ns() // 1000
    rows = [
        {"id": bytes([n]) * 16, "producer_group": "shop", "state": stage.value, "topic": "orders", "body": b"",
        "delay_us": 0, "attempts": 1, "created_us": since_us}
        for n, (stage, since_us) in enumerate(((Stage.STUCK, now_us), (Stage.COMMITTING, 1), (Stage.COMMITTING,
        now_us)))
    ]  # fmt: skip
    with shop.begin() as connection:
        connection.execute(sa.insert(trans_driven), rows)
    stuck, unfinished = waiting(opened(), [shop])
    assert (short(stuck), stuck.acts) == (("stuck", "shop", 1, True), ("stuck.settle",))
    assert short(unfinished) == ("unfinished", "shop", 1, False)


def test_compensations(opened: Open, shop: sa.Engine) -> None:
    bus = opened()
    cases = Cases(shop, "cart", 1)
    cases.record_failures({bytes([n]) * 16: f"order {n} was found nowhere" for n in range(3)})
    cases.record_conflicts({b"c" * 16: "it was rolled back"})
    stuck, conflict = waiting(bus, [shop])
    assert (short(stuck), stuck.cause) == (("case", "cart", 3, True), "order # was found nowhere")
    assert (short(conflict), conflict.selection["state"]) == (("case", "cart", 1, True), "conflict")
    Journal(shop, "other").begin(None, "the store was emptied")
    assert next(cause.sentence for cause in waiting(bus, [shop]) if cause.kind == "suspended").startswith(
        "Compensation other has been suspended "
    )


def test_a_database_that_cannot_be_read_is_a_cause(opened: Open, tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    causes = waiting(opened(), [engine])
    assert [(cause.kind, cause.needs_person) for cause in causes] == [("database", True)]
    assert [one["broker"] for one in causes.missing] == [str(engine.url)]


# Grouping


def test_causes_without_what_differs() -> None:
    assert mask("order 17 of 5b2983c607040ef300c3e05ffe11d807 failed\nat line 3") == "order # of # failed"
    assert mask("id 123e4567-e89b-12d3-a456-426614174000") == "id #"
    assert mask(None) == mask(" \n") == "no reason was given"
    assert mask("\x1b[31mred") == r"\x#b[#mred"
    assert len(mask("x" * 10_000)) == 300


def test_only_so_many_causes_are_told_apart() -> None:
    grouped: grouping.Grouped[str] = grouping.Grouped(lambda _: grouping.OTHERS)
    for number in range(grouping.MOST_GROUPS + 10):
        for _ in range(7):
            grouped.of(f"cause {number}").add(number, {"n": number})
    assert len(grouped) == grouping.MOST_GROUPS + 1
    assert grouped[grouping.OTHERS].count == 70
    assert all(len(one.samples) <= grouping.MOST_SAMPLES for one in grouped.values())
