"""Check-back storm: nearly all transactions are left to the check-back, whose answers come late, wrongly, twice or
never. Zombie: a newer process takes over a producer's name while the older one continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Event
from escrowmq_lab.workloads.drain import TOPICS, transaction, write
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload
from escrowmq_lab.workloads.writing import Writer


def _read(site: Site, plan: Iterable[Operation]) -> None:
    Reader(site, "cart", TOPICS, careless=0.1).work()


class CheckBackStorm(Workload):
    """See the module."""

    name = "check-back storm"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two producers of one group, which get check-backs for each other's transactions, and one consumer."""
        lag, wrong = chance.choice((0.0, 0.5, 2.0)), chance.choice((0.0, 0.3))

        def storm(site: Site, plan: Iterable[Operation]) -> None:
            site.kept["books"] = site.shared.setdefault("books", {})  # both use the same database
            Writer(site, lag=lag, wrong=wrong).work(plan)

        def plan(writer: str) -> list[Operation]:
            plan = [transaction(f"{writer}-{i}", chance) for i in range(size)]
            for operation in plan:
                if chance.random() < 0.8:
                    operation.details["end"] = chance.choice(("silent commit", "silent rollback", "never"))
            return plan

        return [Role("w0", storm, plan("w0")), Role("w1", storm, plan("w1")), Role("cart-1", _read, drains=True)]


class Zombie(Workload):
    """See the module."""

    name = "zombie"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return three processes of one name, one after the other, and one consumer."""

        def heir(site: Site, plan: Iterable[Operation]) -> None:
            if not site.kept.get("begun"):
                site.pause(1.0 + 3.0 * int(site.name[-1]))
            Writer(site, "heirs", instance="heir").work(plan)

        def plan(writer: str) -> list[Operation]:
            return [transaction(f"{writer}-{i}", chance, thinks=chance.random() * 0.3) for i in range(size)]

        roles = [Role(f"heir-{n}", heir, plan(f"heir-{n}")) for n in range(3)]
        other = [Operation("send", f"w-{i}", 0.2, {"topic": "orders", "options": {}}) for i in range(size // 2)]
        return [*roles, Role("w", write, other), Role("cart-1", _read, drains=True)]

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Check that a process fenced by a newer one has no later durable effect."""
        return promises.undead(events)
