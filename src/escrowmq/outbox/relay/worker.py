"""One worker of a relay: leases lanes, reads, sends and marks rows, in one thread. Workers share only the target."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from escrowmq import hooks
from escrowmq.errors import Code, Misuse
from escrowmq.outbox.dialects import Dialect, in_a_line
from escrowmq.outbox.relay import marking
from escrowmq.outbox.relay.holding import Holding
from escrowmq.outbox.relay.leases import Leases
from escrowmq.outbox.relay.metrics import Counters, due_now, lag_seconds
from escrowmq.outbox.relay.options import RelayOptions
from escrowmq.outbox.relay.reading import Reader, outgoing
from escrowmq.outbox.relay.verdicts import Rules, Verdict, judge
from escrowmq.outbox.tables import State
from escrowmq.outbox.targets.seam import Codes, Target
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

_log = logging.getLogger(__name__)
PROBE_ROWS = 16
"""Rows of a batch that probes whether a target is back."""
CHECK_SECONDS = 1.0
"""Interval of the checks for due RETRYING rows and operator actions, unless ``redelivery_interval`` is shorter."""
AWAY = (DBAPIError, DisconnectionError, PoolTimeout)
"""The errors of a database that is away, full, locked, or being upgraded."""
LAG_SECONDS = 1.0
"""Interval of the lag measurements; longer if they take long."""
LANE_ZERO = 0
"""The worker that has this lane purges for all."""


class SharedTarget:
    """One target for all workers: one at a time sends, and all back off after a failure. Thread-safe."""

    def __init__(self, target: Target, backoff: Backoff) -> None:
        self._target = target
        self._lock = threading.Lock()
        self.backoff = backoff

    def send(self, batch: Any) -> Codes:
        """Send a batch and return one code per row: DISCONNECTED (unknown) for all if the target raises anything but
        Misuse."""
        if not hooks.installed:
            return self._send(batch)
        with hooks.around(hooks.Call("relay", count=batch.num_rows, columns=batch)) as call:
            call.result = codes = self._send(batch)
        return codes

    def _send(self, batch: Any) -> Codes:
        with self._lock:
            try:
                return np.asarray(self._target.send(batch), np.uint8)
            except Misuse:
                raise
            except Exception as problem:
                known = self.backoff.failing  # the traceback is in the log already
                _log.log(
                    logging.DEBUG if known else logging.ERROR, "the target failed: %r", problem, exc_info=not known
                )
                return np.full(batch.num_rows, Code.DISCONNECTED, np.uint8)

    def partly_there(self) -> bool:
        """Return whether one of the target's several brokers answers a probe; False for a target that cannot report
        it."""
        probe = getattr(self._target, "partly_there", None)
        if probe is None:
            return False
        with self._lock:
            return bool(probe())


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step."""

    read: int = 0
    sent: int = 0
    pause: float = 0.0
    """Seconds until the next step makes sense (a target or database is away)."""


class Worker:
    """One thread's share of a relay. :meth:`step` raises Misuse only; a database that is away becomes a pause."""

    def __init__(
        self, number: int, dialect: Dialect, target: SharedTarget, options: RelayOptions, counters: Counters
    ) -> None:
        self._number = number
        self._dialect, self._target, self._options, self._counters = dialect, target, options, counters
        self.leases = Leases(dialect, options.name, options.lease)
        self._reader = Reader(dialect, self.leases.owner, options.batch_rows, options.batch_bytes)
        self._check_seconds = min(CHECK_SECONDS, options.redelivery_interval)
        aside = min(max(options.backoff, 1.0), options.redelivery_interval)
        holds = options.on_exhausted == "hold_key"
        self._rules = Rules(options.redeliveries, to_us(options.redelivery_interval), to_us(aside), holds)
        self._holding = Holding(dialect, holds, self._check_seconds)
        self._marker = marking.Marker(dialect, self.leases, not options.keep and not options.await_callback)
        self._database = Backoff(options.backoff, options.backoff_max)
        self._connection: sa.Connection | None = None
        self._clock_ahead = 0
        self._next_retries = self._next_unconfirmed = self._next_purge = self._next_lag = 0.0
        self._was_idle = False

    def step(self) -> Step:
        """Keep the leases, read a batch, send it, mark it. Returns how many rows were read and sent, or a pause while
        target or database is away."""
        if pause := self._database.left():
            return Step(pause=pause)
        try:
            step = self._step()
            self._measure(step)
        except AWAY as problem:
            return self._on_database_failure(problem)
        if self._database.worked():
            _log.info("the database is back")
        return step

    def due_in(self) -> float:
        """Return the seconds until the next step makes sense; 0: no row of the table, in any worker's lane, is to be
        sent now, so that nothing is left to do.

        If the database is away, the pause before the next try.
        """
        try:
            due = due_now(self._dialect, self._connect(), self._rules.waiting_holds)
        except AWAY as problem:
            return self._on_database_failure(problem).pause
        reach("relay.looked")
        return max(min(self.leases.due_in(), self._options.poll_interval), 0.01) if due else 0.0

    def close(self) -> None:
        """Release the lanes, measure the lag once more, and close the connection. Logs a database that is away."""
        try:
            self.leases.give_back()
            self._next_lag = 0.0
            self._measure(Step())
        except AWAY as problem:
            text = "the lanes could not be given back, they come free with their leases: %s"
            _log.warning(text, in_a_line(problem))
        self._disconnect()
        self._counters.set_lanes(self._number, 0)

    # One step

    def _step(self) -> Step:
        if self.leases.keep():
            self._holding.invalidate()
            self._counters.set_lanes(self._number, len(self.leases.lanes))
        if not self.leases.lanes:
            return Step()
        if pause := self._target.backoff.left():
            return Step(pause=pause)
        self._holding.refresh(self.leases.lanes)
        connection = self._connect()
        rows = self._read(connection)
        connection.commit()  # needed on SQLite engines with a listener that begins transactions
        reach("relay.read")
        step = self._relay(connection, rows) if rows else Step()
        if not step.pause:
            self._maintain(connection)
        connection.commit()
        return step

    def _read(self, connection: sa.Connection) -> list[Any]:
        """Return the rows to send next: RETRYING rows that are due, at times, then PENDING ones; few while the target
        is away."""
        lanes, probing = self.leases.lanes, PROBE_ROWS if self._target.backoff.failing else None
        retries: list[Any] = []
        now = time.monotonic()
        if now >= self._next_retries:
            most = probing or max(self._options.batch_rows // 4, 1)
            retries = self._reader.due(connection, lanes, State.RETRYING, self._now_us(), most)
            self._next_retries = now if len(retries) == most else now + self._check_seconds
        return retries + self._reader.pending(connection, lanes, probing)

    def _relay(self, connection: sa.Connection, rows: list[Any]) -> Step:
        rows, behind = self._holding.split(rows)
        verdict = Verdict()
        if rows:
            batch = outgoing(rows)
            reach("relay.built")
            if not self.leases.valid:  # paused for longer than the lease: another worker may have the lanes
                self.leases.forget()
                return Step(read=len(rows))
            codes = self._target.send(batch)
            reach("relay.sent")
            given = (rows, codes, self._holding.heads, self._rules, self._now_us())
            verdict = judge(*given)
            if verdict.away is not None and self._target.partly_there():
                verdict = judge(*given, partly_there=True)
            if verdict.away is not None:
                self._counters.add(target_failures=1)
                text = f"the target takes nothing ({verdict.away.name}); nothing is counted"
                return Step(read=len(rows), pause=_pause(self._target.backoff, text))
            if self._target.backoff.worked():
                _log.info("the target is back")
        self._mark(connection, rows, verdict, behind)
        reach("relay.marked")
        waiting = [aside for aside in verdict.aside if aside.state is State.WAITING]
        for aside in waiting:
            _log.error("message %d needs an operator after %d refusals: %s", aside.seq, aside.attempts, aside.error)
        sent = len(verdict.sent)
        self._counters.add(sent=sent, refused=verdict.refused, waiting=len(waiting), batches=int(sent > 0))
        return Step(read=len(rows) + len(behind), sent=sent)

    def _mark(
        self, connection: sa.Connection, rows: list[Any], verdict: Verdict, behind: Sequence[tuple[int, int]]
    ) -> None:
        sent = len(verdict.sent)
        try:
            if sent == len(rows) and not behind and not verdict.freed:
                marked = self._marker.mark_all(connection, rows)
            else:
                marked, mine = self._marker.mark_mixed(rows, verdict, behind)
                for key in verdict.freed:
                    self._holding.heads.pop(key, None)
                self._holding.heads.update({key: seq for key, seq in verdict.heads.items() if key[0] in mine})
        except AWAY:
            self._counters.add(repeated=sent)
            self._holding.invalidate()  # it is unknown what was written
            raise
        if marked < sent:
            _log.info("%d of %d sent messages were not this worker's to mark any more", sent - marked, sent)
            self._counters.add(repeated=sent - marked)
            self.leases.forget()

    # Periodic work

    def _measure(self, step: Step) -> None:
        """Measure the lag of the table for the statistics, if this is worker 0: periodically, and at once when ``step``
        is the first to read no rows."""
        begun, ended = time.monotonic(), not step.read and not self._was_idle
        self._was_idle = not step.read
        if self._number == 0 and (ended or begun >= self._next_lag):
            connection = self._connect()
            self._counters.set_lag(lag_seconds(self._dialect, connection))
            connection.commit()
            now = time.monotonic()
            self._next_lag = now + max(LAG_SECONDS, 20 * (now - begun))

    def _maintain(self, connection: sa.Connection) -> None:
        now, options = time.monotonic(), self._options
        if options.await_callback and now >= self._next_unconfirmed:
            full = self._send_unconfirmed(connection)
            self._next_unconfirmed = now if full else now + min(options.redelivery_interval / 4, 5.0)
        if LANE_ZERO in self.leases.lanes and now >= self._next_purge:
            states = (State.DONE,) if options.await_callback else (State.SENT, State.DONE)
            purged = marking.purge(self._dialect, connection, self._now_us() - to_us(options.keep), states)
            self._counters.add(purged=purged)
            self._next_purge = now if purged >= marking.PURGE_ROWS else now + options.purge_interval

    def _send_unconfirmed(self, connection: sa.Connection) -> bool:
        """Send SENT rows again whose callback is overdue; those with no attempts left become WAITING. Returns whether
        there may be more."""
        before, most = self._now_us() - self._rules.interval_us, max(self._options.batch_rows // 4, 1)
        rows = self._reader.due(connection, self.leases.lanes, State.SENT, before, most)
        if exhausted := [row for row in rows if row.attempts >= self._rules.redeliveries]:
            waiting = marking.give_up(self._dialect, self.leases, exhausted)
            self._counters.add(waiting=waiting)
            _log.error("%d messages need an operator: sent, and no callback came", waiting)
        if again := [row for row in rows if row.attempts < self._rules.redeliveries]:
            codes = self._target.send(outgoing(again))
            reach("relay.sent_again")
            self._counters.add(redelivered=marking.count_resends(self._dialect, self.leases, again, codes))
        return len(rows) == most

    # The database

    def _on_database_failure(self, problem: Exception) -> Step:
        self._counters.add(database_failures=1)
        text = f"the database failed: {in_a_line(problem)}"
        self._disconnect()
        self._holding.invalidate()
        return Step(pause=_pause(self._database, text))

    def _connect(self) -> sa.Connection:
        """Return this worker's open connection, on which each statement is a transaction of its own."""
        if self._connection is None:
            self._connection = self._dialect.single.connect()
            self._clock_ahead = 0
        self._connection.commit()  # ends SQLAlchemy's transaction; the database has none open
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except AWAY:
                connection.invalidate()

    def _now_us(self) -> int:
        """Return microseconds since 1970, approximately by the database's clock, which is read once per connection."""
        if not self._clock_ahead:
            now_us = int(self._connect().scalar(sa.select(self._dialect.now_us)) or 0)
            self._clock_ahead = now_us - time.monotonic_ns() // 1000
        return time.monotonic_ns() // 1000 + self._clock_ahead


def _pause(backoff: Backoff, text: str) -> float:
    """Count a failure in ``backoff`` and log ``text``, the first time as a warning, then as a detail. Returns the
    seconds to back off."""
    level = logging.DEBUG if backoff.failing else logging.WARNING
    pause = backoff.failed()
    _log.log(level, "%s; next try in %.1f s", text, pause)
    return pause
