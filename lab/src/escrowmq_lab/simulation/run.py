"""One run: brokers, clients and faults of a plan, until everything has settled; then its history is checked."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

import greenlet

from escrowmq.broker.writer.engine import Engine
from escrowmq.client.bus import Bus
from escrowmq.client.links.link import ServedLink
from escrowmq.errors import EscrowError
from escrowmq.testing.disks import Mode
from escrowmq.wire.addresses import DEFAULT_PORT, Address
from escrowmq_lab.checker import Violation, check
from escrowmq_lab.history import Act, Event, History, Kind
from escrowmq_lab.simulation import threads
from escrowmq_lab.simulation.brokers import Broker
from escrowmq_lab.simulation.carrier import FrameCheck
from escrowmq_lab.simulation.machine import EPOCH_US, machine
from escrowmq_lab.simulation.network import End, Network, NetworkOptions
from escrowmq_lab.simulation.plan import Fault, Plan
from escrowmq_lab.simulation.scheduler import Node, Scheduler, Stuck, Task
from escrowmq_lab.simulation.watch import Watch
from escrowmq_lab.workloads import WORKLOADS, Role

PATIENCE = 400.0
"""Virtual time (s) for settling after everything is healed."""
_HEALED = NetworkOptions(latency=0.001)


@dataclass(slots=True)
class Result:
    """The result of a run. ``digest`` is that of its trace: the same for the same plan. ``steps`` counts turns of tasks
    until the end, or until the first violation."""

    seed: int
    digest: str
    steps: int
    seconds: float
    violations: list[Violation]
    counts: dict[str, int]
    trace: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether every promise held."""
        return not self.violations


class Broken(Exception):
    """A promise broken in the middle of a run, which ends there."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class SimulatedHistory(History):
    """A history in virtual time."""

    def __init__(self, scheduler: Scheduler, on_event: Callable[[Event], None]) -> None:
        super().__init__()
        self._scheduler, self._told = scheduler, on_event

    def add(self, process: str, act: Act, kind: Kind, **details: Any) -> None:
        """Record an event now."""
        event = Event(process, act, kind, **details, at_us=EPOCH_US + self._scheduler.now_ns // 1000)
        self.events.append(event)
        self._told(event)


class SimulatedSite:
    """A process with a role; see :class:`escrowmq_lab.workloads.Site`."""

    def __init__(self, run: Run, role: Role) -> None:
        self.name = role.name
        self.role = role
        self.history: History = run.history
        self.chance = Random(f"{run.plan.seed} {role.name}")
        self.kept: dict[str, Any] = {}
        self.shared = run.shared
        self.node = Node(role.name)
        self.finished = False
        self._run = run

    @property
    def ended(self) -> bool:
        """Return whether no new work may begin."""
        return self._run.healed

    def connect(self) -> Bus:
        """Return a bus to all brokers."""
        return Bus(self._links())

    def connect_each(self) -> list[Bus]:
        """Return a bus to each of the brokers."""
        return [Bus([link]) for link in self._links()]

    def _links(self) -> list[ServedLink]:
        tls = self._run.plan.carrier.client_context
        return [ServedLink([Address(broker.name, DEFAULT_PORT)], follow=False, tls=tls) for broker in self._run.brokers]

    @property
    def seconds(self) -> float:
        """Virtual time."""
        return self._run.scheduler.seconds

    def together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run each call as a task of this node."""
        tasks = [threads.Thread(target=call, name=f"{self.name}-{number}") for number, call in enumerate(calls)]
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()

    def pause(self, seconds: float) -> None:
        """Wait for a while."""
        self._run.scheduler.park(seconds)

    def now_us(self) -> int | None:
        """Return the time by the brokers' clocks, if none of them may jump."""
        jumps = "clock jumps" in self._run.plan.kinds
        return None if jumps else EPOCH_US + self._run.scheduler.now_ns // 1000

    def launch(self) -> None:
        """Start the process, or restart a killed one."""
        self.node = Node(self.name)
        self._run.scheduler.spawn(self.node, self._work, self.name)

    def _work(self) -> None:
        node = self.node
        try:
            self.role.run(self, self.role.plan)
        except EscrowError as problem:
            self._run.tell(f"{self.name} ends with {problem.code.name}: {problem}")
            self.kill(0.5)
            self._run.scheduler.die()
        if self.node is node:
            self.finished = True

    def kill(self, seconds: float) -> None:
        """Kill the process, and restart it after a while."""
        if self.node.dead:
            return
        self.history.add(self.name, Act.KILL, Kind.OK)
        self.node.dead = True
        self._run.network.drop_node(self.node)
        self._run.scheduler.after(seconds, self.launch)


class Run:
    """See the module. ``keep``: keep the whole trace."""

    def __init__(self, plan: Plan, *, keep: bool = False) -> None:
        self.plan = plan
        self.healed = False
        self.violations: list[Violation] = []
        self.shared: dict[str, Any] = {}
        self._keep = keep
        self._digest = hashlib.blake2b(digest_size=8)
        self._trace: list[str] = []
        self.scheduler = Scheduler(
            Random(f"{plan.seed} turns"), preemption=plan.preemption, most_turns=round(20_000 * plan.seconds)
        )
        self.scheduler.died = self._on_task_died
        self.network = Network(self.scheduler, Random(f"{plan.seed} network"), plan.network, self.tell)
        if not plan.carrier.tls:
            self.network.opened = self._check_frames
        self.history = SimulatedHistory(self.scheduler, self._on_event)
        self.watch = Watch(self._add_violation)
        chance = Random(f"{plan.seed} brokers")
        self.brokers = [
            Broker(
                self.scheduler,
                self.network,
                chance,
                f"broker-{n}",
                plan.settings,
                plan.sync_seconds,
                self.watch.recovered,
                self.tell,
                plan.carrier.accept,
            )
            for n in range(plan.brokers)
        ]
        self.sites = [SimulatedSite(self, role) for role in plan.roles]

    # Trace

    def tell(self, line: str) -> None:
        """Add a line to the trace."""
        line = f"{self.scheduler.seconds:12.6f} {line}"
        self._digest.update(line.encode() + b"\n")
        if self._keep:
            self._trace.append(line)

    def _on_event(self, event: Event) -> None:
        self.tell(event.line())
        self.watch.see(event)

    def _add_violation(self, violation: Violation) -> None:
        if not self.violations:
            self.steps_then = self.scheduler.turns
        self.violations.append(violation)
        self.tell(f"VIOLATION {violation}")

    def _check_frames(self, near: End, far: End) -> None:
        frames = FrameCheck(self._on_bad_frame)
        near.on_sent = partial(frames.on_bytes, from_client=True)
        far.on_sent = partial(frames.on_bytes, from_client=False)

    def _on_bad_frame(self, wrong: str) -> None:
        self._add_violation(Violation("carrier", "a connection", wrong))

    def _on_task_died(self, task: Task) -> None:
        problem = task.problem
        self._add_violation(Violation("died", task.name, f"a thread of {task.node.name} ended by {problem!r}"))

    # The run

    def result(self) -> Result:
        """Run it, and check its history."""
        self.steps_then = 0
        wrong_wall = Random(f"{self.plan.seed} wall").choice((0, -3_600_000_000, 3_600_000_000))
        with (
            _capture_logs(self._on_log_record),
            self.plan.carrier.install(self._on_bad_frame),
            machine(self.scheduler, Random(f"{self.plan.seed} product"), self.network.connect, lambda: wrong_wall),
        ):
            try:
                self._phases()
            except Stuck as stuck:
                self._add_violation(Violation("stuck", "the run", str(stuck)))
            finally:
                self.scheduler.end()
        counts: dict[str, int] = {}
        if not self.violations:
            counts = self._check()
        counts |= {"crashes": sum(b.crashes for b in self.brokers), "starts": sum(b.starts for b in self.brokers)}
        self.tell(f"the end, after {self.scheduler.turns} turns")
        steps = self.steps_then or self.scheduler.turns
        return Result(
            self.plan.seed,
            self._digest.hexdigest(),
            steps,
            self.scheduler.seconds,
            self.violations,
            counts,
            self._trace,
        )

    def _phases(self) -> None:
        plan, run = self.plan, self.scheduler
        for broker in self.brokers:
            broker.start()
        for site in self.sites:
            site.launch()
        for fault in plan.faults:
            run.after(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        run.run(lambda: bool(self.violations), plan.seconds)
        if self.violations:
            return
        self._heal()
        settled = run.run(lambda: bool(self.violations) or self._has_settled(), run.seconds + PATIENCE)
        if not settled and not self.violations:
            for line in run.where():
                self.tell(line)
            self._add_violation(Violation("no progress", "the run", self._pending_work()))
        if not self.violations:
            self._audit()

    def _check(self) -> dict[str, int]:
        events = self.history.events
        report = check(events, check_max=self.plan.settings.check_max)
        for violation in [*report.violations, *WORKLOADS[self.plan.workload].check(events)]:
            self._add_violation(violation)
        return dict(report.counts)

    def _on_log_record(self, record: logging.LogRecord) -> None:
        """Report internal errors that the product logs as findings."""
        if self.scheduler.over:
            return
        problem = record.exc_info[1] if record.exc_info else None
        self.tell(f"{record.levelname} {record.getMessage()}")
        if problem is not None and not isinstance(problem, EscrowError | OSError | greenlet.GreenletExit):
            self._add_violation(Violation("failed", record.name, f"{record.getMessage()}: {problem!r}"))

    # Faults

    def _inject(self, fault: Fault) -> None:
        if self.healed:
            return
        self.tell(str(fault))
        broker = self.brokers[fault.target % len(self.brokers)]
        site = self.sites[fault.other % len(self.sites)]
        match fault.kind:
            case "crash" | "clock jumps" | "crash while starting":
                if fault.kind == "clock jumps":
                    broker.skew_us += (fault.target % 7 - 3) * 500_000_000 - broker.skew_us
                broker.crash(cast(Mode, fault.mode))
                self.scheduler.after(fault.seconds, lambda: self._start(broker))
                if fault.kind == "crash while starting":
                    broker.disk.crash_at = broker.disk.operations + fault.count
                    self.scheduler.after(fault.seconds + 0.5, lambda: self._start(broker))
            case "crash at a write":
                broker.crash_in(fault.count)
                self.scheduler.after(fault.seconds + 1.0, lambda: self._start(broker))
            case "clean restart":
                self._stop(broker, fault.seconds)
            case "kill client":
                site.kill(fault.seconds)
            case "cut":
                self.network.cut(site.name, broker.name)
            case "stall":
                ends = (site.name, broker.name)
                self.network.stall(*(ends if fault.count % 2 else ends[::-1]), 3 * fault.seconds)
            case "disk full":
                broker.disk.budget = sum(map(len, broker.disk.files().values()))
                self.scheduler.after(fault.seconds, lambda: setattr(broker.disk, "budget", None))
            case "sync fails":
                broker.disk.fail_next_sync = True
                self.scheduler.after(fault.seconds + 1.0, lambda: self._replace(broker))

    def _start(self, broker: Broker) -> None:
        if not broker.up:
            broker.start()

    def _replace(self, broker: Broker) -> None:
        """Restart a broker whose disk failed, like its operator."""
        broker.disk.fail_next_sync = False
        engine = broker.engine
        if engine is not None and (engine.shard.failure or engine.log.acts.failure):
            broker.crash("kept")
            self._start(broker)

    def _stop(self, broker: Broker, seconds: float) -> None:
        """Stop its process as a signal does, then start it again."""
        engine, calls = broker.engine, broker.calls
        if not broker.up or engine is None or calls is None:
            return
        broker.engine = broker.calls = None

        def stop() -> None:
            calls.give_back()
            engine.stop()
            calls.close()
            if broker.up:
                broker.crash("kept")
                self.scheduler.after(seconds, lambda: self._start(broker))
            self.scheduler.die()

        self.scheduler.spawn(broker.node, stop, f"{broker.name}-stop")

    def _heal(self) -> None:
        """End all faults: every node runs, and everything works."""
        self.tell("everything is healed")
        self.healed = True
        self.network.options = _HEALED
        for broker in self.brokers:
            broker.disk.budget, broker.disk.fail_next_sync, broker.disk.crash_at = None, False, None
            self.scheduler.after(0.0, lambda broker=broker: self._replace(broker))  # type: ignore[misc]
            self.scheduler.after(1.0, lambda broker=broker: self._start(broker))  # type: ignore[misc]

    # The end

    def _has_settled(self) -> bool:
        """Decide whether every plan is done, every transaction is settled, and everything is consumed."""
        return self._is_probably_settled() and not self._pending_work()

    def _is_probably_settled(self) -> bool:
        """Check most of :meth:`_pending_work` at a tenth of the cost."""
        for site in self.sites:
            if site.node.dead or not (site.finished or site.kept.get("receives")):
                return False
        for broker in self.brokers:
            engine = broker.engine
            if engine is None or engine.shard.failure is not None or not self.watch.rests(engine):
                return False
        return True

    def _pending_work(self) -> str:
        left = [
            f"{site.name} is not done"
            for site in self.sites
            if site.node.dead or not (site.finished or site.kept.get("receives"))
        ]
        for broker in self.brokers:
            engine = broker.engine
            if engine is None or engine.shard.failure is not None:
                left.append(f"{broker.name} is not there: {broker.problem}")
                continue
            left += self.watch.left(broker.name, engine)
        left += WORKLOADS[self.plan.workload].left(self.shared)
        return "; ".join(left + self._missing_groups())

    def _missing_groups(self) -> list[str]:
        """Return consumer groups that are not at every broker yet, or deleted and not created again."""
        engines = [broker.engine for broker in self.brokers if broker.engine is not None]
        groups = [{group["name"] for group in self.watch.groups(engine)} for engine in engines]
        every = set(WORKLOADS[self.plan.workload].remade).union(*groups)
        return [
            f"the group {name} is not everywhere" for name in sorted(every) if any(name not in one for one in groups)
        ]

    def _audit(self) -> None:
        for broker in self.brokers:
            engine = broker.engine
            assert engine is not None  # it has settled
            self._read(broker, engine)

    def _read(self, broker: Broker, engine: Engine) -> None:
        for act, details in self.watch.audited(engine):
            self.history.add("audit", act, Kind.OK, **details, broker=broker.name)


@contextmanager
def _capture_logs(on_event: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Capture the product's log records in the block; nothing is printed."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            on_event(record)

    logger, handler = logging.getLogger("escrowmq"), Handler(logging.WARNING)
    before, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        logger.setLevel(level)
