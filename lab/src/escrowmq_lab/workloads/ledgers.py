"""A bank: each transfer is one transaction whose amounts sum to zero, so every reader always sees the same total."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Event
from escrowmq_lab.workloads.drain import ENDS, WEIGHTS
from escrowmq_lab.workloads.reading import Reader
from escrowmq_lab.workloads.seam import Operation, Role, Site, Workload
from escrowmq_lab.workloads.writing import Writer


class Bank(Workload):
    """See the module. All messages are in one queue, where those of a transfer are contiguous."""

    name = "bank"

    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return two tellers and one accountant."""

        def tell(site: Site, plan: Iterable[Operation]) -> None:
            Writer(site, "bank").work(plan)

        def account(site: Site, plan: Iterable[Operation]) -> None:
            Reader(site, "accounts", ["transfers"], careless=0.1).work()

        def plan(teller: str) -> list[Operation]:
            return [_transfer(f"{teller}-{i}", chance) for i in range(size)]

        return [Role("t0", tell, plan("t0")), Role("t1", tell, plan("t1")), Role("accountant", account, drains=True)]

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Check that the messages of a transfer are contiguous."""
        return [*super().check(events), *promises.scattered(events)]


def _transfer(name: str, chance: Random) -> Operation:
    amounts = [chance.randrange(1, 100) for _ in range(chance.choice((1, 2, 3)))]
    messages = [
        ("transfers", None, {"queue": 0, "content": {"amount": amount}}) for amount in [*amounts, -sum(amounts)]
    ]
    details = {"messages": messages, "end": chance.choices(ENDS, WEIGHTS)[0], "thinks": chance.random() * 0.2}
    return Operation("transact", name, chance.random() * 0.3, details)
