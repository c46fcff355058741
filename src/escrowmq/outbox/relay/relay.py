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
from escrowmq.outbox.relay.metrics import Backlog, Counters, Statistics, read_backlog
from escrowmq.outbox.relay.options import RelayOptions
from escrowmq.outbox.relay.waking import Bell, Listener, Pause
from escrowmq.outbox.relay.worker import SharedTarget, Worker
from escrowmq.outbox.targets.seam import Target
from escrowmq.platform.backoff import Backoff

_log = logging.getLogger(__name__)


class Relay:
    """Moves the messages of one database to one target until stopped. Several at once share the work.

    ``engine`` is a blocking SQLAlchemy engine; the caller closes the ``target`` (:mod:`escrowmq.outbox.targets.seam`);
    ``options`` are those of :class:`RelayOptions`. A context manager: entering starts it in the background. Raises
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
        self._stepping = False  # whether its holder, which a signal handler may interrupt, is within a step

    # In the background

    def start(self) -> None:
        """Start the workers in the background. While the database is away, they retry. Raises Misuse(NO_TABLES |
        SCHEMA_VERSION), Misuse(BAD_ARGUMENT) if the relay is running."""
        if self._threads:
            raise Misuse(Code.BAD_ARGUMENT, "the relay is running already")
        self._check_tables()
        self._problem = None
        self._listener = Listener(self._engine, self._bell)
        self._listener.start()
        workers = [self._make_worker(number) for number in range(self.options.workers)]
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
        """Stop the workers after their current batches, wait for them, and release the lanes. Idempotent. Raises the
        error of a worker that failed."""
        self.ask_to_stop()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        if threads:
            self._listener.stop()
        self._close_worker()
        self._stopping.clear()  # here, because a signal before the next start counts
        if threads and self._problem is not None:
            raise self._problem

    def ask_to_stop(self) -> None:
        """Make workers, :meth:`run` and :meth:`drain` stop after their current batch; returns at once (for signal
        handlers)."""
        self._stops += 1
        self._stopping.set()
        self._bell.ring()

    def run(self) -> None:
        """Run until :meth:`ask_to_stop` or :meth:`stop` is called elsewhere. Raises the error of a failed worker."""
        self.start()
        try:
            self.wait()
        finally:
            self.stop()

    def wait(self) -> None:
        """Block until a stop is requested or a worker fails. Raises nothing: :meth:`stop` raises the worker's error."""
        while self._threads and not self._stopping.wait(0.2):
            pass  # with a timeout, because signals are handled when this thread wakes

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wake(self) -> None:
        """Make all workers poll the table now: for producers in this process, where the database does not notify."""
        self._bell.ring()

    @property
    def statistics(self) -> Statistics:
        """The counts so far, and the state now."""
        return self._counters.now()

    # In the caller's thread

    def run_once(self) -> int:
        """Send one batch of any free lanes, in the caller's thread. Returns how many messages were sent.

        The lanes stay leased until :meth:`stop`: call it, or :meth:`drain`, at the end. Raises Misuse(NO_TABLES, ...).
        """
        with self._use_worker() as worker:
            return worker.step().sent

    def drain(self, timeout: float | None = None) -> bool:
        """Send, in the caller's thread, until no row of the table is to be sent now; then return True. Returns False
        after ``timeout`` seconds, or a stop.

        Waits for rows in lanes of another relay: it sends them, or, if it is dead, its leases end (``lease`` seconds
        after the last renewal) and its lanes are taken over. Does not wait for refused rows before their next try, nor
        for rows that need an operator; :meth:`backlog` counts them. Releases all leases at the end. Raises
        Misuse(NO_TABLES, ...).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        stops = self._stops  # a stop by another thread may begin and end between two checks here
        try:
            while True:
                with self._use_worker() as worker:
                    step = worker.step()
                    pause = step.pause or (0.0 if step.read else worker.due_in())
                if not step.read and not pause:
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if self._stopping.is_set() or self._stops != stops or (left is not None and left <= 0):
                    return False
                if pause:
                    self._bell.wait(0, pause if left is None else min(pause, left))
        finally:
            self._close_worker()

    def backlog(self) -> Backlog:
        """Count the unsent rows. Raises the errors of the database."""
        with self._dialect.single.connect() as connection:
            return read_backlog(self._dialect, connection)

    @contextmanager
    def _use_worker(self) -> Iterator[Worker]:
        """Context manager: the worker for steps in the caller's thread, created at the first use. Closes it at the end
        if a stop was requested meanwhile. Raises Misuse(BAD_ARGUMENT) if the relay runs in the background."""
        with self._here:
            self._stepping = True
            try:
                if self._threads:
                    hint = "use another Relay, or stop this one"
                    raise Misuse(Code.BAD_ARGUMENT, "the relay is running in the background", hint)
                if self._single is None:
                    self._check_tables()
                    self._single = self._make_worker(0)
                yield self._single
            finally:
                self._stepping = False
                if self._stopping.is_set():
                    self._close_worker()

    def _close_worker(self) -> None:
        """Close the worker of :meth:`run_once` and :meth:`drain`, once no other thread is within a step."""
        with self._here:
            if self._stepping:  # called within the step of this thread, which does it at its end
                return
            worker, self._single = self._single, None
            if worker is not None:
                worker.close()

    def _check_tables(self) -> None:
        try:
            with self._engine.connect() as connection:
                check_schema(connection)
        except sa.exc.OperationalError as problem:
            _log.warning("the database is away: %s", problem.orig)

    def _make_worker(self, number: int) -> Worker:
        return Worker(number, self._dialect, self._target, self.options, self._counters)

    def _work(self, number: int, worker: Worker) -> None:
        pause = Pause(self.options.poll_interval)
        try:
            while not self._stopping.is_set():
                step = worker.step()
                most = worker.leases.due_in()  # leases must be renewed
                if step.pause:
                    self._bell.wait(number, min(step.pause, max(most, 0.01)))
                elif step.read or self._bell.wait(number, min(pause.take(), max(most, 0.001))):
                    pause.reset()
        except BaseException as problem:
            _log.critical("the relay stops: %s", problem)
            self._problem = self._problem or problem
            self.ask_to_stop()
        finally:
            worker.close()
