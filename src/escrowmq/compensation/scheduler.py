"""The scheduler: takes the difference of the two sets, looks every id up, and sees to it that each has its effect once.

One run, in this order:

1. Suspended, or the store's epoch changed: recover (``recovery.py``). Without success only step 2.
2. Cases that a person wants tried again: by the database alone.
3. Runs whose lease has ended, its own that were left for later among them: adopted.
4. The difference, of keys announced longer ago than ``grace`` by the brokers' clock: taken, part after part, until
   nothing is left.
5. ``settled_us`` of the journal is raised.

Each id is settled in the store only when it was dealt with, or a row of ``trans_compensation_case`` waits for a person.
Whoever dies before leaves its run, which another adopts when its lease ends; whatever is done twice finds its mark.
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
from escrowmq.compensation.effects import DatabaseEffects, Effects
from escrowmq.compensation.feeds import KeyFeed, TopicKeys
from escrowmq.compensation.halves import POLL, keys_group
from escrowmq.compensation.journal import Database, Journal
from escrowmq.compensation.recovery import MARGIN, Recovery
from escrowmq.compensation.remedies import (
    Commit,
    Committing,
    Fate,
    Finding,
    Handle,
    LookedUp,
    LookUps,
    Remedy,
    Resend,
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
Resender = Callable[[bytes, LookedUp | None], object]

CHUNK = 200
"""Ids that are looked up, handled and settled together; the lease is renewed before each chunk."""
_SOON = 0.001
"""Seconds: the shortest lease, for what anybody may adopt."""
THREADS = 8
"""Look-ups and commits under way at once."""


class _StoreFailed(Exception):
    """The set store failed in the middle of a run; what it was is its cause."""

    def __init__(self, problem: EscrowError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Scheduler:
    """Repairs one compensation, whose name is that of ``sets``. Several may run at once, in any number of processes. A
    context manager.

    - ``topics``: of the messages (a name, or several). ``keys``: the key topic, or a :class:`KeyFeed` for keys of
      another broker.
    - ``group`` (None: the name of ``sets``): whose marks the effects have, that is the consumer group of the messages.
      ``keys_group``: that of the half-set consumer (None: as :class:`HalfSetConsumer` has it).
    - ``remedy``: ``"handle"`` runs ``handler(session, message)`` in a transaction of ``database`` (or ``effects``,
      where the effect is elsewhere) and then commits the half message; ``"commit"`` only commits it; ``"resend"`` calls
      ``resend(message_id, message)``, see :class:`Resend`.
    - ``grace`` (60): seconds that an announcement is left alone; choose it longer than a message usually takes to be
      handled, or every message is looked up. ``limit`` (1,000): ids of one run of the store; ``lease`` (60): seconds
      that it holds.
    - ``max_attempts`` (5) tries of an id that fails or is found nowhere, ``retry_after`` (30) seconds apart; then it is
      a case for a person.
    - ``keep_commits`` (7 days): seconds that an entry of the commit set waits for its announcement. One that is dropped
      too early costs a look-up.

    Raises Misuse(BAD_ARGUMENT) for what does not fit together, and as :class:`Journal`.
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
        self._feed = _feed(bus, keys, sets.name, keys_group)
        self._threads = ThreadPoolExecutor(THREADS, "escrowmq-compensation")
        wanted = [topics] if isinstance(topics, str) else list(topics)
        self._lookups = LookUps(bus, wanted, self._threads)
        marks = sets.name if group is None else group
        if effects is None and handler is not None:
            effects = DatabaseEffects(database, handler, marks)
        self._remedy = _remedy(remedy, effects, resend, Committing(bus, self._threads), self._lookups)
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
        return self._counters.now()

    def run(self, every: float, stop: threading.Event | None = None) -> None:
        """:meth:`run_once` every ``every`` seconds until ``stop`` is set or :meth:`close` was called. A broker, store
        or database that is away is waited for; Misuse (no tables, another schema version, ...) is raised."""
        ended = self._stop if stop is None else stop
        while not self._stopped(stop):
            begun = time.monotonic()
            try:
                self.run_once(stop)
            except Misuse:
                raise
            except EscrowError as problem:
                if problem.code is Code.CLOSED and self._closed:
                    return
                logger.warning("a run of compensation %s broke off: %s", self.name, problem)
            except DBAPIError as problem:
                logger.warning("a run of compensation %s broke off: %s", self.name, in_a_line(problem))
            while (left := begun + every - time.monotonic()) > 0 and not self._stopped(stop):
                ended.wait(min(left, POLL))

    def run_once(self, stop: threading.Event | None = None) -> Report:
        """One run, as the module says; what it did. A set store that fails is no error: the compensation is suspended,
        and the report says so. After ``stop`` it takes no more.

        Raises Misuse, the database's own errors, Overloaded or Unknown if no broker answers, and Unknown(CLOSED) after
        :meth:`close`.
        """
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
                self._retry(counts)
                if standing is not None:
                    self._adopt(counts, stop)
                    self._take(counts, stop)
                    reach("compensation.settled")
                    self._raise_settled()
            except _StoreFailed as failure:
                self._recovery.suspend(failure.problem)
                suspended = str(failure.problem)
        except BaseException:
            self._counters.broke_off()
            raise
        report = Report(suspended=suspended, recovered=self._recovery.recovered - before, **counts)
        self._counters.ran(report, **self._levels(suspended is None))
        return report

    def close(self) -> None:
        """End :meth:`run`, after the ids that it is at, and let threads go; the set store and the bus are the caller's.
        Idempotent."""
        self._stop.set()
        with self._running:
            self._closed = True
            self._threads.shutdown()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Where ids come from

    def _retry(self, counts: Counter[str]) -> None:
        """Retry the cases that an operator wants retried. Two schedulers may both: the marks tell."""
        ids = self._cases.to_retry(self._limit)
        counts["retried"] += len(ids)
        for at in range(0, len(ids), CHUNK):
            self._deal(ids[at : at + CHUNK], counts)

    def _adopt(self, counts: Counter[str], stop: threading.Event | None) -> None:
        seen: set[str] = set()
        while not self._stopped(stop):
            run = self._of_store(lambda: self._sets.adopt(self._lease, MAX_IDS))
            if run is None or run.name in seen:
                return
            seen.add(run.name)
            counts["adopted"] += len(run.ids)
            self._work(run, counts, stop)

    def _take(self, counts: Counter[str], stop: threading.Event | None) -> None:
        before_us = max(self._feed.now_us() - self._grace_us, 0)
        while not self._stopped(stop):
            run = self._of_store(lambda: self._sets.take(before_us, self._limit, self._lease))
            if run is None:
                break
            reach("compensation.taken")
            counts["taken"] += len(run.ids)
            self._work(run, counts, stop)
        self._of_store(lambda: self._sets.forget_commits(max(time.time_ns() // 1000 - self._keep_us, 0)))

    def _work(self, run: Run, counts: Counter[str], stop: threading.Event | None) -> None:
        """Deal with the ids of a run; the rest is retried after ``retry_after``."""
        left = 0
        for at in range(0, len(run.ids), CHUNK):
            if self._stopped(stop):
                left += len(run.ids) - at
                break
            if at and not self._of_store(lambda: self._sets.renew(run.name, self._lease)):
                return  # whoever adopted it has settled all of it
            chunk = run.ids[at : at + CHUNK]
            done = self._deal(chunk, counts)
            left += len(chunk) - len(done)
            self._of_store(lambda: self._sets.settle(run.name, done))  # noqa: B023
            counts["settled"] += len(done)
        if left:
            self._of_store(
                lambda: self._sets.renew(run.name, _SOON if self._stopped(stop) else max(self._retry_after, _SOON))
            )

    def _of_store(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except EscrowError as problem:
            if problem.code is Code.BAD_ARGUMENT:
                raise
            raise _StoreFailed(problem) from problem

    # What is done with them

    def _deal(self, ids: Sequence[bytes], counts: Counter[str]) -> list[bytes]:
        """Look them up and help; those that may be settled in the store: dealt with, or a case for a person."""
        by_person = self._cases.settled(ids)
        findings = self._lookups.find([identity for identity in ids if identity not in by_person])
        wanted = [one for one in findings if self._is_for_remedy(one)]
        results = dict(zip([one.message_id for one in wanted], self._remedy.apply(wanted), strict=True))
        for finding in findings:
            if finding.message_id not in results:
                results[finding.message_id] = _without_remedy(finding)
        early = sum(one.state is State.VISIBLE for one in findings)
        done = [identity for identity, result in results.items() if result.fate is Fate.DONE]
        conflicts = {identity: one.reason for identity, one in results.items() if one.fate is Fate.CONFLICT}
        failed = {identity: one.reason for identity, one in results.items() if one.fate is Fate.FAILED}
        self._cases.conflicts(conflicts)
        stuck = self._cases.failed(failed)
        self._cases.done(done)
        reach("compensation.case-written")
        for identity, reason in (conflicts | {one: failed[one] for one in stuck}).items():
            logger.warning("compensation %s: message %s waits for a person: %s", self.name, identity.hex(), reason)
        for name in ("effects", "committed", "resent"):
            counts[name] += sum(getattr(one, name) for one in results.values())
        counts["early"] += early
        counts["away"] += sum(one.fate is Fate.LATER for one in results.values())
        counts["failed"] += len(failed) - len(stuck)
        counts["waiting"] += len(conflicts) + len(stuck)
        return [*by_person, *done, *conflicts, *stuck]

    def _is_for_remedy(self, finding: Finding) -> bool:
        if finding.state is State.NOWHERE:
            return self._remedy.resends
        return finding.state in (State.OPEN, State.VISIBLE)

    def _stopped(self, stop: threading.Event | None) -> bool:
        return self._stop.is_set() or (stop is not None and stop.is_set())

    # The journal

    def _raise_settled(self) -> None:
        """See ``settled_us`` in ``journal.py``. The order is what makes it right: how the journal stood, what is
        acknowledged, what the store holds, and whether it still is the store that it was. A key that is acknowledged is
        in the store before, so at one of the two places it is seen."""
        seen = self._journal.read()
        acknowledged_us = self._feed.acknowledged_us()
        if seen is None or acknowledged_us is None:
            return
        sizes = self._of_store(self._sets.sizes)
        if self._of_store(self._sets.epoch) != seen.epoch:
            return
        oldest_us = acknowledged_us if sizes.oldest_us is None else min(sizes.oldest_us, acknowledged_us)
        reach("compensation.settled-known")
        self._journal.raise_settled(seen, oldest_us)

    def _levels(self, sized: bool) -> dict[str, float]:
        """Gauges after a run; what cannot be asked now stays as it was."""
        levels: dict[str, float] = {}
        counted = count_cases(self._database, self.name)
        levels["cases"] = sum(counted[state] for state in WAITING)
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


def _without_remedy(finding: Finding) -> Result:
    if finding.state is State.AWAY:
        return Result(Fate.LATER, finding.text)
    return Result(Fate.CONFLICT if finding.state is State.REFUSED else Fate.FAILED, finding.text)


def _feed(bus: Bus, keys: str | KeyFeed, name: str, group: str | None) -> KeyFeed:
    return TopicKeys(bus, keys, group or keys_group(name)) if isinstance(keys, str) else keys


def _remedy(
    name: RemedyName, effects: Effects | None, resend: Resender | None, committing: Committing, lookups: LookUps
) -> Remedy:
    if name == "handle" and effects is not None:
        return Handle(effects, committing)
    if name == "commit":
        return Commit(committing)
    if name == "resend" and resend is not None:
        return Resend(resend, lookups)
    hint = 'remedy="handle" with a handler or effects, remedy="resend" with a function, or remedy="commit"'
    raise Misuse(Code.BAD_ARGUMENT, f"remedy = {name!r} cannot work with what was given", hint)
