"""How everything stands: numbers of brokers, topics, groups and outboxes, and rates from one status to the next."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

import escrowmq as mq
from escrowmq.broker.embedded import open_embedded
from escrowmq.client.bus import Bus
from escrowmq.overview import standing, status
from escrowmq.settings import BrokerSettings

Open = Callable[..., mq.Bus]


def test_the_numbers_of_a_broker(opened: Open, shop: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "RATE_SECONDS", 600.0)
    bus = opened()
    bus.producer("shop").send_batch([mq.Message("orders", b"x" * 100) for _ in range(60)])
    with bus.consumer("cart", "orders") as consumer:
        consumer.receive(10, wait=60.0)
        now = status(bus, [shop])
        (group,) = now.groups
        assert (group.group, group.topic, group.lag, group.leased > 0, group.paused) == (
            "cart",
            "orders",
            60,
            True,
            False,
        )
    (broker,) = now.brokers
    assert (broker.status, broker.reason, broker.log_bytes_per_second) == ("ok", "", None)
    assert (broker.log_bytes or 0) > 6_000
    assert (broker.free_bytes or 0) > 0
    (topic,) = now.topics
    assert (topic.topic, topic.stored, topic.per_second) == ("orders", 60, 0.1)
    assert [one.group for one in now.producers] == ["shop"]
    assert [one.pending for one in now.databases] == [0]
    assert (now.needs_person, now.waiting, now.missing) == (False, (), ())
    assert json.loads(json.dumps(now.to_json()))["topics"][0]["topic"] == "orders"


def test_rates_since_the_status_before(opened: Open) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"")
    before = status(bus)
    bus.producer("shop").send_batch([mq.Message("orders", b"") for _ in range(30)])
    now = status(bus, before=replace(before, now_us=before.now_us - 10_000_000))
    (topic,) = now.topics
    assert topic.per_second is not None
    assert 0 < topic.per_second <= 3.0
    (broker,) = now.brokers
    assert (broker.log_bytes_per_second or 0) > 0
    begun_anew = replace(before, counted={name: {"log_bytes_total": 1e18} for name in before.counted})
    assert status(bus, before=begun_anew).brokers[0].log_bytes_per_second is None


def test_several_brokers_are_added_up(tmp_path: Path) -> None:
    links = [open_embedded(tmp_path / name, BrokerSettings(default_queues=1)) for name in "ab"]
    with Bus(links) as bus:
        for link in links:
            one = Bus([link])
            one.producer("shop").send("orders", b"")
            one.consumer("cart", "orders").close()
        now = status(bus)
    assert [(one.topic, one.stored) for one in now.topics] == [("orders", 2)]
    assert [(one.group, one.lag) for one in now.groups] == [("cart", 2)]
    assert len({one.shard for one in now.brokers}) == 2


def test_a_folder_without_a_broker(opened: Open, tmp_path: Path) -> None:
    bus = opened()
    bus.producer("shop").send("orders", b"")
    bus.close()
    with mq.connect(f"file:{tmp_path / 'data'}", read_only=True) as at_rest:
        now = status(at_rest)
    assert [(one.status, one.log_bytes) for one in now.brokers] == [("ok", None)]
    assert [one.stored for one in now.topics] == [1]
