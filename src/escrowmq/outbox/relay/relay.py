"""The public :class:`Relay`: start, stop, run, drain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.migrations import check_schema
from escrowmq.outbox.relay.backlog import Backlog, read_backlog
from escrowmq.outbox.relay.options import RelayOptions
from escrowmq.outbox.relay.statistics import Counters, Statistics
from escrowmq.outbox.relay.waking import Bell, Listener, Pause
from escrowmq.outbox.relay.worker import SharedTarget, Worker
from escrowmq.outbox.targets.seam import Target
from escrowmq.platform.backoff import Backoff

_log = logging.getLogger(__name__)


class Relay:
    """Moves the messages of one database to one target until stopped. Several at once share the work.

    ``engine`` is a blocking SQLAlchemy engine, ``target`` see :mod:`escrowmq.outbox.targets.seam` (the caller closes
    it), ``options`` those of :class:`RelayOptions`. A context manager: entering starts it in the background. Raises
    Misuse for a bad option.
    """

    def __init__(self, engine: sa.Engine, target: Target, **options: Any) -> None:
        try:
            self.options = RelayOptions(**options)
        except TypeError as problem:
            raise Misuse(Code.BAD_SETTING, f"relay: {problem}") from None
        self._engine = engine
        self._dialect = Dialect(engine)
        self._counters = Counters()
        self._target = SharedTarget(target, Backoff(self.options.backoff, self.options.backoff_max))
        self._stopping = threading.Event()
        self._stops = 0
        self._threads: list[threading.Thread] = []
        self._bell = Bell(self.options.workers)
        self._problem: BaseException | None = None
        self._single: Worker | None = None
        self._here = threading.RLock()  # one thread at a time uses the worker and its connection
        self._stepping = False  # its holder is within a step: it may be interrupted by a signal handler

    # In the background

    def start(self) -> None:
        """Start the workers. Raises Misuse(NO_TABLES, SCHEMA_VERSION); a database that is away is waited for."""
        if self._threads:
            raise Misuse(Code.BAD_ARGUMENT, "the relay is running already")
        self._check_tables()
        self._problem = None
        self._listener = Listener(self._engine, self._bell)
        self._listener.start()
        workers = [self._worker(number) for number in range(self.options.workers)]
        try:
            for worker in workers:
                worker.leases.announce()
        except sa.exc.DBAPIError as problem:
            _log.warning("the database is away: %s", problem.orig)
        self._threads = [
            threading.Thread(target=self._work, args=(number, worker), name=f"escrowmq-relay-{number}", daemon=True)
            for number, worker in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the batches in hand, give the lanes back. Idempotent. Raises what ended a worker, if anything did."""
        self.ask_to_stop()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        if threads:
            self._listener.stop()
        self._let_go()
        self._stopping.clear()  # here and not at the next start: a signal that came before it counts
        if threads and self._problem is not None:
            raise self._problem

    def ask_to_stop(self) -> None:
        """Stop soon; returns at once (for signal handlers)."""
        self._stops += 1
        self._stopping.set()
        self._bell.ring()

    def run(self) -> None:
        """Run until :meth:`ask_to_stop` or :meth:`stop` is called elsewhere, or a worker fails; raises what it failed
        with."""
        self.start()
        try:
            self.wait()
        finally:
            self.stop()

    def wait(self) -> None:
        """Return when it is asked to stop, or a worker fails."""
        while self._threads and not self._stopping.wait(
            0.2
        ):  # never for ever: signals are handled when this thread wakes
            pass

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wake(self) -> None:
        """Look at the table now: for producers in this process, where the database does not notify."""
        self._bell.ring()

    @property
    def statistics(self) -> Statistics:
        """What was done so far, and how it stands."""
        return self._counters.now()

    # In the caller's thread

    def run_once(self) -> int:
        """One batch, in the caller's thread, of whatever lanes are free; how many messages were sent.

        The lanes stay leased until :meth:`stop`: call it, or :meth:`drain`, at the end. Raises Misuse(NO_TABLES, ...).
        """
        with self._alone():
            return self._worker_here().step().sent

    def drain(self, timeout: float | None = None) -> bool:
        """Send, in the caller's thread, until the table holds nothing that is to be sent now; False if it still does
        after ``timeout`` seconds.

        Rows in lanes that another relay has leased are waited for: it sends them, or, if it is dead, its leases end
        (``lease`` seconds after its last word) and its lanes are taken over. A refused row that waits for its next try,
        and what waits for a person, is not waited for; :meth:`backlog` names them. All leases are given back at the
        end. Raises Misuse(NO_TABLES, ...).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        stops = self._stops  # whoever stops it from another thread may be done with it before this one looks
        try:
            while True:
                with self._alone():
                    step = self._worker_here().step()
                    pause = step.pause or (self._worker_here().look() if step.idle else 0.0)
                if step.idle and not pause:
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if self._stopping.is_set() or self._stops != stops or (left is not None and left <= 0):
                    return False
                if pause:
                    self._bell.wait(0, pause if left is None else min(pause, left))
        finally:
            self._let_go()

    def backlog(self) -> Backlog:
        """Count what the table still holds. Raises what the database raises."""
        with self._dialect.single.connect() as connection:
            return read_backlog(self._dialect, connection)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the worker in the caller's thread. Another thread's stop leaves releasing it to this thread."""
        with self._here:
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False
                if self._stopping.is_set():
                    self._let_go()

    def _let_go(self) -> None:
        """Close the worker, once no other thread is within a step."""
        with self._here:
            if self._stepping:  # the caller interrupted the step itself, which does it at its end
                return
            worker, self._single = self._single, None
            if worker is not None:
                worker.close()

    def _worker_here(self) -> Worker:
        if self._threads:
            raise Misuse(
                Code.BAD_ARGUMENT, "the relay is running in the background", "use another Relay, or stop this one"
            )
        if self._single is None:
            self._check_tables()
            self._single = self._worker(0)
        return self._single

    # Inside

    def _check_tables(self) -> None:
        try:
            with self._engine.connect() as connection:
                check_schema(connection)
        except sa.exc.OperationalError as problem:
            _log.warning("the database is away: %s", problem.orig)

    def _worker(self, number: int) -> Worker:
        return Worker(number, self._dialect, self._target, self.options, self._counters)

    def _work(self, number: int, worker: Worker) -> None:
        pause = Pause(self.options.poll_interval)
        try:
            while not self._stopping.is_set():
                step = worker.step()
                most = worker.leases.due_in()  # they want to be renewed
                if step.pause:
                    self._bell.wait(number, min(step.pause, max(most, 0.01)))
                elif step.idle:
                    if self._bell.wait(number, min(pause.take(), max(most, 0.001))):
                        pause.found()
                else:
                    pause.found()
        except BaseException as problem:
            _log.critical("the relay stops: %s", problem)
            self._problem = self._problem or problem
            self.ask_to_stop()
        finally:
            worker.close()
