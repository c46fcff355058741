"""Copying of a topic: a program reads it and sends each message on under the same id, while processes are killed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from escrowmq.errors import EscrowError
from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Act, Event, Kind, payload
from escrowmq_lab.workloads.drain import write
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload


class CopyTopic(Workload):
    """See the module."""

    name = "copy"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return a writer, two copiers that share the work, and one reader of the copies."""

        def read(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "copies", ["to"], careless=0.1).work()

        def operation(number: int) -> Operation:
            options = {"key": chance.choice((None, "a", "b"))}
            return Operation("send", f"w-{number}", chance.random() * 0.2, {"topic": "from", "options": options})

        plan = [operation(number) for number in range(size)]
        return [
            Role("w", write, plan),
            Role("copier-1", _copy, drains=True),
            Role("copier-2", _copy, drains=True),
            Role("copies-1", read, drains=True),
        ]

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Check that every message in the source topic is in the target topic, once."""
        return [*super().check(events), *promises.uncopied(events, "from", "to")]


def _copy(site: Site, plan: Iterable[Operation]) -> None:
    producer = site.connect().producer("copying", timeout=30.0)

    def on(content: dict[str, Any], row: dict[str, Any]) -> None:
        value = f"copy of {content.get('value')}"
        while True:
            site.history.add(site.name, Act.SEND, Kind.INVOKE, value=value, topic="to")
            try:
                producer.send("to", payload(value, 20), key=row["key"], message_id=value)
            except EscrowError as problem:
                site.history.add(site.name, Act.SEND, Kind.UNKNOWN, value=value, topic="to", note=str(problem))
                site.pause(0.5)
            else:
                site.history.add(site.name, Act.SEND, Kind.OK, value=value, topic="to")
                return

    Reader(site, "copiers", ["from"], careless=0.1, effect=on).work()
