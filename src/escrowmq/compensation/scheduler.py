"""The scheduler: takes the difference of the two sets, looks every id up, and ensures that each has its effect once.

One run, in this order:

1. If suspended, or if the store's epoch changed: recover (``recovery.py``). Without success only step 2 runs.
2. Cases with a requested retry: they need only the database.
3. Adopt runs whose lease has expired, including deferred ones of this scheduler.
4. Take the difference, of keys announced longer ago than ``grace`` by the brokers' clock, part by part, until it is
   empty.
5. Raise ``settled_us`` of the journal.

An id is settled in the store only when it was repaired, or when a row of ``trans_compensation_case`` waits for an
operator. After a crash before that, another scheduler adopts the run when its lease expires; repeated work finds its
mark.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from sqlalchemy.exc import DBAPIError

from escrowmq.client.bus import Bus
from escrowmq.compensation.cases import WAITING, Cases, count_cases
from escrowmq.compensation.effects import DatabaseEffects
from escrowmq.compensation.feeds import KeyFeed, TopicKeys
from escrowmq.compensation.halves import POLL
from escrowmq.compensation.journal import Database, Journal
from escrowmq.compensation.recovery import MARGIN, Recovery
from escrowmq.compensation.remedies import (
    Commit,
    Effects,
    Fate,
    Handle,
    LookUps,
    Remedy,
    Resend,
    Resender,
    Result,
    State,
)
from escrowmq.compensation.sets.seam import MAX_IDS, Run, SetStore
from escrowmq.compensation.statistics import Counters, Report, Statistics
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.outbox.dialects import in_a_line
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

logger = logging.getLogger(__name__)

RemedyName = Literal["handle", "commit", "resend"]

CHUNK = 200
"""Ids that are looked up, handled and settled together; the lease is renewed before each chunk."""
_BRIEF = 0.001
"""Shortest lease (s), for runs that any scheduler may adopt at once."""
THREADS = 8
"""Concurrent look-ups and commits."""
_FATES = {State.AWAY: Fate.LATER, State.REFUSED: Fate.CONFLICT}
"""The fate of an id without a remedy, unless it FAILED."""


class _StoreError(Exception):
    """The set store failed during a run, with this text."""


class Scheduler:
    """Repairs one compensation, with the name of ``sets``. Several may run at once, in any processes. A context
    manager.

    - ``topics``: topics of the messages (one name or several). ``keys``: the key topic, or a :class:`KeyFeed` for keys
      of another broker.
    - ``group`` (None: the name of ``sets``): consumer group of the messages, which owns the marks. ``keys_group``: that
      of the half-set consumer (None: as in :class:`HalfSetConsumer`).
    - ``remedy``: ``"handle"`` runs ``handler(session, message)`` in a transaction of ``database`` (or ``effects`` for
      effects stored elsewhere) and then commits the half message; ``"commit"`` only commits it; ``"resend"`` calls
      ``resend(message_id, message)``, see :class:`Resend`.
    - ``grace`` (60): minimum age (s) of an announcement; choose it longer than handling a message usually takes, or
      every message is looked up. ``limit`` (1,000): ids per run of the store; ``lease`` (60): its duration (s).
    - ``max_attempts`` (5) tries of an id that fails or is found nowhere, ``retry_after`` (30) seconds apart; then it
      becomes a case for an operator.
    - ``keep_commits`` (7 days): seconds that a commit-set entry waits for its announcement. Too short a time costs a
      look-up.

    Raises Misuse(BAD_ARGUMENT) for arguments that do not fit together, and as :class:`Journal`.
    """

    def __init__(
        self,
        bus: Bus,
        database: Database,
        sets: SetStore,
        *,
        topics: str | Sequence[str],
        keys: str | KeyFeed,
        group: str | None = None,
        keys_group: str | None = None,
        remedy: RemedyName = "handle",
        handler: Callable[[Any, Any], object] | None = None,
        effects: Effects | None = None,
        resend: Resender | None = None,
        grace: float = 60.0,
        limit: int = 1_000,
        lease: float = 60.0,
        max_attempts: int = 5,
        retry_after: float = 30.0,
        keep_commits: float = 7 * 86_400.0,
        margin: float = MARGIN,
    ) -> None:
        if not 0 < limit <= MAX_IDS or max_attempts < 1 or min(grace, retry_after, keep_commits) < 0 or lease <= 0:
            text = f"limit is 1 to {MAX_IDS}, max_attempts at least 1, a lease more than 0, no time negative"
            raise Misuse(Code.BAD_ARGUMENT, text)
        self.name = sets.name
        self._database = database
        self._sets = sets
        self._feed = keys if not isinstance(keys, str) else TopicKeys(bus, keys, keys_group or f"{sets.name}.keys")
        self._threads = ThreadPoolExecutor(THREADS, "escrowmq-compensation")
        self._lookups = LookUps(bus, [topics] if isinstance(topics, str) else topics, self._threads)
        marks = sets.name if group is None else group
        if effects is None and handler is not None:
            effects = DatabaseEffects(database, handler, marks)
        self._remedy = _make_remedy(remedy, effects, resend, Commit(bus, self._threads), self._lookups)
        self._journal = Journal(database, sets.name)
        self._recovery = Recovery(self._journal, sets, self._feed, marks, margin)
        self._cases = Cases(database, sets.name, max_attempts)
        self._grace_us, self._keep_us = to_us(grace), to_us(keep_commits)
        self._limit, self._lease, self._retry_after = limit, lease, retry_after
        self._counters = Counters()
        self._stop = threading.Event()
        self._running = threading.RLock()
        self._closed = False

    @property
    def statistics(self) -> Statistics:
        """The counters of this scheduler. Thread-safe."""
        return self._counters.snapshot()

    def run(self, every: float, stop: threading.Event | None = None) -> None:
        """Call :meth:`run_once` every ``every`` seconds until ``stop`` is set or :meth:`close` is called. Waits while a
        broker, store or database is unavailable; raises Misuse (no tables, another schema version, ...)."""
        ended = self._stop if stop is None else stop
        while not self._is_stopped(stop):
            begun = time.monotonic()
            try:
                self.run_once(stop)
            except Misuse:
                raise
            except (EscrowError, DBAPIError) as problem:
                if isinstance(problem, EscrowError) and problem.code is Code.CLOSED and self._closed:
                    return
                logger.warning("a run of compensation %s was aborted: %s", self.name, in_a_line(problem))
            while (left := begun + every - time.monotonic()) > 0 and not self._is_stopped(stop):
                ended.wait(min(left, POLL))

    def run_once(self, stop: threading.Event | None = None) -> Report:
        """Do one run (see the module) and return its report; no new ids are taken after ``stop``. A failed set store is
        not an error: the compensation is suspended, and the report states it. Raises Misuse, the database's own errors,
        Overloaded or Unknown if no broker responds, and Unknown(CLOSED) after :meth:`close`."""
        with self._running:
            if self._closed:
                raise error(Code.CLOSED, "the scheduler is closed")
            return self._run(stop)

    def _run(self, stop: threading.Event | None) -> Report:
        counts: Counter[str] = Counter()
        before = self._recovery.recovered
        suspended: str | None = None
        try:
            try:
                standing = self._recovery.ensure()
                if standing is None:
                    suspended = str(self._recovery.problem or "another process recovers it")
                retried = self._cases.find_to_retry(self._limit)  # by two schedulers, perhaps: there are marks
                counts["retried"] += len(retried)
                for at in range(0, len(retried), CHUNK):
                    self._process(retried[at : at + CHUNK], counts)
                if standing is not None:
                    self._adopt(counts, stop)
                    self._take(counts, stop)
                    reach("compensation.settled")
                    self._raise_settled()
            except _StoreError as failure:
                suspended = str(failure)
                self._recovery.suspend(suspended)
        except BaseException:
            self._counters.add_aborted_run()
            raise
        report = Report(suspended=suspended, recovered=self._recovery.recovered - before, **counts)
        self._counters.add_run(report, **self._read_gauges(suspended is None))
        return report

    def close(self) -> None:
        """Stop :meth:`run` after the current ids and release threads; set store and bus stay open. Idempotent."""
        self._stop.set()
        with self._running:
            self._closed = True
            self._threads.shutdown()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sources of ids

    def _adopt(self, counts: Counter[str], stop: threading.Event | None) -> None:
        seen: set[str] = set()
        while not self._is_stopped(stop):
            run = self._call_store(lambda: self._sets.adopt(self._lease, MAX_IDS))
            if run is None or run.name in seen:
                return
            seen.add(run.name)
            counts["adopted"] += len(run.ids)
            self._process_run(run, counts, stop)

    def _take(self, counts: Counter[str], stop: threading.Event | None) -> None:
        before_us = max(self._feed.now_us() - self._grace_us, 0)
        while not self._is_stopped(stop):
            run = self._call_store(lambda: self._sets.take(before_us, self._limit, self._lease))
            if run is None:
                break
            reach("compensation.taken")
            counts["taken"] += len(run.ids)
            self._process_run(run, counts, stop)
        self._call_store(lambda: self._sets.forget_commits(max(time.time_ns() // 1000 - self._keep_us, 0)))

    def _process_run(self, run: Run, counts: Counter[str], stop: threading.Event | None) -> None:
        """Process the ids of a run; unsettled ones are retried after ``retry_after``."""
        left = 0
        for at in range(0, len(run.ids), CHUNK):
            if self._is_stopped(stop):
                left += len(run.ids) - at
                break
            if at and not self._call_store(lambda: self._sets.renew(run.name, self._lease)):
                return  # the scheduler that adopted it has settled all of it
            chunk = run.ids[at : at + CHUNK]
            done = self._process(chunk, counts)
            left += len(chunk) - len(done)
            self._call_store(lambda: self._sets.settle(run.name, done))  # noqa: B023
            counts["settled"] += len(done)
        if left:
            pause = _BRIEF if self._is_stopped(stop) else max(self._retry_after, _BRIEF)
            self._call_store(lambda: self._sets.renew(run.name, pause))

    def _call_store(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EscrowError as problem:
            if problem.code is Code.BAD_ARGUMENT:
                raise
            raise _StoreError(str(problem)) from problem

    # Processing of ids

    def _process(self, ids: Sequence[bytes], counts: Counter[str]) -> list[bytes]:
        """Look up and repair ids. Returns those to settle in the store: repaired, or a case for an operator."""
        by_person = self._cases.find_settled(ids)
        findings = self._lookups.find([identity for identity in ids if identity not in by_person])
        repairable = {State.OPEN, State.VISIBLE} | ({State.NOWHERE} if self._remedy.resends else set())
        wanted = [one for one in findings if one.state in repairable]
        results = {one.message_id: Result(_FATES.get(one.state, Fate.FAILED), one.text) for one in findings}
        results |= zip([one.message_id for one in wanted], self._remedy.apply(wanted), strict=True)
        done = [identity for identity, result in results.items() if result.fate is Fate.DONE]
        conflicts = {identity: one.reason for identity, one in results.items() if one.fate is Fate.CONFLICT}
        failed = {identity: one.reason for identity, one in results.items() if one.fate is Fate.FAILED}
        self._cases.record_conflicts(conflicts)
        stuck = self._cases.record_failures(failed)
        self._cases.record_done(done)
        reach("compensation.case-written")
        for identity, reason in (conflicts | {one: failed[one] for one in stuck}).items():
            logger.warning("compensation %s: message %s waits for an operator: %s", self.name, identity.hex(), reason)
        for name in ("effects", "committed", "resent"):
            counts[name] += sum(getattr(one, name) for one in results.values())
        counts["early"] += sum(one.state is State.VISIBLE for one in findings)
        counts["away"] += sum(one.fate is Fate.LATER for one in results.values())
        counts["failed"] += len(failed) - len(stuck)
        counts["waiting"] += len(conflicts) + len(stuck)
        return [*by_person, *done, *conflicts, *stuck]

    def _is_stopped(self, stop: threading.Event | None) -> bool:
        return self._stop.is_set() or (stop is not None and stop.is_set())

    # The journal

    def _raise_settled(self) -> None:
        """Raise ``settled_us`` (see ``journal.py``). The order makes it correct: read the journal, the acknowledged
        time and the store's contents, then check that the store is still the same. A key is in the store before it is
        acknowledged, so it is counted in at least one of the two places."""
        seen = self._journal.read()
        acknowledged_us = self._feed.acknowledged_us()
        if seen is None or acknowledged_us is None:
            return
        sizes = self._call_store(self._sets.sizes)
        if self._call_store(self._sets.epoch) != seen.epoch:
            return
        oldest_us = acknowledged_us if sizes.oldest_us is None else min(sizes.oldest_us, acknowledged_us)
        reach("compensation.settled-known")
        self._journal.raise_settled(seen, oldest_us)

    def _read_gauges(self, sized: bool) -> dict[str, float]:
        """Return the gauges after a run; an unavailable value keeps its previous state."""
        counted = count_cases(self._database, self.name)
        levels: dict[str, float] = {"cases": sum(counted[state] for state in WAITING)}
        if sized:
            try:
                sizes = self._sets.sizes()
                levels |= {"half_set": sizes.half, "commit_set": sizes.commits, "in_runs": sizes.taken}
                standing = self._journal.read()
                if standing is not None:
                    levels["settled_age"] = max(self._feed.now_us() - standing.settled_us, 0) / 1e6
            except EscrowError as problem:
                logger.info("compensation %s: not all could be counted: %s", self.name, problem)
        return levels


def _make_remedy(
    name: RemedyName, effects: Effects | None, resend: Resender | None, commit: Commit, lookups: LookUps
) -> Remedy:
    if name == "handle" and effects is not None:
        return Handle(effects, commit)
    if name == "commit":
        return commit
    if name == "resend" and resend is not None:
        return Resend(resend, lookups)
    hint = 'remedy="handle" with a handler or effects, remedy="resend" with a function, or remedy="commit"'
    raise Misuse(Code.BAD_ARGUMENT, f"remedy = {name!r} lacks an argument or is unknown", hint)
