"""The application of a producer's or consumer's node: a supervised thread per mode, and a producer's relay."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import sqlalchemy as sa

from escrowmq import outbox
from escrowmq.connecting import connect
from escrowmq.errors import Corrupt, Denied, EscrowError, Misuse
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.opening import open_target
from escrowmq_lab.chaos.books import Books
from escrowmq_lab.chaos.disks import fill_database
from escrowmq_lab.chaos.modes import Mode, Site, mode_of
from escrowmq_lab.databases import open_engine

REST_SECONDS = 0.2
"""Pause (s) between a failure and the next attempt, like a supervisor."""
POLL_SECONDS = 0.05
POOL = 24
"""Connections of a node to its database: a thread uses one or two."""
RELAY_TIMEOUT = 2.0
RELAY = {
    "workers": 1,
    "poll_interval": 0.1,
    # The rows leased by a killed relay soon expire.
    "lease": 4.0,
    # A full disk rejects rows of the table; none may wait for an operator because of that.
    "redelivery_interval": 0.5,
    "redeliveries": 1_000_000,
    "backoff_max": 2.0,
}
"""The options of a producer's relay."""
_log = logging.getLogger(__name__)

Say = Callable[..., None]


@dataclass(frozen=True, slots=True)
class ApplicationPlan:
    """Configuration of a producer's or consumer's node."""

    name: str
    kind: str
    number: int
    folder: Path
    database: str
    host: str
    """Its own loopback address, through which it reaches the brokers."""
    url: str
    modes: tuple[str, ...]
    peers: int
    rate: float
    """Messages per second of one mode."""
    seed: str


class Application:
    """A producer or consumer of the run. ``say`` notifies the director. Raises EscrowError from :meth:`run` if it
    fails."""

    def __init__(self, plan: ApplicationPlan, say: Say, starts: int) -> None:
        self._plan = plan
        self._say = say
        self._starts = starts
        self.closing = threading.Event()
        self._ended = threading.Event()
        self._running: Relay | None = None

    def end(self) -> None:
        """Make :meth:`run` return."""
        self.closing.set()
        self._ended.set()
        if self._running is not None:
            self._running.ask_to_stop()

    def run(self) -> None:
        """Produce, or consume, until :meth:`end`."""
        plan = self._plan
        engine = open_engine(plan.database, pool_size=POOL)
        fill_database(engine, plan.folder)
        self._prepare(engine)
        books = Books(engine)
        with connect(plan.url) as bus:
            counter = itertools.count()
            sites = {
                name: Site(
                    plan.name,
                    plan.number,
                    plan.peers,
                    bus,
                    plan.url,
                    engine,
                    books,
                    plan.folder,
                    Random(f"{plan.seed} {self._starts} {name}"),
                    plan.rate,
                    closing=self.closing,
                    ended=self._ended,
                    counter=counter,
                )
                for name in plan.modes
            }
            producer = plan.kind == "producer"
            threads = []
            for name, site in sites.items():
                mode = mode_of(name)()
                work = mode.place if producer else mode.take
                threads.append(threading.Thread(target=self._supervise, args=(mode, work, site), name=name))
            if producer:
                threads.append(threading.Thread(target=self._relay, args=(engine,), name="relay"))
            for thread in threads:
                thread.daemon = True
                thread.start()
            self._say("ready", "")
            if producer:
                self._report_placed(sites)
            self._ended.wait()
            for thread in threads:
                thread.join()
        engine.dispose()

    def _prepare(self, engine: sa.Engine) -> None:
        """Create the tables; the database may be full or unreachable, as at any other time."""
        while True:
            try:
                outbox.migrate(engine)
                Books(engine).make()
                return
            except sa.exc.DBAPIError as problem:
                _log.warning("the tables cannot be made yet: %s", problem.orig)
                self._ended.wait(REST_SECONDS)

    def _report_placed(self, sites: dict[str, Site]) -> None:
        self.closing.wait()
        left = set(sites)
        while left and not self._ended.wait(POLL_SECONDS):
            for mode in [mode for mode in left if sites[mode].placed.is_set()]:
                left.discard(mode)
                self._say("placed", mode)

    def _supervise(self, mode: Mode, work: Callable[[Site], None], site: Site) -> None:
        while not self._ended.is_set():
            try:
                work(site)
            except Exception as problem:
                if self._ended.is_set() and isinstance(problem, EscrowError | sa.exc.DBAPIError):
                    return
                self._on_failure(mode.name, problem)
            self._ended.wait(REST_SECONDS)

    def _relay(self, engine: sa.Engine) -> None:
        """Send the rows that modes write into the outbox table."""
        target = open_target(self._plan.url, timeout=RELAY_TIMEOUT)
        try:
            while not self._ended.is_set():
                relay = self._running = Relay(engine, target, **RELAY)
                try:
                    relay.run()  # until :meth:`end`, or a worker fails
                except Exception as problem:
                    self._on_failure("relay", problem)
                self._ended.wait(REST_SECONDS)
        finally:
            target.close()

    def _on_failure(self, mode: str, problem: Exception) -> None:
        """Log a failure that programs must expect; report any other one (a bug, or corrupt data) as a finding."""
        expected = isinstance(problem, EscrowError | sa.exc.DBAPIError)
        if expected and not isinstance(problem, Misuse | Corrupt | Denied | sa.exc.IntegrityError):
            _log.warning("%s: %s: %s", mode, type(problem).__name__, str(problem).splitlines()[0])
            return
        _log.exception("%s failed", mode, exc_info=problem)
        self._say("failed", mode, f"{type(problem).__name__}: {problem}"[:500])
