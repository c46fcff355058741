"""The data of the report, and the numbers derived from them."""

from __future__ import annotations

import os
import platform
import shlex
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any

from escrowmq_lab.chaos.check import Flow
from escrowmq_lab.chaos.findings import Findings
from escrowmq_lab.chaos.modes import mode_of
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow, Happening
from escrowmq_lab.chaos.run import Run

PAGE, JSON = "chaos.html", "chaos.json"
"""Names of the report and of its numbers in the folder of a run."""

_PACKAGES = ("escrowmq", "pyarrow", "sqlalchemy")


def versions() -> dict[str, str]:
    """Return the versions of the components, as in this process."""
    return {
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        **{name: version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. Wall times are microseconds since 1970."""

    options: Options
    begun_us: int
    """Begin of the first round, when all nodes were ready."""
    faults_until_us: int
    """End of the last fault; then the run settles."""
    ended_us: int
    """End of settling, or of the patience."""
    happenings: Sequence[Happening]
    findings: Findings
    flow: Flow
    promises: Mapping[str, str] = field(default_factory=dict)
    """The promise of each mode, by its name."""
    repeats: frozenset[str] = frozenset()
    """Modes that promise "at least once"."""
    versions: Mapping[str, str] = field(default_factory=versions)

    @classmethod
    def of(cls, run: Run) -> Record:
        """Create the record of a finished run."""
        modes = {mode.name: mode for mode in map(mode_of, run.options.modes)}
        return cls(
            options=run.options,
            begun_us=run.begun_us,
            faults_until_us=run.faults_until_us,
            ended_us=run.ended_us,
            happenings=run.happenings,
            findings=run.findings,
            flow=run.flow,
            promises={name: mode.promise for name, mode in modes.items()},
            repeats=frozenset(name for name, mode in modes.items() if mode.repeats),
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, then the programs beside them that had faults."""
        return tuple(dict.fromkeys([*self.options.nodes, *sorted({one.node for one in self.happenings})]))

    @property
    def kills(self) -> int:
        """Number of killed processes."""
        return sum(happening.blow is Blow.KILL for happening in self.happenings)

    @property
    def blows(self) -> Counter[tuple[str, Blow]]:
        """Number of faults, by node and kind."""
        return Counter((happening.node, happening.blow) for happening in self.happenings)

    @property
    def struck(self) -> Counter[int]:
        """Number of rounds by number of nodes hit, without programs."""
        nodes: dict[int, set[str]] = {}
        for happening in self._on_nodes:
            nodes.setdefault(happening.round, set()).add(happening.node)
        return Counter(len(names) for names in nodes.values())

    @property
    def most_at_once(self) -> int:
        """Maximum number of nodes down at the same moment."""
        steps = sorted(
            step for one in self._on_nodes for step in ((one.at_us, 1), (max(one.until_us, one.at_us + 1), -1))
        )
        now = most = 0
        for _, step in steps:
            now += step
            most = max(most, now)
        return most

    @property
    def _on_nodes(self) -> list[Happening]:
        nodes = set(self.options.nodes)
        return [happening for happening in self.happenings if happening.node in nodes]

    @property
    def fault_seconds(self) -> float:
        """Duration of the faults."""
        return max(self.faults_until_us - self.begun_us, 1) / 1e6

    @property
    def settle_seconds(self) -> float:
        """Time from the end of the faults until everything had settled."""
        return max(self.ended_us - self.faults_until_us, 0) / 1e6

    def rate(self, name: str) -> float:
        """Return rows per second during the faults: of "business", "confirmed" or "effects"."""
        first, last = self.begun_us // 1_000_000, self.faults_until_us // 1_000_000
        rows: int = sum(
            count
            for seconds in getattr(self.flow, name).values()
            for second, count in seconds.items()
            if first <= second <= last
        )
        return rows / self.fault_seconds

    def total(self, name: str) -> int:
        """Return the sum of one number over all modes."""
        return sum(getattr(tally, name) for tally in self.findings.tallies.values())

    @property
    def command(self) -> str:
        """Command to repeat the run: the same faults at the same times; their effects vary."""
        return shlex.join(["escrowmq-lab", "chaos", *_flags(self.options)])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "command": self.command,
            "options": {**asdict(self.options), "database_url": _kind(self.options.database_url)},
            "begun_us": self.begun_us,
            "faults_until_us": self.faults_until_us,
            "ended_us": self.ended_us,
            "messages": {
                name: self.total(name) for name in ("intended", "business", "confirmed", "effects", "recovered")
            },
            "kills": self.kills,
            "other_blows": len(self.happenings) - self.kills,
            "rounds_by_nodes_struck": dict(sorted(self.struck.items())),
            "most_at_once": self.most_at_once,
            "confirmed_per_second": round(self.rate("confirmed"), 1),
            "effects_per_second": round(self.rate("effects"), 1),
            **self.findings.to_json(),
            "happenings": [
                {"round": one.round, "node": one.node, "blow": one.blow, "at_us": one.at_us, "until_us": one.until_us}
                for one in self.happenings
            ],
            "flow": self.flow.to_json(),
            "versions": dict(self.versions),
        }


def _flags(options: Options) -> Iterable[str]:
    """Return the flags that differ from the defaults; rounds, period and seed always."""
    usual = Options(modes=options.modes)
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name == "modes":
            if value != Options().modes:
                yield from ("--modes", ",".join(value))
        elif one.name == "database_url":
            if value is not None:
                yield from ("--database-url", _kind(value) or "")
        elif one.name in ("rounds", "period", "seed") or value != getattr(usual, one.name):
            yield from (f"--{one.name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value))


def _kind(url: str | None) -> str | None:
    """Return the public part of a database URL: no user, no password."""
    return None if url is None else f"{url.partition(':')[0]}://..."
