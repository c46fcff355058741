"""Upkeep of a shard: snapshots, retention, expiry of idle producers, probing a full disk. Part of the writer's rounds.

Rules:

1. Snapshots are taken between rounds, after a sync, and saved on another thread.
2. Retention goes mark, save, drop: the ledger lets go by an event; then a snapshot is saved that no longer needs the
   old segments; only then are they dropped. What is beyond the retention of its topic is released of before, also by an
   event.
3. Producers that were not used for ``producer_expiration`` are forgotten, a bounded number at a time. When they were
   used is in the log, so it does not matter how often a broker is restarted; but for the first minute after a start
   none is forgotten, because those that listen for questions may not be back yet.
4. What fails here stops no request: it is tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from escrowmq.broker.writer.shard import Shard
from escrowmq.errors import EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Forget
from escrowmq.platform.times import to_us

CUT_US = 10_000_000
"""Between two looks at what is beyond the retention of its topic."""
RETENTION_US = 60_000_000
"""Between two retention passes."""
FIRST_US = 1_000_000
"""From the start to the first retention pass."""
FORGET_US = 60_000_000
"""Between two looks for idle producers, and from the start to the first."""
FORGET_ROWS = 10_000
"""Sessions forgotten at a time; while there are more, the next look is ``PAUSE_US`` away."""
PAUSE_US = 1_000_000
"""Between two looks at a full disk."""
RETRY_US = 10_000_000
"""After a snapshot that could not be saved."""

logger = logging.getLogger(__name__)


class Upkeep:
    """The upkeep of one shard. All but the saving itself runs on the writer; ``poke`` wakes it when a save has ended;
    ``connected`` are the producer sessions that listen for questions now."""

    def __init__(self, shard: Shard, poke: Callable[[], None], connected: Callable[[], Int64s]) -> None:
        self._shard = shard
        self._poke = poke
        self._connected = connected
        self._thread = ThreadPoolExecutor(1, "escrowmq-snapshot")
        self._retain_us = shard.time_us + FIRST_US  # soon: a broker may be restarted more often than retention runs
        self._cut_us = self._retain_us
        self._altered = shard.ledger.topics.altered
        self._forget_us = shard.time_us + FORGET_US
        self._probe_us = 0
        self._save_us = 0
        self._marked: int | None = None  # what retention has let go of, and below
        self._droppable: int | None = None  # the same, once a snapshot is saved that does not need it
        self.saving: Future[None] | None = None

    def within_round(self) -> None:
        """Before the round's sync."""
        now = self._shard.time_us
        if self._shard.full and now >= self._probe_us:
            self._probe_us = now + PAUSE_US
            self._shard.probe()
        if self._droppable is not None:
            self._drop(self._droppable)
        topics = self._shard.ledger.topics
        if self._altered != topics.altered:  # a person waits for the space
            self._altered, self._cut_us, self._retain_us = topics.altered, now, now
        if now >= self._cut_us:
            self._cut_us = now + CUT_US if topics.any_own else NEVER_US
            self._shard.cut()
        if now >= self._retain_us:
            self._retain_us = now + RETENTION_US
            self._marked = self._shard.retain()
        if now >= self._forget_us:
            self._forget_us = now + FORGET_US
            self._forget(now)

    def _forget(self, now: int) -> None:
        before_us = now - to_us(self._shard.settings.producer_expiration)
        count = self._shard.execute(Forget(before_us, self._connected(), FORGET_ROWS))
        if count:
            logger.info("forgot %d idle producer sessions", count)
        if count == FORGET_ROWS:
            self._forget_us = now + PAUSE_US

    def _drop(self, position: int) -> None:
        self._droppable = None
        try:
            dropped = self._shard.log.drop_before(position)
            logger.info("retention dropped %d segments below position %d", dropped, position)
        except (EscrowError, OSError) as problem:
            logger.warning("retention could not drop segments: %s", problem)

    @property
    def wants_snapshot(self) -> bool:
        """Whether it is time for a snapshot and none is being saved."""
        if self.saving is not None or self._shard.time_us < self._save_us or self._shard.failure is not None:
            return False
        try:
            return self._marked is not None or self._shard.snapshot_due()
        except EscrowError:
            return False

    def after_round(self) -> None:
        """After the sync of all rounds, if a snapshot is wanted: begin to save one."""
        try:
            if self.wants_snapshot:
                snapshot = self._shard.take_snapshot()
                marked, self._marked = self._marked, None
                self.saving = self._thread.submit(self._shard.save, snapshot)
                self.saving.add_done_callback(lambda saving: self._on_saved(saving, marked))
        except Exception:  # whatever it is, the log alone is enough to restart from
            logger.exception("a snapshot could not be taken")
            self._save_us = self._shard.time_us + RETRY_US

    def _on_saved(self, saving: Future[None], marked: int | None) -> None:
        if (problem := saving.exception()) is None:
            self._droppable = marked
        else:
            logger.warning("a snapshot could not be saved: %s", problem)
            self._save_us = self._shard.time_us + RETRY_US
        self.saving = None
        self._poke()

    @property
    def wake_us(self) -> int:
        """:meth:`within_round` has nothing to do before this."""
        if self._droppable is not None or self._altered != self._shard.ledger.topics.altered:
            return 0
        wake_us = min(self._retain_us, self._cut_us, self._forget_us)
        return min(wake_us, self._probe_us) if self._shard.full else wake_us

    def finish(self, *, clean: bool = False) -> None:
        """Wait for what is being saved; at a ``clean`` end save a last snapshot, so that the next start replays
        nothing. No more after that."""
        self._thread.shutdown(wait=True)
        if not clean or not self._shard.log.bytes_since_snapshot():
            return
        try:
            self._shard.save(self._shard.take_snapshot())
        except (EscrowError, OSError) as problem:
            logger.warning("no snapshot at the end, the next start replays more: %s", problem)
