"""Dead letters of one group in one queue: offsets whose attempts are spent, with the cause and the time.

They leave by a person's act (delivered again, or discarded) or with the log's retention; never by themselves.
"""

from __future__ import annotations

import numpy as np

from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.sparse import SparseOffsets

MAX_CAUSE = 1024
"""Characters of a cause that are kept: enough for an exception's line, not for a client's core dump."""


class DeadLetters(SparseOffsets):
    """Columns ``attempts``, ``dead_us``, ``cause`` (text)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({"attempts": np.int32, "dead_us": np.int64, "cause": object})

    def bury(self, offsets: Int64s, attempts: int, dead_us: int, cause: str) -> None:
        """Add ``offsets`` that died together."""
        count = len(offsets)
        causes = np.empty(count, object)
        causes[:] = cause
        self.put(offsets, attempts=np.full(count, attempts), dead_us=np.full(count, dead_us), cause=causes)
