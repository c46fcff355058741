"""The options of a chaos run: nodes, modes, duration, and the seed of its faults."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from escrowmq.errors import Code, Misuse
from escrowmq_lab.chaos.modes import MODES, mode_of


@functools.cache
def _lacks(name: str) -> str | None:
    """Return what this machine lacks for a mode; cached, because the check may start Java."""
    return mode_of(name).lacks()


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run, with the defaults of ``escrowmq-lab chaos``. Raises Misuse(BAD_ARGUMENT) if invalid."""

    rounds: int = 100
    period: float = 3.0
    """Seconds per round."""
    down: float | None = None
    """Duration (s) of a fault; None: drawn for each, up to half of the period."""
    seed: int = 0
    producers: int = 4
    brokers: int = 2
    consumers: int = 4
    modes: tuple[str, ...] = field(default_factory=lambda: tuple(name for name in MODES if _lacks(name) is None))
    """All modes of the product that this machine can run."""
    rate: float = 3000.0
    """Maximum messages per second over all producers."""
    database_url: str | None = None
    """A PostgreSQL server for the databases of producers and consumers; None: SQLite files."""
    patience: float = 120.0
    """Time (s) without progress after the faults before a run counts as stuck; also the timeout of starts."""

    def __post_init__(self) -> None:
        for name in self.modes:
            if (lacks := _lacks(name)) is not None:
                raise Misuse(Code.MISSING_PACKAGE, f"{name} cannot run here: {lacks}")
        counts = {"rounds": self.rounds, "producers": self.producers, "brokers": self.brokers}
        counts["consumers"] = self.consumers
        for name, count in counts.items():
            if count < 1:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} is {count}", "at least 1")
        if (self.down or 0) > self.period:
            raise Misuse(Code.BAD_ARGUMENT, f"down for {self.down} s of {self.period} s", "at most the period")
        if not self.modes or self.period <= 0 or self.rate <= 0 or self.patience <= 0 or (self.down or 0) < 0:
            text = "a run needs a mode, and period, rate and patience above 0"
            raise Misuse(Code.BAD_ARGUMENT, text)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes: producer-1, ..., broker-1, ..., consumer-1, ..."""
        kinds = {"producer": self.producers, "broker": self.brokers, "consumer": self.consumers}
        return tuple(f"{kind}-{number}" for kind, count in kinds.items() for number in range(1, count + 1))
