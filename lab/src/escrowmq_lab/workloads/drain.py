"""Append and drain: producers write plain and transactional messages, consumers of two groups read all of them. Early
read: the same with long transactions, delays, and consumers that try to read invisible messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Event
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload
from escrowmq_lab.workloads.writing import Writer

TOPICS = ["orders", "points"]
ENDS = ("commit", "rollback", "silent commit", "silent rollback", "never", "twice", "against")
WEIGHTS = (50, 15, 8, 8, 5, 8, 6)


def write(site: Site, plan: Iterable[Operation]) -> None:
    """Run a producer of both kinds."""
    Writer(site).work(plan)


def transaction(name: str, chance: Random, **details: Any) -> Operation:
    """Return a transaction over one topic or both, with any end."""
    topics = [chance.choice(TOPICS) for _ in range(chance.choice((1, 1, 2, 3)))]
    messages: list[Any] = [(topic, chance.choice((None, "a", "b")), {}) for topic in topics]
    end = chance.choices(ENDS, WEIGHTS)[0]
    return Operation("transact", name, chance.random() * 0.3, {"messages": messages, "end": end, **details})


class AppendAndDrain(Workload):
    """See the module."""

    name = "append and drain"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two writers, a shared group and an ordered one."""
        careless = chance.choice((0.0, 0.1, 0.3))

        def share(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "cart", ["orders"], careless=careless).work()

        def order(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "ledger", TOPICS, ordered=True, careless=careless, one_by_one=True).work()

        return [
            *(Role(f"w{n}", write, [any_operation(f"w{n}-{i}", chance) for i in range(size)]) for n in range(2)),
            Role("cart-1", share, drains=True),
            Role("cart-2", share, drains=True),
            Role("ledger-1", order, drains=True),
        ]

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Check that messages sent in order are stored and delivered in order."""
        return [*super().check(events), *promises.disordered(events, {"ledger"}), *promises.early(events)]


def any_operation(name: str, chance: Random) -> Operation:
    """Return a plain message, several, or a transaction."""
    draw, after = chance.random(), chance.random() * 0.3
    topic = chance.choice(TOPICS)
    if draw < 0.35:
        key = chance.choice((None, "a", "b"))
        options: dict[str, Any] = {"key": key, "size": chance.choice((20, 40, 3000))}
        if chance.random() < 0.1:
            options |= {"key": None, "delay": chance.random() * 3}
        return Operation("send", name, after, {"topic": topic, "options": options})
    if draw < 0.42:
        return Operation(
            "together",
            name,
            after,
            {"operations": [_one(f"{name}-{n}", chance) for n in range(chance.choice((4, 12)))]},
        )
    if draw < 0.5:
        count = chance.choice((1, 3, 40, 300))
        keys = [chance.choice((None, "a", "b")) for _ in range(count)]
        return Operation("send many", name, after, {"topic": topic, "keys": keys})
    return transaction(name, chance)


def _one(name: str, chance: Random) -> Operation:
    """Return a small concurrent operation; with its own key, because concurrent operations have no order."""
    if chance.random() < 0.4:
        return transaction(name, chance)
    options = {"key": chance.choice((None, name)), "tag": chance.choice((None, "t")), "size": chance.choice((20, 60))}
    return Operation("send", name, 0.0, {"topic": chance.choice(TOPICS), "options": options})


class EarlyRead(Workload):
    """See the module."""

    name = "early read"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two slow writers and one eager consumer."""

        def eager(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "eager", TOPICS, careless=0.0).work()

        def plan(writer: str) -> list[Operation]:
            return [transaction(f"{writer}-{i}", chance, thinks=chance.random() * 2) for i in range(size // 2)]

        return [Role("w0", write, plan("w0")), Role("w1", write, plan("w1")), Role("eager-1", eager, drains=True)]
