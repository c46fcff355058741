"""Carrying: messages of many sizes, producers that are asked for outcomes and close, and readers that read a topic from
its first message, give some reads up, and see each queue without a gap."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from escrowmq.errors import Code, EscrowError
from escrowmq_lab.history import unpack
from escrowmq_lab.workloads.drain import TOPICS, any_operation, transaction, write
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload, to_do
from escrowmq_lab.workloads.writing import Writer

SIZES = (40, 700, 3000, 9000)


def write_and_close(site: Site, plan: Iterable[Operation]) -> None:
    """Run a producer, then close it: the other one of its group is asked for undecided transactions."""
    writer = Writer(site)
    writer.work(plan)
    writer.producer.close()


def browse(site: Site, plan: Iterable[Operation]) -> None:
    """Read topics from their first message. An operation's ``most`` is the batch after which its read is given up."""
    bus = site.connect()
    for operation in to_do(site, plan):
        try:
            reader = bus.reader(operation.details["topic"], start="earliest", timeout=30.0)
        except EscrowError as problem:
            if problem.code is Code.UNKNOWN_TOPIC:
                continue
            raise
        following: dict[tuple[int, int], int] = {}
        for number, batch in enumerate(reader.batches(50, idle_timeout=0.0)):
            for row in batch.arrow.to_pylist():
                place = (batch.shard, batch.queue)
                assert row["offset"] == following.get(place, row["offset"]), f"a gap in {place} before {row['offset']}"
                following[place] = row["offset"] + 1
                assert unpack(row["body"])[1], f"{place} {row['offset']}: another body than was sent"
            if number == operation.details["most"]:
                break
        reader.close()


class Carrying(Workload):
    """See the module."""

    name = "carrying"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two producers of one group, one consumer, and two readers."""

        def read(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "cart", TOPICS).work()

        def plan(writer: str) -> list[Operation]:
            found = [any_operation(f"{writer}-{i}", chance) for i in range(size)]
            for operation in found:
                if "options" in operation.details:
                    operation.details["options"]["size"] = chance.choice(SIZES)
            return [*found, *(transaction(f"{writer}-late-{i}", chance, end="never") for i in range(3))]

        reads = [
            [
                Operation(
                    "read",
                    f"r{n}-{i}",
                    chance.random(),
                    {"topic": chance.choice(TOPICS), "most": chance.choice((0, 1, 1000))},
                )
                for i in range(size)
            ]
            for n in range(2)
        ]
        return [
            Role("w0", write_and_close, plan("w0")),
            Role("w1", write, plan("w1")),
            Role("cart-1", read, drains=True),
            *(Role(f"r{n}", browse, reads[n]) for n in range(2)),
        ]
