"""The progress of a chaos run: live lines on a terminal, else a line every few seconds. A separate thread counts
placed, confirmed and effective messages in the databases, so that slow databases do not delay the faults."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import sqlalchemy as sa
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from escrowmq_lab.chaos.books import business, confirmed, effects
from escrowmq_lab.chaos.check import rows_in
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow, Happening
from escrowmq_lab.databases import snapshot

POLL_SECONDS = 0.5
"""Poll interval (s) of the databases."""
RATE_SECONDS = 6.0
"""Averaging time (s) of the rates."""
LINE_SECONDS = 5.0
"""Interval (s) between lines without a terminal."""

COUNTED = {"placed": business, "confirmed": confirmed, "effects": effects}
WORDS = {
    Blow.KILL: "killed",
    Blow.PAUSE: "paused",
    Blow.CUT: "cut off",
    Blow.SILENCE: "in silence",
    Blow.FILL: "disk full",
}
"""States of a node under a fault."""


class Watched(Protocol):
    """Interface of a running run for the progress display."""

    @property
    def phase(self) -> str:
        """The current phase."""

    @property
    def round(self) -> int:
        """The number of the current round; 0: none yet."""

    @property
    def struck(self) -> Mapping[str, Blow]:
        """Nodes with a fault now."""

    @property
    def happenings(self) -> Sequence[Happening]:
        """Faults that are over."""

    @property
    def engines(self) -> Mapping[str, sa.Engine]:
        """Databases by node: producer-1, ..., consumer-1, ..."""


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a run at a moment. ``counts`` and ``rates`` (per second) by the names of COUNTED."""

    phase: str
    round: int
    rounds: int
    seconds: float
    """Time since the begin."""
    struck: Mapping[str, Blow]
    blows: Mapping[Blow, int]
    counts: Mapping[str, int]
    rates: Mapping[str, float]

    @property
    def title(self) -> str:
        """The phase or round."""
        return f"round {self.round} of {self.rounds}" if self.phase == "striking" else self.phase

    @property
    def flow(self) -> str:
        """The rows written so far."""
        return ", ".join(f"{count:,} {name} ({self.rates[name]:,.0f}/s)" for name, count in self.counts.items())

    @property
    def faults(self) -> str:
        """The number of faults so far."""
        others = sum(self.blows.values()) - self.blows.get(Blow.KILL, 0)
        return f"{self.blows.get(Blow.KILL, 0)} kills, {others} other blows"

    @property
    def down(self) -> str:
        """Nodes with a fault."""
        return ", ".join(f"{node} {WORDS[blow]}" for node, blow in sorted(self.struck.items()))

    def line(self) -> str:
        """Return everything on one line."""
        down = f"; {self.down}" if self.struck else ""
        return f"{self.title}: {self.flow}; {self.faults}{down}"

    def lines(self) -> Group:
        """Return everything with a progress bar."""
        head = Table.grid(padding=(0, 1))
        minutes, seconds = divmod(int(self.seconds), 60)
        bar = ProgressBar(self.rounds, self.round, width=40, pulse=self.phase != "striking")
        head.add_row(Text(self.title, "bold"), bar, Text(f"{minutes}:{seconds:02}", "cyan"))
        down = Text.assemble((f"{self.faults}; ", "dim"), (self.down or "all nodes are whole", "red" * bool(self.down)))
        return Group(head, Text(self.flow), down)


@dataclass(slots=True)
class _Counts:
    """Row counts of the tables of all databases, and their growth."""

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    before: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def read(self, engines: Mapping[str, sa.Engine]) -> None:
        """Count rows; keep the previous numbers if a database fails."""
        with contextlib.suppress(sa.exc.DBAPIError):
            counts = dict.fromkeys(COUNTED, 0)
            for node, engine in engines.items():
                with snapshot(engine) as connection:
                    for name, table in COUNTED.items():
                        if (table is effects) == node.startswith("consumer"):
                            counts[name] += rows_in(connection, table)
            self.now = counts

    def rates(self, at: float) -> dict[str, float]:
        """Return rates per second over the last RATE_SECONDS; ``at``: seconds of a monotonic clock."""
        self.before.append((at, self.now))
        while len(self.before) > 2 and self.before[1][0] <= at - RATE_SECONDS:
            self.before.popleft()
        since, then = self.before[0]
        return {name: (count - then[name]) / (at - since) if at > since else 0.0 for name, count in self.now.items()}


class Progress:
    """Shows a run on ``console`` (standard error). Used around the run; the run calls ``update``."""

    def __init__(self, options: Options, console: Console | None = None) -> None:
        self._options = options
        self._console = console or Console(stderr=True, highlight=False)
        self._watched: Watched | None = None
        self._counts = _Counts()
        self._started_at = time.monotonic()
        self._printed = 0.0
        self._live: Live | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def update(self, watched: Watched) -> None:
        """Store the state of the run; costs nothing."""
        self._watched = watched

    def look(self, at: float | None = None) -> Look | None:
        """Return the current state, None before the first call of ``update``. ``at``: default ``time.monotonic()``."""
        watched, at = self._watched, time.monotonic() if at is None else at
        if watched is None:
            return None
        if watched.phase in ("striking", "settling"):
            self._counts.read(watched.engines)
        struck = dict(watched.struck)
        blows = Counter(happening.blow for happening in list(watched.happenings)) + Counter(struck.values())
        rates = self._counts.rates(at)
        seconds = at - self._started_at
        return Look(watched.phase, watched.round, self._options.rounds, seconds, struck, blows, self._counts.now, rates)

    def show(self, look: Look) -> None:
        """Update the display, or print a line if it is due."""
        if self._live is not None:
            self._live.update(look.lines(), refresh=True)
        elif look.seconds - self._printed >= LINE_SECONDS:
            self._printed = look.seconds
            self._console.print(Text(look.line()), soft_wrap=True)

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            look = self.look()
            if look is not None:
                self.show(look)
