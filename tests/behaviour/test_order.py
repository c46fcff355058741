"""`ordered=True`: the effects of a key come in order, whatever fails, on both faces; other keys go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest

import escrowmq as mq


def put(bus: mq.Bus, g: str, t: str, names: str) -> None:
    """Messages of one queue, such as ``"a0 a1 b0"``: the letter is the key."""
    messages = [mq.Message(t, name.encode(), key=name[0], queue=0) for name in names.split()]
    bus.producer(f"{g}-p").send_batch(messages).check()


class Work:
    """What a handler does: the effect of each message, but a nack for those that fail the first time."""

    def __init__(self, *failing: str) -> None:
        self.failing = set(failing)
        self.effects: list[str] = []

    def fails(self, message: Any) -> bool:
        name = message.body.decode()
        if name in self.failing:
            self.failing.discard(name)
            return True
        self.effects.append(name)
        return False

    def of(self, key: str) -> list[str]:
        return [name for name in self.effects if name[0] == key]

    def through(self, consumer: mq.Consumer, messages: Iterable[mq.Received], count: int, delay: float = 0.1) -> None:
        """Until there are ``count`` effects."""
        for message in messages:
            if self.fails(message):
                message.nack(delay=delay)
            else:
                message.ack()
            if len(self.effects) >= count:
                break
        consumer.flush()


@pytest.mark.invariant("I20")
def test_after_a_nack_the_later_messages_of_its_key_wait_and_other_keys_go_on(bus, t, g):
    put(bus, g, t, "a0 a1 b0 a2 b1 a3 b2")
    work = Work("a1")
    with bus.consumer(g, [t], ordered=True) as consumer:
        work.through(consumer, consumer.messages(idle_timeout=60.0), 7)
        assert consumer.refused == 0
    assert work.effects == ["a0", "b0", "b1", "b2", "a1", "a2", "a3"]
    groups = {group["name"]: group for group in bus.admin.groups()}
    assert sum(queue["acked"] for queue in groups[g]["queues"]) == 7


@pytest.mark.invariant("I20")
def test_what_came_in_several_batches_waits_too(bus, t, g):
    put(bus, g, t, " ".join(f"a{n} b{n}" for n in range(10)))
    work = Work("a2", "b5", "a7")
    with bus.consumer(g, [t], ordered=True, max_bytes=1, prefetch=4) as consumer:
        work.through(consumer, consumer.messages(idle_timeout=60.0), 20)
        assert consumer.refused == 0
    assert work.of("a") == [f"a{n}" for n in range(10)]
    assert work.of("b") == [f"b{n}" for n in range(10)]


@pytest.mark.invariant("I20")
def test_a_batch_passes_over_what_waits_behind_a_nack(bus, t, g):
    put(bus, g, t, "a0 a1 b0 a2 b1 a3 b2")
    work = Work("a1", "b0")
    with bus.consumer(g, [t], ordered=True) as consumer:
        for batch in consumer.batches(3, idle_timeout=60.0):
            work.through(consumer, batch, 7)
            if len(work.effects) == 7:
                break
        assert consumer.refused == 0
    assert work.of("a") == ["a0", "a1", "a2", "a3"]
    assert work.of("b") == ["b0", "b1", "b2"]


def test_a_batch_that_is_given_back_comes_again_before_what_follows(bus, t, g):
    put(bus, g, t, " ".join(f"a{n} b{n} c{n}" for n in range(6)))
    found, failed = [], 0
    with bus.consumer(g, [t], ordered=True) as consumer:
        for batch in consumer.batches(4, idle_timeout=60.0):
            failed += 1
            if failed in (1, 2, 4):
                batch.nack(delay=0, wait=failed != 2)
                continue
            found += [message.body.decode() for message in batch]
            batch.ack()
            if len(found) == 18:
                break
    for key in "abc":
        assert [name for name in found if name[0] == key] == [f"{key}{n}" for n in range(6)]


@pytest.mark.invariant("I20")
def test_awaited_the_same(broker, t, g):
    async def run() -> list[str]:
        work = Work("a1", "b1")
        async with await broker.aconnect() as bus:
            producer = bus.producer(f"{g}-p")
            names = ["a0", "a1", "b0", "a2", "b1", "a3", "b2"]
            await producer.send_batch([mq.Message(t, n.encode(), key=n[0], queue=0) for n in names])
            async with await bus.consumer(g, [t], ordered=True) as consumer:
                async for message in consumer.messages(idle_timeout=60.0):
                    await (message.nack(delay=0.1) if work.fails(message) else message.ack())
                    if len(work.effects) == 7:
                        break
                await consumer.flush()
                assert consumer.refused == 0
        return work.effects

    effects = asyncio.run(run())
    assert [name for name in effects if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [name for name in effects if name[0] == "b"] == ["b0", "b1", "b2"]


def test_a_list_of_messages_tells_which_of_them_come_again(bus, t, g):
    put(bus, g, t, "a0 b0 a1 b1")
    with bus.consumer(g, [t], ordered=True) as consumer:
        messages = consumer.receive(10, wait=60)
        assert [message.withdrawn for message in messages] == [False] * 4
        messages[0].nack(delay=0)
        assert [message.withdrawn for message in messages] == [False, False, True, False]
        for message in messages[1:]:
            message.ack()
        assert consumer.flush() == 1, "the ack of what was withdrawn is refused"
        assert [message.body for message in consumer.receive(10, wait=60)] == [b"a0", b"a1"]


def test_a_dead_letter_lets_its_key_go_on(bus, t, g):
    put(bus, g, t, "a0 a1 a2")
    work = Work("a0")
    with bus.consumer(g, [t], ordered=True, max_attempts=1) as consumer:
        work.through(consumer, consumer.messages(idle_timeout=60.0), 2)
    assert work.effects == ["a1", "a2"]
    assert len(bus.admin.dead_letters(g)) == 1


@pytest.mark.invariant("I20")
def test_when_a_lease_has_ended_what_is_left_of_it_is_withdrawn(bus, t, g, eventually):
    put(bus, g, t, "a0 a1 a2 b0")
    with bus.consumer(g, [t], ordered=True, lease=0.3) as slow, bus.consumer(g, [t], ordered=True) as quick:
        messages = slow.receive(10, wait=60)
        found = []
        while len(found) < 4:  # once the lease of the slow one has ended
            for message in quick.receive(10, wait=60):
                found.append(message.body.decode())
                message.ack()
            quick.flush()
        eventually(lambda: [message.withdrawn for message in messages] == [True] * 4)  # its own clock is a little later
    assert [name for name in found if name[0] == "a"] == ["a0", "a1", "a2"]


def test_an_ack_that_comes_too_late_withdraws_what_follows_in_its_lease(bus, t, g):
    put(bus, g, t, "a0 a1 a2 b0")
    with bus.consumer(g, [t], ordered=True) as slow, bus.consumer(g, [t], ordered=True) as quick:
        messages = slow.receive(10, wait=60)
        messages[0].extend(0.2)
        slow._consumption.order.extend(0, [messages[0]._rows.handle(0)[0]], 600.0)  # its clock is slow, too
        (again,) = quick.receive(1, wait=60)
        assert again.body in (b"b0", b"a0"), "which of them depends on when it asks"
        messages[0].ack()
        assert slow.flush() == 1
        assert [message.withdrawn for message in messages[1:]] == [True] * 3


@pytest.mark.invariant("I20")
def test_several_consumers_of_a_group_keep_the_order_of_each_key(bus, t, g):
    keys, count = "abcde", 20
    put(bus, g, t, " ".join(f"{key}{n:02}" for n in range(count) for key in keys))
    effects: list[str] = []
    lock = threading.Lock()

    def run(number: int, consumer: mq.Consumer) -> None:
        with consumer:
            for message in consumer:
                name = message.body.decode()
                if (int(name[1:]) + number) % 7 == 0 and not message.redelivered:
                    message.nack()
                    continue
                message.ack()
                with lock:
                    effects.append(name)
                    if len(effects) == len(keys) * count:
                        for one in consumers:
                            one.stop()

    given: dict[str, Any] = {"ordered": True, "retry_backoff": 0.01, "max_attempts": 100}
    consumers = [bus.consumer(g, [t], **given) for _ in range(3)]
    threads = [threading.Thread(target=run, args=one) for one in enumerate(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key in keys:
        assert [name for name in effects if name[0] == key] == [f"{key}{n:02}" for n in range(count)]


def test_members_that_hold_what_is_in_doubt_keep_the_order_of_each_key_through_a_restart(own, t, g):
    """Nacks before and after the process is replaced and (served) the broker is killed."""
    broker = own()
    names = [f"{key}{n}" for n in range(6) for key in "ab"]
    options: dict[str, Any] = {"ordered": True, "in_doubt": "hold", "instance": "one", "retry_backoff": 0.05}
    work = Work("a1", "b3", "a4")
    with broker.connect() as bus:
        put(bus, g, t, " ".join(names))
        with bus.consumer(g, [t], **options) as consumer:
            work.through(consumer, consumer.messages(idle_timeout=60.0), 5)
    broker.restart(kill=broker.is_served)
    with broker.connect() as bus, bus.consumer(g, [t], **options) as consumer:
        work.through(consumer, consumer.messages(idle_timeout=60.0), 12)
    assert work.of("a") == [f"a{n}" for n in range(6)]
    assert work.of("b") == [f"b{n}" for n in range(6)]


def test_a_dead_consumer_leaves_each_key_in_order(broker, t, g):
    """It is gone without a word in the middle of its work; its lease ends by time."""
    names = [f"{key}{n}" for n in range(6) for key in "abc"]
    first, second = Work("b1"), Work("a3")
    gone = broker.connect()
    with broker.connect() as bus:
        put(gone, g, t, " ".join(names))
        consumer = gone.consumer(g, [t], ordered=True, lease=120.0)
        messages = consumer.messages()
        for _ in range(8):
            message = next(messages)
            (message.nack(delay=0.05) if first.fails(message) else message.ack())
        last = next(messages)
        consumer._consumption.give_back = lambda *_: None
        consumer.stop()
        last.extend(0.5)  # it and all that is left of its lease
        consumer.flush()  # and nothing is heard of it any more
        with bus.consumer(g, [t], ordered=True) as heir:
            second.through(heir, heir.messages(idle_timeout=60.0), 18 - len(first.effects))
    gone.close()
    for key in "abc":
        effects = first.of(key) + second.of(key)
        assert effects == [f"{key}{n}" for n in range(6)]


@pytest.mark.invariant("I20")
def test_a_broker_killed_again_and_again_keeps_the_order_of_each_key(make_broker, served_kind, t, g):
    """What was not acknowledged in time has its effect again; the first effects of a key come in order."""
    broker = make_broker(served_kind, lease_seconds=2.0)
    keys, count = "abc", 120
    effects: list[str] = []
    reached = [threading.Event() for _ in range(2)]

    def run(bus: mq.Bus, number: int) -> None:
        with bus.consumer(g, [t], ordered=True, retry_backoff=0.02, max_attempts=1000) as consumer:
            for message in consumer.messages(idle_timeout=120.0):
                name = message.body.decode()
                if not message.redelivered and int(name[1:]) % 9 == number:
                    message.nack()
                    continue
                effects.append(name)
                message.ack()
                for place, event in enumerate(reached):
                    if len(effects) > 120 * (place + 1):
                        event.set()
                if len(set(effects)) == len(keys) * count:
                    return

    with broker.connect() as bus:
        put(bus, g, t, " ".join(f"{key}{n:03}" for n in range(count) for key in keys))
        thread = threading.Thread(target=run, args=(bus, 4))
        thread.start()
        for event in reached:
            assert event.wait(60)
            broker.restart(kill=True)
        thread.join()
    for key in keys:
        first = list(dict.fromkeys(name for name in effects if name[0] == key))
        assert first == [f"{key}{n:03}" for n in range(count)]
