"""Syncs one round of commands on its own thread while the writer already decides the next round.

At most a few rounds wait here, strictly in order, so an answer never leaves before everything older is durable. The
log itself has one hand-over in the air at a time; the writer waits for it before it hands over the next.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_DEPTH = 2

logger = logging.getLogger(__name__)


class Committer:
    """One thread that runs commits in order; it starts with the first. ``put`` and ``drain`` belong to the writer."""

    def __init__(self) -> None:
        self._commits: queue.Queue[Callable[[], None] | None] = queue.Queue(_DEPTH)
        self._thread: threading.Thread | None = None

    def put(self, commit: Callable[[], None]) -> None:
        """Run ``commit`` after those before it; waits when too many do. It must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="escrowmq-committer", daemon=True)
            self._thread.start()
        self._commits.put(commit)

    def drain(self) -> None:
        """Wait until all have run."""
        if self._thread is not None:
            self._commits.join()

    def close(self) -> None:
        """Run what waits, end the thread."""
        if self._thread is not None:
            self._commits.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (commit := self._commits.get()) is not None:
            try:
                commit()
            except Exception:  # a round that cannot answer must not keep the next ones from it
                logger.exception("a round could not be committed")
            finally:
                self._commits.task_done()
        self._commits.task_done()
