"""What a workload is, and what it asks of the place where it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from escrowmq.client.bus import Bus
from escrowmq_lab import promises
from escrowmq_lab.checker import Violation
from escrowmq_lab.history import Event, History


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing to do: a name, what goes with it, and seconds to wait before. The plan of a role is a list of these; a
    run may leave any of them out."""

    verb: str
    name: str
    after: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


class Site(Protocol):
    """Where a role runs: a process, or a simulated one. It may be killed at any time, and run again with the same
    ``kept``."""

    name: str
    history: History
    chance: Random
    kept: dict[str, Any]
    """What outlives the process: its database."""
    shared: dict[str, Any]
    """A database that all processes of the run use."""

    @property
    def ended(self) -> bool:
        """Whether nothing new is to be begun."""
        ...

    def connect(self) -> Bus:
        """Return a bus to the brokers; closed by the site."""
        ...

    def connect_each(self) -> list[Bus]:
        """Return a bus to each of the brokers."""
        ...

    @property
    def seconds(self) -> float:
        """The time by a clock that all processes have, and that never steps back."""
        ...

    def together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Call all of these at the same time, each in a thread of its own; returns when all have."""
        ...

    def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        ...

    def now_us(self) -> int | None:
        """Return the time by the brokers' clocks; None where it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class Role:
    """What one process does. ``drains``: it goes on until the run is over, whatever its plan is."""

    name: str
    run: Callable[[Site, Iterable[Operation]], None]
    plan: Sequence[Operation] = ()
    drains: bool = False


class Workload(ABC):
    """Roles, and what must hold of their history beside what :func:`escrowmq_lab.checker.check` checks."""

    name: ClassVar[str]
    remade: ClassVar[tuple[str, ...]] = ()
    """Consumer groups that are deleted now and then, and are there again at the end."""

    @abstractmethod
    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return the roles of a run, with plans of about ``size`` operations each."""

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Return further violations: here, a fenced process though each has its own name, or a settled message that
        nobody settled."""
        return [*promises.fenced_alone(events), *promises.unaccounted(events)]

    def left(self, shared: dict[str, Any]) -> list[str]:
        """Return the pending work outside the brokers, in words."""
        return []


def to_do(site: Site, plan: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations of a plan that were not begun before, each after its pause; ends when the site has ended."""
    begun: set[str] = site.kept.setdefault("begun", set())
    for operation in plan:
        if operation.name in begun:
            continue
        if site.ended:
            return
        site.pause(operation.after)
        begun.add(operation.name)
        yield operation
