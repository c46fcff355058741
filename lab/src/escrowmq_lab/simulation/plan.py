"""The plan of a run: everything that a seed decides in advance. Failing runs are shrunk by omitting parts of it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from escrowmq.settings import BrokerSettings
from escrowmq.testing.disks import MODES
from escrowmq_lab.simulation.carrier import Carrier
from escrowmq_lab.simulation.network import NetworkOptions
from escrowmq_lab.workloads import WORKLOADS, Role

FAULTS = (
    "crash",
    "crash at a write",
    "crash while starting",
    "clean restart",
    "kill client",
    "cut",
    "stall",
    "disk full",
    "sync fails",
    "clock jumps",
)
"""Kinds of faults. ``clock jumps``: of a broker, while it is down."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: time (seconds), kind, and targets: numbers that each kind maps to a broker or a client by modulo."""

    name: str
    at: float
    kind: str
    target: int
    other: int
    seconds: float
    mode: str
    count: int

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} at {self.at:.3f} s, {self.seconds:.3f} s, {self.mode}, {self.count}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. ``seconds``: virtual time before everything is healed; ``sync_seconds``: average duration of a sync."""

    seed: int
    workload: str
    roles: tuple[Role, ...]
    faults: tuple[Fault, ...]
    kinds: tuple[str, ...]
    brokers: int
    seconds: float
    preemption: float
    sync_seconds: float
    network: NetworkOptions
    settings: BrokerSettings
    carrier: Carrier

    def names(self) -> list[str]:
        """Return the names of all parts that can be left out: faults, then operations."""
        return [
            *(fault.name for fault in self.faults),
            *(operation.name for role in self.roles for operation in role.plan),
        ]

    def without(self, left_out: Set[str]) -> Plan:
        """Return the plan without some parts."""
        roles = tuple(replace(role, plan=[o for o in role.plan if o.name not in left_out]) for role in self.roles)
        return replace(self, roles=roles, faults=tuple(f for f in self.faults if f.name not in left_out))

    def describe(self) -> dict[str, Any]:
        """Describe the plan."""
        return {
            "workload": self.workload,
            "brokers": self.brokers,
            "faults": len(self.faults),
            "kinds": list(self.kinds),
            "operations": sum(len(role.plan) for role in self.roles),
            "roles": [role.name for role in self.roles],
            "seconds": self.seconds,
            "preemption": self.preemption,
            "settings": {
                name: getattr(self.settings, name)
                for name in ("segment_bytes", "snapshot_frames", "check_max", "checks_exhausted", "lease_seconds")
            },
        }


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of runs: operations per producer (``size``), virtual ``seconds``, and number of ``faults``, at most."""

    size: int = 12
    seconds: float = 12.0
    faults: int = 10
    workloads: tuple[str, ...] = field(default_factory=lambda: tuple(name for name in WORKLOADS if name != "carrying"))


CARRYING = Scale(workloads=("carrying",))
"""Runs about the carrier: reads, parts, TLS."""
LONG = Scale(size=60, seconds=90.0, faults=60)


def draw(seed: int, scale: Scale) -> Plan:
    """Draw the plan of a seed."""
    chance = Random(f"escrowmq {seed}")
    name = scale.workloads[seed % len(scale.workloads)]
    size = chance.randint(3, scale.size)
    roles = tuple(WORKLOADS[name].roles(chance, size))
    seconds = scale.seconds * (0.5 + chance.random() / 2)
    kinds = tuple(kind for kind in FAULTS if chance.random() < 0.4)
    count = chance.randint(1, scale.faults) if kinds and chance.random() < 0.95 else 0
    faults = tuple(_fault(f"fault-{number}", chance, kinds, seconds) for number in range(count))
    return Plan(
        seed,
        name,
        roles,
        faults,
        kinds,
        2 if name != "zombie" and chance.random() < 0.15 else 1,  # each broker fences separately
        seconds,
        chance.choice((0.0, 0.0, 0.02, 0.1)),
        chance.choice((0.0, 0.0005, 0.005)),
        NetworkOptions(
            latency=chance.choice((0.0002, 0.002, 0.02)),
            slow=chance.choice((0.0, 0.05)),
            split=chance.choice((0.0, 0.2)),
            refused=chance.choice((0.0, 0.0, 0.2)),
            held=0.1 if "stall" in kinds else 0.0,
        ),
        BrokerSettings(
            transaction_timeout=chance.choice((0.3, 1.0, 3.0)),
            check_interval=chance.choice((0.3, 1.0)),
            check_max=chance.choice((1, 3, 15)),
            checks_exhausted=chance.choice(("park", "rollback")),
            checks_in_flight=chance.choice((1, 5, 20_000)),
            lease_seconds=chance.choice((1.0, 3.0)),
            max_attempts=10_000,
            retry_backoff=0.1,
            segment_bytes=chance.choice((1 << 13, 1 << 16, 1 << 20)),
            snapshot_frames=chance.choice((10, 100, 20_000)),
            snapshot_bytes=chance.choice((1 << 13, 1 << 28)),
            default_queues=chance.choice((1, 2, 4)),
            compression=chance.choice(("none", "none", "none", "lz4")),
        ),
        Carrier.draw(Random(f"escrowmq carrier {seed}")) if name == "carrying" else Carrier(),
    )


def _fault(name: str, chance: Random, kinds: tuple[str, ...], seconds: float) -> Fault:
    return Fault(
        name,
        chance.random() * seconds,
        chance.choice(kinds),
        chance.getrandbits(16),
        chance.getrandbits(16),
        chance.choice((0.01, 0.3, 2.0)) * (0.5 + chance.random()),
        chance.choice(MODES),
        chance.choice((1, 2, 5, 20)) + chance.randrange(5),
    )
