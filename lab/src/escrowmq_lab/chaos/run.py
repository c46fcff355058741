"""A chaos run: start the nodes, inject the planned faults, let everything settle, and check every id."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Unknown
from escrowmq.log.checking import check as check_log
from escrowmq.platform.disk import RealDisk
from escrowmq_lab.chaos.books import business, now_us
from escrowmq_lab.chaos.check import Flow, check, read_flow
from escrowmq_lab.chaos.disks import set_full
from escrowmq_lab.chaos.findings import Finding, Findings
from escrowmq_lab.chaos.fleet import Fleet, NodeMessage
from escrowmq_lab.chaos.layout import plans_of, routes_of
from escrowmq_lab.chaos.modes import mode_of
from escrowmq_lab.chaos.options import Options
from escrowmq_lab.chaos.plan import Blow, Happening, Round, Strike, draw
from escrowmq_lab.chaos.proxy import Proxy
from escrowmq_lab.chaos.settling import Settling
from escrowmq_lab.databases import databases, open_engine, snapshot

REST_SECONDS = 0.3
"""Pause (s) before a node that ended by itself is restarted."""
MOST_ENDS = 20
"""Number of nodes ending by themselves after which the run is aborted."""
QUIET_SECONDS = 2.0
"""Time (s) without changes after everything has settled."""
PROGRAM_ROUNDS = 12
SILENCES: tuple[dict[str, bool], ...] = ({}, {"to_brokers": False}, {"to_nodes": False})
"""Both directions, or one."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """The result of a run. Wall times are microseconds since 1970."""

    options: Options
    folder: Path
    rounds: tuple[Round, ...]
    findings: Findings
    happenings: list[Happening] = field(default_factory=list)
    begun_us: int = 0
    faults_until_us: int = 0
    """End of the last fault; then the run settled."""
    ended_us: int = 0
    """End of settling, or of the patience."""
    flow: Flow = field(default_factory=Flow)


def run(options: Options, folder: Path | None = None, on_progress: Callable[[Monkey], None] = lambda _: None) -> Run:
    """Run the plan. ``folder`` keeps everything; None: a temporary folder, removed if every promise held. The
    run calls ``on_progress`` several times per second. Raises Misuse(BAD_ARGUMENT) if the folder contains a run,
    Misuse(BAD_URL) for an unreachable database server, Unknown(TIMED_OUT) if nodes do not start or repeatedly end by
    themselves."""
    kept = folder or Path(tempfile.mkdtemp(prefix="escrowmq-chaos-"))
    kept.mkdir(parents=True, exist_ok=True)
    rounds = draw(options)
    names = [node for node in options.nodes if not node.startswith("broker")]
    prefix = f"chaos_{now_us():x}_" if options.database_url is not None else ""
    with databases([prefix + name for name in names], kept / "databases", options.database_url) as urls:
        monkey = Monkey(options, kept, rounds, dict(zip(names, urls, strict=True)), on_progress)
        with monkey.running():
            outcome = monkey.run()
    if folder is None and outcome.findings.ok:
        import shutil

        shutil.rmtree(kept, ignore_errors=True)
    return outcome


class Monkey:
    """The director of one run. Public attributes may be read by ``on_progress``."""

    def __init__(
        self,
        options: Options,
        folder: Path,
        rounds: tuple[Round, ...],
        urls: dict[str, str],
        on_progress: Callable[[Monkey], None],
    ) -> None:
        self.options = options
        self.round = 0
        """The number of the current round; 0: none yet."""
        self.phase = "starting"
        """Then "striking", "settling", "checking"."""
        self.struck: dict[str, Blow] = {}
        """Nodes with a fault now."""
        self.happenings: list[Happening] = []
        self.engines = {name: open_engine(url) for name, url in urls.items()}
        self._broken: list[Finding] = []
        self._folder = folder
        self._rounds = rounds
        self._on_progress = on_progress
        self._plans = plans_of(options, folder, urls)
        self._fleet = Fleet(self._plans, folder / "nodes")
        self._proxy = Proxy(routes_of(self._plans), folder / "nodes" / "proxy.log")
        self._chance = Random(f"silences {options.seed}")
        self._current_faults: dict[str, Happening] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._placed: set[tuple[str, str]] = set()
        self._ending: set[str] = set()
        self._failed_ends = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager around :meth:`run`: no process remains."""
        with self._fleet, self._proxy:
            try:
                yield
            finally:
                for engine in self.engines.values():
                    engine.dispose()

    def run(self) -> Run:
        """Run all phases."""
        self._start()
        begun = now_us()
        self._inject_faults()
        until = now_us()
        self._check_flow(until)
        self._settle()
        ended = now_us()
        self._stop()
        self.phase = "checking"
        self._on_progress(self)
        findings = self._check()
        flow = read_flow(self._engines_of("producer"), self._engines_of("consumer"))
        return Run(self.options, self._folder, self._rounds, findings, self.happenings, begun, until, ended, flow)

    # The phases

    def _start(self) -> None:
        for name, plan in self._plans.items():
            plan.folder.mkdir(parents=True, exist_ok=True)
            self._fleet.start(name)
        self._wait_until_all_ready()

    def _inject_faults(self) -> None:
        self.phase = "striking"
        begin = time.monotonic()
        for one in self._rounds:
            start = begin + (one.number - 1) * self.options.period
            self._call(start, lambda number=one.number: setattr(self, "round", number))  # type: ignore[misc]
            for strike in one.strikes:
                self._call(start + strike.after, lambda strike=strike, number=one.number: self._begin(strike, number))  # type: ignore[misc]
                self._call(start + strike.after + strike.down, lambda strike=strike: self._end(strike))  # type: ignore[misc]
            for strike in self._program_faults(one.number):
                self._call(start + strike.after, lambda strike=strike, number=one.number: self._begin(strike, number))  # type: ignore[misc]
                self._call(start + strike.after + strike.down, lambda strike=strike: self._end(strike))  # type: ignore[misc]
        self._call(begin + len(self._rounds) * self.options.period, lambda: None)
        while self._due:
            self._poll_nodes(0.5)
        self._wait_until_all_ready()

    def _check_flow(self, since_us: int) -> None:
        """Check that every mode places messages again after the faults, before anything is closed."""
        self.phase = "settling"
        deadline = time.monotonic() + self.options.patience
        left = {mode_of(name).name for name in self.options.modes}
        placed_since = sa.select(business.c.mode).where(business.c.at_us > since_us).distinct()
        while left and time.monotonic() < deadline:
            self._poll_nodes(0.3)
            for engine in self._engines_of("producer").values():
                with contextlib.suppress(sa.exc.DBAPIError), snapshot(engine) as connection:
                    left -= set(connection.scalars(placed_since))
        for mode in sorted(left):
            self._add_finding("unsettled", mode, "all producers", "after the faults it placed nothing more")

    def _settle(self) -> None:
        self.phase = "settling"
        producers = self._of("producer")
        for name in producers:
            self._fleet.send(name, "close")
        deadline = time.monotonic() + self.options.patience
        settling = Settling(self.engines, self._broker_url, [mode_of(name) for name in self.options.modes])
        with settling:
            while left := {(name, mode) for name in producers for mode in self.options.modes} - self._placed:
                self._poll_nodes(0.2)
                if settling.moved():
                    deadline = time.monotonic() + self.options.patience
                if time.monotonic() > deadline:
                    for name, mode in sorted(left):
                        self._add_finding("unsettled", mode, name, "it did not finish placing after it was told to")
                    break
            quiet_since: float | None = None
            while True:
                self._poll_nodes(0.3)
                now = time.monotonic()
                if settling.moved():
                    deadline = now + self.options.patience
                    quiet_since = None
                if settling.settled:
                    quiet_since = quiet_since or now
                    if now - quiet_since > QUIET_SECONDS:
                        return
                elif now > deadline:
                    for mode, what, detail in settling.waiting():
                        self._add_finding("unsettled", mode, what, detail)
                    return

    def _stop(self) -> None:
        for name in self._of("program"):
            self._ending.add(name)
            self._fleet.kill(name)
        for kind in ("producer", "consumer", "broker"):
            names = [name for name in self._of(kind) if name in self._fleet.running]
            self._ending.update(names)
            for name in names:
                self._fleet.send(name, "end")
            deadline = time.monotonic() + self.options.patience
            while left := set(names) & set(self._fleet.running):
                self._poll_nodes(0.2)
                if time.monotonic() > deadline:
                    for name in sorted(left):
                        self._add_finding("failed", "", name, "it did not end when it was told to")
                        self._fleet.kill(name)

    def _check(self) -> Findings:
        findings = check(
            self._engines_of("producer"), self._engines_of("consumer"), [mode_of(name) for name in self.options.modes]
        )
        for one in self._broken:
            findings.add(one.what, one.mode, one.subject, one.detail)
        for name in self._of("broker"):
            disk = RealDisk(self._plans[name].folder / "data", read_only=True)
            try:
                damages = list(check_log(disk))
            finally:
                disk.close()
            for damage in damages:
                findings.add("failed", "", name, f"its log is damaged: {damage}")
        return findings

    # Faults

    def _begin(self, strike: Strike, number: int) -> None:
        name = strike.node
        self._on_healthy(name)
        if name not in self._fleet.running:
            self._fleet.start(name)  # it ended by itself a moment ago
        match strike.blow:
            case Blow.KILL:
                self._fleet.kill(name)
            case Blow.PAUSE:
                self._fleet.pause(name)
            case Blow.FILL:
                set_full(self._plans[name].folder, True)
            case Blow.CUT:
                self._proxy.cut(name)
            case Blow.SILENCE:
                self._proxy.silence(name, **self._chance.choice(SILENCES))
        self.struck[name] = strike.blow
        self._current_faults[name] = Happening(number, name, strike.blow, now_us(), 0)

    def _end(self, strike: Strike) -> None:
        name = strike.node
        match strike.blow:
            case Blow.KILL:
                self._fleet.start(name)
                if not self._fleet.ready(name):
                    return  # healthy when it is ready
            case Blow.PAUSE:
                self._fleet.resume(name)
            case Blow.FILL:
                set_full(self._plans[name].folder, False)
            case Blow.CUT:
                self._proxy.heal(name)
            case Blow.SILENCE:
                self._proxy.heal(name, reset=self._chance.random() < 0.5)
        self._on_healthy(name)

    def _on_healthy(self, name: str) -> None:
        """Record the end of a node's fault: it is healthy again, or the next fault begins."""
        self.struck.pop(name, None)
        happening = self._current_faults.pop(name, None)
        if happening is not None:
            self.happenings.append(replace(happening, until_us=now_us()))

    def _program_faults(self, number: int) -> list[Strike]:
        """Plan kills of programs, which take many seconds to start, only in some rounds."""
        after, down = self._chance.random() * self.options.period / 2, self.options.period / 4
        due = number % PROGRAM_ROUNDS == PROGRAM_ROUNDS // 2
        return [Strike(name, Blow.KILL, after, down) for name in self._of("program") if due]

    # Nodes

    def _poll_nodes(self, seconds: float) -> None:
        """Handle messages of nodes for up to ``seconds``, and run due actions."""
        if self._due:
            seconds = min(seconds, self._due[0][0] - time.monotonic())
        for message in self._fleet.receive(seconds):
            self._handle(message)
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        self._on_progress(self)

    def _handle(self, message: NodeMessage) -> None:
        name = message.node
        match message.words:
            case ("ready", _):
                self._on_healthy(name)
            case ("placed", mode):
                self._placed.add((name, mode))
            case ("failed", mode, text):
                self._add_finding("failed", mode, name, text)
            case ("stopped", text):
                _log.warning("%s could not run: %s", name, text)
            case ("ended", code):
                self._on_ended(name, int(code))

    def _on_ended(self, name: str, code: int) -> None:
        if name in self._ending:
            if code:
                self._add_finding("failed", "", name, f"it ended with code {code} when it was told to end")
            return
        if self.struck.get(name) is Blow.KILL and name not in self._fleet.running:
            return
        self._failed_ends += 1
        self._add_finding("failed", "", name, f"it ended by itself with code {code}; see nodes/{name}.log")
        if self._failed_ends > MOST_ENDS:
            raise Unknown(
                Code.DISCONNECTED, f"{name} ended by itself with code {code}, and others before it", self._hint
            )
        self._call(time.monotonic() + REST_SECONDS, lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        if name not in self._fleet.running and self.struck.get(name) is not Blow.KILL:
            self._fleet.start(name)

    def _wait_until_all_ready(self) -> None:
        deadline = time.monotonic() + self.options.patience
        while waiting := [name for name in self._plans if not self._fleet.ready(name)]:
            self._poll_nodes(0.2)
            if time.monotonic() > deadline:
                raise Unknown(Code.TIMED_OUT, f"{', '.join(waiting)} did not become ready", self._hint)

    def _call(self, due: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due, next(self._order), act))

    def _add_finding(self, what: str, mode: str, subject: str, detail: str) -> None:
        self._broken.append(Finding(what, mode, subject, detail))

    def _of(self, kind: str) -> list[str]:
        return [name for name in self._plans if name.startswith(kind)]

    def _engines_of(self, kind: str) -> dict[str, sa.Engine]:
        return {name: self.engines[name] for name in self._of(kind)}

    @property
    def _broker_url(self) -> str:
        plans: list[Any] = [self._plans[name] for name in self._of("broker")]
        return "escrow://" + ",".join(f"127.0.0.1:{plan.port}" for plan in plans)

    @property
    def _hint(self) -> str:
        return f"see the logs in {self._folder / 'nodes'}"
