"""Recovery: rebuilds the ledger from the newest snapshot and every log frame after it."""

from __future__ import annotations

import logging

from escrowmq.errors import Code, error
from escrowmq.ledger.ledger import Ledger
from escrowmq.log.seam import Snapshot, StoredLog

logger = logging.getLogger(__name__)


def fold(log: StoredLog) -> tuple[Ledger, Snapshot | None]:
    """The ledger that follows from ``log``, and the snapshot that it began with (None: the frames alone).

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
