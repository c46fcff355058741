"""The figures of a run: every run of every work on every peer, and their medians with the lowest and the highest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measuring import Outcome
from seam import Work

BESIDE = ("client_us", "server_us", "written_bytes", "written_per_body_byte", "memory_mib", "failed", "beside_rate")


class Figures:
    """Runs by work, peer and round; ``known`` are those of an earlier call (see :meth:`content`)."""

    def __init__(self, body: int, known: dict[str, Any] | None = None) -> None:
        self._body = body
        known = known or {}
        self.runs: list[dict[str, Any]] = list(known.get("runs", ()))
        self.failures: list[dict[str, Any]] = list(known.get("failures", ()))
        self.sync_ms: list[float] = list(known.get("sync_ms", ()))

    def add(self, peer: str, work: Work, number: int, outcome: Outcome) -> None:
        """The outcome of a round."""
        where = {"work": work.name, "peer": peer, "round": number}
        self.failures = [one for one in self.failures if {name: one[name] for name in where} != where]
        self.runs.append({**where, **outcome.figures(self._body)})

    def fail(self, peer: str, work: str, number: int, reason: str) -> None:
        """A round that gave no figure."""
        self.failures.append({"work": work, "peer": peer, "round": number, "reason": reason})

    def has(self, peer: str, work: Work, number: int) -> bool:
        """Whether a round has its figure already."""
        return any((one["peer"], one["work"], one["round"]) == (peer, work.name, number) for one in self.runs)

    def content(self) -> dict[str, Any]:
        """For JSON."""
        return {"runs": self.runs, "failures": self.failures, "sync_ms": self.sync_ms}


def summary(content: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per work and peer that has figures: of each figure that is shown the median, the lowest and the
    highest; medians of the others; ``failures``: why a round has none."""
    entries = []
    for work in content["works"]:
        for peer in content["peers"]:
            mine = [one for one in content["runs"] if (one["work"], one["peer"]) == (work["name"], peer["name"])]
            lost = [
                one["reason"]
                for one in content["failures"]
                if one["work"] in (work["name"], "") and one["peer"] == peer["name"]
            ]
            if mine or lost:
                shown = {key: middle([one[key] for one in mine]) for key in work["shows"]} if mine else {}
                beside = {key: statistics.median(one[key] for one in mine) for key in BESIDE} if mine else {}
                rounds = {one["round"]: {key: one[key] for key in (*work["shows"], *BESIDE)} for one in mine}
                names = {"work": work["name"], "peer": peer["name"]}
                entries.append({**names, "shown": shown, **beside, "rounds": rounds, "failures": lost})
    return entries


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


@dataclass
class Recovery:
    """What a crash with undecided half messages costs, and memory. Seconds, bytes and MiB; None: not measured."""

    peer: str
    undecided: int | None = None
    serving_s: float | None = None
    """From the start after a kill -9 until the first transaction was committed again."""
    asked_s: float | None = None
    """From then until the producer was asked about all of them; their time to be asked had come before."""
    asked: int | None = None
    bytes_per_question: float | None = None
    """Written by the server while it asked."""
    rest_mib: float | None = None
    queued: int | None = None
    queued_mib: float | None = None
    failure: str | None = None

    def content(self) -> dict[str, Any]:
        """For JSON and the table."""
        return asdict(self)
