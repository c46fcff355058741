"""Keys of stored messages for the ledger: an ordered group needs them to continue behind a failed message."""

from __future__ import annotations

import numpy as np

from escrowmq.errors import EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups.order import UNKNOWN, numbers
from escrowmq.log.seam import StoredLog
from escrowmq.message.hashes import hash_keys


def stored_keys(log: StoredLog, positions: Int64s) -> Int64s:
    """Return one number per position; UNKNOWN if it cannot be read. A damaged record hides no other key."""
    try:
        return numbers(hash_keys(log.read(positions, ["key"]).column("key")))
    except EscrowError:
        if len(positions) == 1:
            return np.full(1, UNKNOWN, np.int64)
    return np.concatenate([stored_keys(log, half) for half in np.array_split(positions, 2)])
