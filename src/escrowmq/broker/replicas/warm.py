"""The ledger of a standby: computed as frames arrive, so that a take-over need not read the log first.

It saves snapshots of its own in its own folder, on another thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from escrowmq.broker.writer.recovery import Folded, fold, size_of
from escrowmq.errors import Code, error
from escrowmq.log.seam import Frame, Replica, ReplicatedLog, StoredLog

SIZES = 20  # a snapshot is due when the frames since the last one are so many times as large; as on a leader

logger = logging.getLogger(__name__)


class WarmLedger:
    """The ledger for one term of following. For the thread that follows."""

    def __init__(self, replica: Replica, snapshot_bytes: int) -> None:
        self._replica = replica
        self._snapshot_bytes = snapshot_bytes
        self._thread = ThreadPoolExecutor(1, "escrowmq-standby-snapshot")
        self._saving: Future[None] | None = None
        self._checked = 0  # bytes of frames at the last check of the folder's snapshots
        self._bytes = 0
        self._folded: Folded | None = None  # None: the copy does not yet reach its base's snapshot
        self._begin(replica.log)

    def _begin(self, log: StoredLog) -> None:
        self._log = log
        self._folded = fold(log) if self._replica.is_whole() else None
        self.position, self.time_us = log.next_position, log.last_time_us

    def take(self, frames: Iterable[Frame]) -> None:
        """Apply frames that this standby has followed to the ledger. If its copy of the log was begun anew, fold that
        instead. Raises Corrupt(DAMAGED) if there is a gap."""
        log = self._replica.log
        if self._replica.restarted() or log is not self._log or self._folded is None:
            self._begin(log)  # the frames are in the copy already
        else:
            self._apply(self._folded, frames)

    def lead(self, log: ReplicatedLog) -> Folded:
        """Return the ledger of the log that was just taken over, with its last frames applied, for the engine."""
        frames = log.caught_up()
        if log is not self._log or self._folded is None:
            return fold(log)
        self._apply(self._folded, frames)
        return self._folded

    def _apply(self, folded: Folded, frames: Iterable[Frame]) -> None:
        ledger = folded.ledger
        for frame in frames:
            if frame.position != ledger.next_position:
                text = f"a frame at position {frame.position}, the ledger is at {ledger.next_position}"
                raise error(Code.DAMAGED, text)
            ledger.apply(frame.kind, frame.batch, frame.position, frame.time_us)
            self.position, self.time_us = frame.position + frame.count, frame.time_us
            self._bytes += frame.batch.nbytes

    def keep(self) -> None:
        """Begin to save a snapshot of the ledger, on another thread, if one is due and none is being saved."""
        is_saving = self._saving is not None and not self._saving.done()
        if is_saving or self._bytes - self._checked < self._snapshot_bytes:
            return
        self._checked, folded = self._bytes, self._folded
        if folded is None or self._replica.bytes_since_snapshot() < max(self._snapshot_bytes, SIZES * folded.size):
            return
        log, ledger, tables = self._replica.log, folded.ledger, folded.ledger.snapshot()
        sequence, position = log.next_sequence, log.next_position
        self._folded = Folded(ledger, self.time_us, sequence, size_of(tables))
        self._saving = self._thread.submit(self._replica.save_snapshot, tables, sequence, position, self.time_us)
        self._saving.add_done_callback(_on_saved)

    def close(self) -> None:
        """Wait for a snapshot that is being saved, and end the thread that saves it."""
        self._thread.shutdown(wait=True)


def _on_saved(saving: Future[None]) -> None:
    if (problem := saving.exception()) is not None:
        logger.warning("a snapshot could not be saved: %s", problem)
