"""Recovery: rebuilds the ledger from the newest snapshot and every log frame after it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.ledger import Ledger
from escrowmq.log.seam import Snapshot, StoredLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folded:
    """A ledger, and of the snapshot that it began with: its time, its sequence and its size in memory, bytes; 0 without
    one."""

    ledger: Ledger
    time_us: int = 0
    sequence: int = 0
    size: int = 0


def recovered(log: StoredLog) -> Folded:
    """As :func:`fold`, without the snapshot's tables: they are as large as the ledger."""
    ledger, snapshot = fold(log)
    if snapshot is None:
        return Folded(ledger)
    return Folded(ledger, snapshot.time_us, snapshot.sequence, size_of(snapshot.tables))


def size_of(tables: dict[str, pa.Table]) -> int:
    """Return bytes of a snapshot in memory."""
    return sum(table.nbytes for table in tables.values())


def fold(log: StoredLog) -> tuple[Ledger, Snapshot | None]:
    """Return the ledger that follows from ``log``, and the snapshot that it began with (None: the frames alone).

    A snapshot of a version that this one does not know is a cache without use; but where frames that it stands for have
    left the log, Corrupt(NEWER_FORMAT).
    """
    snapshot = log.load_snapshot()
    if snapshot is not None and not Ledger.can_restore(snapshot.tables):
        if log.first_position > 0:
            raise error(Code.NEWER_FORMAT, "the ledger's snapshot is of another version")
        logger.warning("the ledger's snapshot is of another version; replaying the whole log")
        snapshot = None
    ledger = Ledger(log.shard) if snapshot is None else Ledger.restore(log.shard, snapshot.tables)
    for frame in log.frames(snapshot.sequence if snapshot else 0):
        ledger.apply(frame.kind, frame.batch, frame.position, frame.time_us)
    return ledger, snapshot
