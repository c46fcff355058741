"""Reads the marks of one database, and closes the barrier for transactions that have none."""

from __future__ import annotations

import logging
import time
from collections import deque

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from escrowmq.outbox.barrier.columns import Ids
from escrowmq.outbox.barrier.patience import patience_of
from escrowmq.outbox.session import plain
from escrowmq.platform import failpoints

PIECES = 8
"""Into how many a part is cut in which one transaction in flight holds up the insert."""
_log = logging.getLogger(__name__)


class Marks:
    """The marks of one branch in one database."""

    def __init__(self, engine: sa.Engine, branch: str, wait: float) -> None:
        self.engine = engine
        self._branch = branch
        self._patience = patience_of(engine, wait)

    def read(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """The reason that stands for each, 0 if none; of all that is committed now."""
        try:
            return self._patience.read(ids, self._branch)
        except DBAPIError as problem:
            raise (plain(problem) or problem) from problem.__cause__

    def close(self, ids: Ids, deadline: float) -> npt.NDArray[np.uint8]:
        """Mark as rolled back what is neither committed nor in flight, durably; then the reasons that stand."""
        try:
            self._insert(ids, deadline)
        except DBAPIError as problem:
            # a full disk, a replica, a lost connection: what stands already is an answer all the same
            _log.warning("the barrier could not be closed for %d transactions: %s", len(ids), problem.orig)
        failpoints.reach("barrier.closed")
        return self.read(ids)

    def _insert(self, ids: Ids, deadline: float) -> None:
        """Insert for those that no transaction holds. A part that is held up is cut up, breadth first: the free ones pass early."""
        parts = deque([ids])
        while parts:
            part = parts.popleft()
            part = part[~self._patience.in_flight(part, self._branch)]
            if not len(part):
                continue
            try:
                self._patience.insert(part, self._branch)
            except DBAPIError as problem:
                if not self._patience.held_up(problem):
                    raise
                if not self._patience.splits or time.monotonic() > deadline:
                    return
                if len(part) > 1:
                    parts.extend(np.array_split(part, min(PIECES, len(part))))
