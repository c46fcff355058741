"""Syncs one round while the writer decides the next, and answers the round before at the same time.

One sync runs at a time, and answers are given strictly in order, so none leaves before everything older is durable. Two
threads take turns: while one answers a round the other syncs the next, because the disk would be idle otherwise. A
third round is synced only when the first is answered, so synced rounds without answers are bounded.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_Act = Callable[[], object]


class Committer:
    """Two threads that start when they are needed. All methods belong to the writer."""

    def __init__(self) -> None:
        self._commits: queue.Queue[tuple[_Act, _Act] | None] = queue.Queue()
        self._syncing = threading.Lock()  # from put until the round is synced, and its answers are being given
        self._answering = threading.Lock()  # while answers are given
        self._threads: list[threading.Thread] = []

    def put(self, sync: _Act, tell: _Act) -> None:
        """Run ``sync`` for a round on another thread, then ``tell``, which answers it; both after those of earlier
        rounds. Waits while a sync runs. Neither may raise."""
        self._syncing.acquire()
        if not self._threads or (self._answering.locked() and len(self._threads) < 2):
            self._threads.append(threading.Thread(target=self._work, name="escrowmq-committer", daemon=True))
            self._threads[-1].start()
        self._commits.put((sync, tell))

    def wait(self) -> bool:
        """Wait until no round is being synced. Returns whether it had to wait."""
        if self._syncing.acquire(blocking=False):
            self._syncing.release()
            return False
        with self._syncing:
            return True

    def drain(self) -> None:
        """Wait until all rounds are synced and answered."""
        with self._syncing, self._answering:
            pass

    def close(self) -> None:
        """Wait until all rounds are synced and answered, and end the threads."""
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


def _run(act: _Act) -> None:
    try:
        act()
    except Exception:  # a round that cannot answer must not keep the next ones from it
        logger.exception("a round could not be committed")
