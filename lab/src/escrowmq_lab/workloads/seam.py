"""The interface of a workload and of its environment."""

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
    """One operation: a name, details, and seconds to wait before. A run may omit any operation of a role's plan."""

    verb: str
    name: str
    after: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


class Site(Protocol):
    """The environment of a role: a real or simulated process. It may be killed and run again with the same ``kept``."""

    name: str
    history: History
    chance: Random
    kept: dict[str, Any]
    """State that outlives the process: its database."""
    shared: dict[str, Any]
    """A database that all processes of the run use."""

    @property
    def ended(self) -> bool:
        """Return whether no new work may begin."""
        ...

    def connect(self) -> Bus:
        """Return a bus to the brokers; closed by the site."""
        ...

    def connect_each(self) -> list[Bus]:
        """Return a bus to each of the brokers."""
        ...

    @property
    def seconds(self) -> float:
        """The time by a monotonic clock shared by all processes."""
        ...

    def together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run all calls concurrently, each in its own thread; returns when all have finished."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait for a while."""
        ...

    def now_us(self) -> int | None:
        """Return the time by the brokers' clocks; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Role:
    """The work of one process. ``drains``: it continues until the run is over, regardless of its plan."""

    name: str
    run: Callable[[Site, Iterable[Operation]], None]
    plan: Sequence[Operation] = ()
    drains: bool = False


class Workload(ABC):
    """Roles, and conditions on their history beyond those of :func:`escrowmq_lab.checker.check`."""

    name: ClassVar[str]
    remade: ClassVar[tuple[str, ...]] = ()
    """Consumer groups that are deleted sometimes, and exist again at the end."""

    @abstractmethod
    def roles(self, chance: Random, size: int) -> list[Role]:
        """Return the roles of a run, with plans of about ``size`` operations each."""

    def check(self, events: Sequence[Event]) -> list[Violation]:
        """Return further violations: a process fenced despite its unique name, or a message finished without an ack."""
        return [*promises.fenced_alone(events), *promises.unaccounted(events)]

    def left(self, shared: dict[str, Any]) -> list[str]:
        """Describe pending work outside the brokers."""
        return []


def to_do(site: Site, plan: Iterable[Operation]) -> Iterator[Operation]:
    """Iterate over operations that have not begun, each after its pause; ends when the site has ended."""
    started: set[str] = site.kept.setdefault("begun", set())
    for operation in plan:
        if operation.name in started:
            continue
        if site.ended:
            return
        site.pause(operation.after)
        started.add(operation.name)
        yield operation
