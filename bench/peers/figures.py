"""The figures of a run: per peer and work the outcomes of all rounds, as medians with the lowest and the highest."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from measuring import Outcome
from seam import Work


class Figures:
    """Outcomes by work and peer."""

    def __init__(self, peers: list[str], works: list[str]) -> None:
        self._peers = peers
        self._works = works
        self._found: dict[tuple[str, str], list[tuple[Work, Outcome]]] = {}

    def add(self, peer: str, work: Work, outcome: Outcome) -> None:
        """One round's outcome."""
        self._found.setdefault((work.name, peer), []).append((work, outcome))

    def content(self) -> list[dict[str, Any]]:
        """One entry per work and peer that has it, for JSON and the table."""
        entries = []
        for work in self._works:
            for peer in self._peers:
                if rounds := self._found.get((work, peer)):
                    entries.append({"work": work, "peer": peer, **_entry(rounds)})
        return entries


def _entry(rounds: list[tuple[Work, Outcome]]) -> dict[str, Any]:
    runs = [outcome.figures() for _, outcome in rounds]
    values = [one[rounds[0][0].figure] for one in runs]
    beside = ("client_us", "server_us", "written_bytes", "memory_mib", "failed")
    return {
        "less_is_better": rounds[0][0].figure != "rate",
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "values": values,
        **{name: statistics.median(one[name] for one in runs) for name in beside},
    }


@dataclass
class Recovery:
    """What a crash with undecided half messages costs, and memory. Seconds, and MiB; None: not measured."""

    peer: str
    undecided: int | None = None
    serving_s: float | None = None
    """From kill -9 until the first transaction was committed again."""
    asked_s: float | None = None
    """From then until the producer was asked about all of them; their time to be asked had come before."""
    asked: int | None = None
    rest_mib: float | None = None
    queued: int | None = None
    queued_mib: float | None = None

    def content(self) -> dict[str, Any]:
        """For JSON and the table."""
        return asdict(self)
