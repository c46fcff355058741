"""Recovery: rebuilds the ledger from the newest snapshot and every log frame after it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.ledger import Ledger
from escrowmq.log.seam import StoredLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Folded:
    """A ledger, and the time, sequence and size (bytes in memory) of its snapshot; 0 without one. The snapshot's tables
    are not kept: they are as large as the ledger."""

    ledger: Ledger
    time_us: int = 0
    sequence: int = 0
    size: int = 0


def size_of(tables: dict[str, pa.Table]) -> int:
    """Return the bytes of a snapshot's tables in memory."""
    return sum(table.nbytes for table in tables.values())


def fold(log: StoredLog) -> Folded:
    """Rebuild the ledger from a log: its newest snapshot, and every frame after it. A snapshot of an unknown version is
    ignored; Corrupt(NEWER_FORMAT) if frames that it stands for have left the log."""
    snapshot = log.load_snapshot()
    if snapshot is not None and not Ledger.can_restore(snapshot.tables):
        if log.first_position > 0:
            raise error(Code.NEWER_FORMAT, "the ledger's snapshot is of another version")
        logger.warning("the ledger's snapshot is of another version; replaying the whole log")
        snapshot = None
    if snapshot is None:
        folded = Folded(Ledger(log.shard))
    else:
        ledger = Ledger.restore(log.shard, snapshot.tables)
        folded = Folded(ledger, snapshot.time_us, snapshot.sequence, size_of(snapshot.tables))
    for frame in log.frames(folded.sequence):
        folded.ledger.apply(frame.kind, frame.batch, frame.position, frame.time_us)
    return folded
