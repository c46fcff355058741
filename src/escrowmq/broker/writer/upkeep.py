"""Upkeep of a shard: snapshots, retention, expiry of idle producers, probing a full disk. Part of the writer's rounds.

1. Snapshots are taken between rounds, after a sync, and saved on another thread.
2. Retention goes mark, save, drop: an event releases messages in the ledger; then a snapshot is saved that no longer
   needs the old segments; only then are they dropped. Messages beyond the retention of their own topic are released
   before that, also by an event.
3. Producers that were not used for ``producer_expiration`` are forgotten, a bounded number at a time. The log has the
   time of their last use. None is forgotten in the first minute after a start: listeners may not have reconnected.
4. A failure here stops no request: it is retried later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from escrowmq.broker.writer.shard import Shard
from escrowmq.errors import EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Cut, Forget
from escrowmq.platform.times import to_us

CUT_US = 10_000_000  # between two passes over topics with a retention of their own
RETENTION_US = 60_000_000  # between two retention passes
FIRST_US = 1_000_000  # from the start to the first retention pass
FORGET_US = 60_000_000  # between two searches for idle producers, and from the start to the first
FORGET_ROWS = 10_000  # sessions forgotten at a time; while there are more, the next search is PAUSE_US away
PAUSE_US = 1_000_000  # between two probes of a full disk
RETRY_US = 10_000_000  # after a snapshot that could not be saved

logger = logging.getLogger(__name__)


class Upkeep:
    """The upkeep of one shard. Everything but the saving runs on the writer; ``poke`` wakes it when a save has ended.
    ``connected`` returns the producer sessions that are listeners now."""

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
        self._marked: int | None = None  # retention has released the log below this position
        self._droppable: int | None = None  # the same, once a snapshot is saved that does not need it
        self.saving: Future[None] | None = None

    def within_round(self) -> None:
        """Run the upkeep that is due, before the round's sync: probe a full disk, drop segments, apply retention,
        remove idle producer sessions."""
        now = self._shard.time_us
        if self._shard.full and now >= self._probe_us:
            self._probe_us = now + PAUSE_US
            self._shard.probe()
        if self._droppable is not None:
            self._drop(self._droppable)
        topics = self._shard.ledger.topics
        if self._altered != topics.altered:  # an operator needs the space
            self._altered, self._cut_us, self._retain_us = topics.altered, now, now
        if now >= self._cut_us:
            self._cut_us = now + CUT_US if topics.any_own else NEVER_US
            self._shard.execute(Cut(to_us(self._shard.settings.retention)))
        if now >= self._retain_us:
            self._retain_us = now + RETENTION_US
            self._marked = self._shard.retain()
        if now >= self._forget_us:
            self._forget_us = now + FORGET_US
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
        """Return whether it is time for a snapshot and none is being saved."""
        if self.saving is not None or self._shard.time_us < self._save_us or self._shard.failure is not None:
            return False
        try:
            return self._marked is not None or self._shard.snapshot_due()
        except EscrowError:
            return False

    def after_round(self) -> None:
        """Begin to save a snapshot if one is wanted; call after the sync of all rounds."""
        try:
            if self.wants_snapshot:
                snapshot = self._shard.take_snapshot()
                marked, self._marked = self._marked, None
                self.saving = self._thread.submit(self._shard.save, snapshot)
                self.saving.add_done_callback(lambda saving: self._on_saved(saving, marked))
        except Exception:  # the log alone is enough to restart from
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
        """The broker time before which :meth:`within_round` has nothing to do."""
        if self._droppable is not None or self._altered != self._shard.ledger.topics.altered:
            return 0
        wake_us = min(self._retain_us, self._cut_us, self._forget_us)
        return min(wake_us, self._probe_us) if self._shard.full else wake_us

    def finish(self, *, clean: bool = False) -> None:
        """Wait for a snapshot that is being saved; at a ``clean`` end save a last one, so that the next start replays
        nothing."""
        self._thread.shutdown(wait=True)
        if not clean or not self._shard.log.bytes_since_snapshot():
            return
        try:
            self._shard.save(self._shard.take_snapshot())
        except (EscrowError, OSError) as problem:
            logger.warning("no snapshot at the end, the next start replays more: %s", problem)
