"""Dead letters for the tests of plans."""

from __future__ import annotations

from collections.abc import Sequence

import escrowmq as mq


def die(
    bus: mq.Bus, count: int, causes: Sequence[str] = ("timeout",), *, group: str = "cart", topic: str = "orders"
) -> None:
    """Messages ``0 .. count``-1 of a topic (their bodies) die for a group, by turns of these causes."""
    producer = bus.producer("shop")
    for first in range(0, count, 5000):
        numbers = range(first, min(first + 5000, count))
        producer.send_batch([mq.Message(topic, b"%d" % number, key=f"k{number}") for number in numbers])
    fail(bus, count, causes, group=group, topic=topic)


def fail(
    bus: mq.Bus, count: int, causes: Sequence[str] = ("timeout",), *, group: str = "cart", topic: str = "orders"
) -> list[int]:
    """Whatever a group gets fails, until that were so many messages; their bodies."""
    found: list[int] = []
    with bus.consumer(group, topic, max_attempts=1, lease=600.0) as consumer:
        while len(found) < count:
            for message in consumer.receive(5000, wait=60.0):
                number = int(message.body)
                message.nack(0.0, causes[number % len(causes)])
                found.append(number)
        consumer.flush()
    return found
