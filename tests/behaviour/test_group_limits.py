"""Limits of a consumer group, which operators set: messages per second, in flight, in flight per key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import escrowmq as mq
from escrowmq.errors import Code

Own = Callable[..., Any]
Eventually = Callable[..., Any]


def sent(bus: mq.Bus, topic: str, keys: str) -> None:
    """Send one message for each letter, which is its key, and "-" for none. Its body is its number."""
    producer = bus.producer(f"to-{topic}")
    rows = [mq.Message(topic, b"%d" % n, key=None if key == "-" else key) for n, key in enumerate(keys)]
    producer.send_batch(rows)


def taken(consumer: mq.Consumer, most: int = 100, wait: float = 60.0) -> list[Any]:
    return consumer.receive(most, wait=wait)


@contextmanager
def receiving(bus: mq.Bus, consumer: mq.Consumer, g: str, eventually: Eventually) -> Iterator[list[Any]]:
    """A receive that waits at the broker while the block begins, and ends with messages."""
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(taken(consumer, wait=600.0)))
    waiting.start()
    eventually(lambda: stands(bus, g)["receiving"])
    assert not found
    yield found
    waiting.join()


def stands(bus: mq.Bus, group: str) -> Any:
    return next(one for one in bus.admin.standing()[0]["consumers"] if one["group"] == group)


def limits_of(bus: mq.Bus, group: str) -> list[Any]:
    return [one["limits"] for one in bus.admin.groups() if one["name"] == group]


@pytest.mark.invariant("I23")
def test_a_rate_spreads_messages_over_time_and_loses_none(bus: mq.Bus, t: str, g: str) -> None:
    with bus.consumer(g, t) as one, bus.consumer(g, t) as other:
        (limited,) = bus.admin.limit_group(g, rate=100, why="the mail provider")
        assert limited == {"rate": 100.0, "leased": 0, "broker": limited["broker"]}
        sent(bus, t, "-" * 100)
        began, found = time.monotonic(), []
        while len(found) < 100:
            one, other = other, one
            found += taken(one)
        assert time.monotonic() - began > 0.5, "a burst of 31, then 100 a second"
    assert sorted(int(message.body) for message in found) == list(range(100))
    act = bus.admin.acts(newest=True)[-1]
    assert (act["act"], act["why"], act["ended"]) == ("groups.limit", "the mail provider", {"leased": 0, "rate": 100.0})


def test_a_waiting_receive_gets_a_message_when_another_consumer_acknowledges(
    bus: mq.Bus, t: str, g: str, eventually: Eventually
) -> None:
    with bus.consumer(g, t) as one, bus.consumer(g, t) as two:
        bus.admin.limit_group(g, in_flight=2)
        sent(bus, t, "-" * 4)
        held = taken(one, 1) + taken(one, 1)
        assert taken(two, wait=0.0) == []
        with receiving(bus, two, g, eventually) as found:
            assert stands(bus, g)["limited"]
            assert stands(bus, g)["leased"] == 2
            held[0].ack()
        assert len(found) == 1
        with receiving(bus, two, g, eventually) as found:
            held[1].nack(delay=0.0)
        assert len(found) == 1


def test_a_lease_that_ends_by_time_makes_room(bus: mq.Bus, t: str, g: str, eventually: Eventually) -> None:
    with bus.consumer(g, t, lease=0.3) as one, bus.consumer(g, t) as two:
        bus.admin.limit_group(g, in_flight=1)
        sent(bus, t, "--")
        assert len(taken(one)) == 1
        found = taken(two, wait=600.0)
        assert len(found) == 1


def test_new_limits_apply_at_once_to_receives_that_wait(bus: mq.Bus, t: str, g: str, eventually: Eventually) -> None:
    with bus.consumer(g, t) as one, bus.consumer(g, t) as two:
        bus.admin.limit_group(g, in_flight=1, rate=0.001)
        sent(bus, t, "-" * 5)
        assert len(taken(one)) == 1
        with receiving(bus, two, g, eventually) as found:
            bus.admin.limit_group(g, in_flight=3)
        assert len(found) == 2
        assert limits_of(bus, g) == [{"in_flight": 3}]
        with receiving(bus, two, g, eventually) as found:
            bus.admin.limit_group(g)
        assert len(found) == 2
        assert limits_of(bus, g) == [{}]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_key_in_flight_delays_only_itself(bus: mq.Bus, t: str, g: str, ordered: bool, eventually: Eventually) -> None:
    bus.admin.create_topic(t, 1)
    with bus.consumer(g, t, ordered=ordered) as one, bus.consumer(g, t, ordered=ordered) as two:
        bus.admin.limit_group(g, in_flight_per_key=1)
        sent(bus, t, "--aabac")
        first = {int(message.body): message for message in taken(one)}
        assert sorted(first) == ([0, 1, 2] if ordered else [0, 1, 2, 4, 6]), "messages without a key have no such limit"
        with receiving(bus, two, g, eventually) as found:
            for message in first.values():
                message.ack()
        assert int(found[0].body) == 3


def test_refusals_change_nothing(bus: mq.Bus, t: str, g: str) -> None:
    bus.consumer(g, t).close()
    bus.admin.limit_group(g, rate=2.5)
    rates = [{"rate": rate} for rate in (0.0, -1.0, float("inf"), float("nan"), "fast", True)]
    for wrong in (*rates, {"in_flight": 0}, {"in_flight": "few"}, {"in_flight_per_key": 0}, {"in_flight_per_key": 1.5}):
        with pytest.raises(mq.EscrowError) as refused:
            bus.admin.limit_group(g, **wrong)
        assert refused.value.code in (Code.BAD_REQUEST, Code.BAD_ARGUMENT)
    assert limits_of(bus, g) == [{"rate": 2.5}]
    with pytest.raises(mq.Rejected) as unknown:
        bus.admin.limit_group("nobody", rate=1)
    assert unknown.value.code is Code.UNKNOWN_GROUP


async def test_limits_to_await(broker: Any, t: str, g: str) -> None:
    async with await broker.aconnect() as bus:
        await bus.consumer(g, t)
        (limited,) = await bus.admin.limit_group(g, in_flight=7)
        assert (limited["in_flight"], limited["leased"]) == (7, 0)


@pytest.mark.parametrize("kill", [False, True])
def test_limits_and_what_is_in_flight_survive_a_restart(own: Own, t: str, g: str, kill: bool) -> None:
    broker = own()
    with broker.connect() as bus:
        bus.admin.create_topic(t, 1)
        sent(bus, t, "aabb-")
        with bus.consumer(g, t, lease=600.0) as consumer:
            bus.admin.limit_group(g, in_flight=4, in_flight_per_key=1)
            assert [int(message.body) for message in taken(consumer)] == [0, 2, 4]
            broker.restart(kill=kill) if broker.is_served else None
    if not broker.is_served:
        return
    with broker.connect() as bus:
        assert limits_of(bus, g) == [{"in_flight": 4, "in_flight_per_key": 1}]
        with bus.consumer(g, t) as consumer:
            assert taken(consumer, wait=0.2) == [], "their keys are in flight"
            bus.admin.limit_group(g, in_flight=4)
            assert [int(message.body) for message in taken(consumer)] == [1]


def test_each_of_two_brokers_enforces_its_share(make_broker: Own, served_kind: str, t: str, g: str) -> None:
    one, two = make_broker(served_kind), make_broker(served_kind)
    with one.connect() as first:
        first.admin.create_topic(t, 1)
        first.consumer(g, t).close()
    with mq.connect(f"{one.url},{two.address}") as both:
        both.admin.create_topic(t, 1, may_exist=True)
        shares = both.admin.limit_group(g, rate=50, in_flight=5, in_flight_per_key=2)
        assert [(x["rate"], x["in_flight"], x["in_flight_per_key"]) for x in shares] == [(25.0, 2, 2), (25.0, 3, 2)]
        sent(both, t, "-" * 40)
        with both.consumer(g, t) as consumer:
            found = [message for _ in range(4) for message in taken(consumer, wait=1.0)]
            assert len(found) <= 5
        with pytest.raises(mq.Misuse):
            both.admin.limit_group(g, in_flight=1)
    two.stop(kill=True)
    with mq.connect(f"{one.url},{two.address}") as both:
        found = both.admin.limit_group(g, in_flight=8)
        assert [(done["broker"], done["in_flight"]) for done in found] == [(one.url, 4)]
        assert [away["broker"] for away in found.missing] == [two.url]
