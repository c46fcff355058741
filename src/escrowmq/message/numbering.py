"""The ids that a client makes for messages that were given none.

16 bytes: 8 random ones of the series, then a counter, both big-endian. They are made when a batch leaves, so the ids of
a batch are consecutive, and the broker's de-duplication remembers a steady client as one run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np

from escrowmq.schemas import MESSAGE_ID_DTYPE


class MessageIds:
    """One series of message ids, counted from 1. Used by one thread at a time, in one process."""

    def __init__(self) -> None:
        self._instance = int.from_bytes(os.urandom(8), "big")
        self._next = 1

    def take(self, count: int) -> bytes:
        """``count`` consecutive ids, one after the other."""
        first, self._next = self._next, self._next + count
        ids = np.empty(count, MESSAGE_ID_DTYPE)
        ids["instance"] = self._instance
        ids["sequence"] = np.arange(first, first + count, dtype=np.uint64)
        return ids.tobytes()

    def complete(self, given: Sequence[bytes | None]) -> bytes:
        """The ids given, one after the other, with new ones in the place of None."""
        if not any(given):
            return self.take(len(given))
        made = self.take(given.count(None))
        ours = (made[at : at + 16] for at in itertools.count(0, 16))
        return b"".join(next(ours) if identity is None else identity for identity in given)
