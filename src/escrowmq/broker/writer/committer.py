"""Syncs one round of commands beside the writer, which decides the next one meanwhile, and gives the answers of the
round before beside both.

One sync is in the air at a time, and answers are given strictly in order, so none leaves before everything older is
durable. Two threads take turns: while one gives the answers of a round the other syncs the next, because a disk that
waits for answers to be given stands still. A third round waits with its sync until the first is answered; so what is
synced and not answered is bounded.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_THREADS = 2

logger = logging.getLogger(__name__)

_Commit = tuple[Callable[[], object], Callable[[], object]]


class Committer:
    """Its threads begin when they are needed. All methods belong to the writer."""

    def __init__(self) -> None:
        self._commits: queue.Queue[_Commit | None] = queue.Queue()
        self._syncing = threading.Lock()  # from put until the round is synced, and its answers are being given
        self._answering = threading.Lock()  # while answers are given
        self._threads: list[threading.Thread] = []

    def put(self, sync: Callable[[], object], tell: Callable[[], object]) -> None:
        """Have a round synced after those before it, and its answers given after theirs. Waits while a sync is in the
        air. Neither must raise."""
        self._syncing.acquire()
        if not self._threads or (self._answering.locked() and len(self._threads) < _THREADS):
            self._threads.append(threading.Thread(target=self._work, name="escrowmq-committer", daemon=True))
            self._threads[-1].start()
        self._commits.put((sync, tell))

    def wait(self) -> bool:
        """Wait until no sync is in the air; whether one was."""
        if self._syncing.acquire(blocking=False):
            self._syncing.release()
            return False
        with self._syncing:
            return True

    def drain(self) -> None:
        """Wait until all is synced and answered."""
        with self._syncing, self._answering:
            pass

    def close(self) -> None:
        """Finish pending work, end the threads."""
        self.drain()
        for _ in self._threads:
            self._commits.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (commit := self._commits.get()) is not None:
            sync, tell = commit
            try:
                _run(sync)
            finally:
                self._answering.acquire()
                self._syncing.release()
            try:
                _run(tell)
            finally:
                self._answering.release()
            del commit, sync, tell  # not kept until the next comes


def _run(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception:  # a round that cannot answer must not keep the next ones from it
        logger.exception("a round could not be committed")
