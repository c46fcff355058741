"""Decides when a worker polls the table again: on notification, soon after it found rows, else at growing intervals."""

from __future__ import annotations

import logging
import threading
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from escrowmq.outbox.tables import CHANNEL

_log = logging.getLogger(__name__)
FIRST_PAUSE = 0.005
LISTEN_SECONDS = 0.5
"""Longest wait (s) of the listener before it checks whether to stop."""


class Pause:
    """The poll interval of one worker: 5 ms, then doubling up to the limit."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        """Set the next pause to the shortest one, because there was work."""
        self._next = min(FIRST_PAUSE, self._longest)

    def take(self) -> float:
        """Return the next pause in seconds, because there was no work; double the one after it, up to the longest."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause


class Bell:
    """Wakes all workers of a relay. Thread-safe."""

    def __init__(self, workers: int) -> None:
        self._events = [threading.Event() for _ in range(workers)]

    def ring(self) -> None:
        for event in self._events:
            event.set()

    def wait(self, worker: int, seconds: float) -> bool:
        """Wait for :meth:`ring`, at most ``seconds``. Returns whether it rang."""
        event = self._events[worker]
        rung = event.wait(seconds)
        event.clear()
        return rung


class Listener:
    """Rings the bell when PostgreSQL notifies (``send_tx`` does so in its transaction); does nothing elsewhere.

    It has a connection of its own. While that is lost, the workers poll, and it reconnects every few seconds.
    """

    def __init__(self, engine: sa.Engine, bell: Bell) -> None:
        self._engine, self._bell = engine, bell
        self._stopping = threading.Event()
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="escrowmq-relay-listen", daemon=True)

    def start(self) -> None:
        """Start the listening thread if the database is PostgreSQL with the driver psycopg; else do nothing."""
        if self._engine.dialect.name == "postgresql" and self._engine.dialect.driver == "psycopg":
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        warned = False
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as problem:
                of_driver = type(problem).__module__.partition(".")[0] == "psycopg"
                if not of_driver and not isinstance(problem, SQLAlchemyError | OSError):
                    raise
                if not warned:
                    _log.warning("cannot listen for new messages, polling instead: %s", problem)
                    warned = True
            self.listening.clear()
            self._stopping.wait(2.0)

    def _listen(self) -> None:
        with self._engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            driver: Any = connection.connection.driver_connection
            try:
                driver.execute(f"LISTEN {CHANNEL}")
                self.listening.set()
                while not self._stopping.is_set():
                    for _ in driver.notifies(timeout=LISTEN_SECONDS, stop_after=1):
                        self._bell.ring()
            finally:
                connection.invalidate()  # a connection that listens must not return to the pool
