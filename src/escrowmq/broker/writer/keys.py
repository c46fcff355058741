"""Keys of stored messages for the ledger: an ordered group needs them to continue behind a failed message."""

from __future__ import annotations

import numpy as np

from escrowmq.errors import EscrowError
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.groups.order import UNKNOWN, numbers
from escrowmq.log.seam import StoredLog
from escrowmq.message.hashes import hash_keys


class StoredKeys:
    """Reads keys from a log; a function of positions (see :data:`escrowmq.ledger.groups.order.KeysOf`)."""

    def __init__(self, log: StoredLog) -> None:
        self._log = log

    def __call__(self, positions: Int64s) -> Int64s:
        """One number per position; UNKNOWN for what cannot be read. A damaged record hides no other's key."""
        try:
            return numbers(hash_keys(self._log.read(positions, ["key"]).column("key")))
        except EscrowError:
            if len(positions) == 1:
                return np.full(1, UNKNOWN, np.int64)
        half = len(positions) // 2
        return np.concatenate([self(positions[:half]), self(positions[half:])])
