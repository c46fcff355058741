"""Suspension and recovery after the set store failed, was emptied or was replaced.

A missing entry of the commit set costs a look-up; a missing entry of the half set would be a lost repair. So:

1. The store does not respond, or its epoch is not the journal's: the journal records the suspension. The half-set
   consumer consumes nothing.
2. The store responds. With the same epoch, no entry is lost: marks since the suspension are copied from
   ``trans_recv_log`` into the commit set. With another epoch any entry may be lost: marks since ``settled_us`` are
   copied, and the key topic is read again from there.
3. Then one compare-and-set updates the journal: this epoch, not suspended. After a crash before it the suspension
   stays, and another process recovers again; an entry that is recorded twice exists once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TypeVar

from escrowmq.compensation.feeds import KeyFeed
from escrowmq.compensation.journal import Journal, Standing
from escrowmq.compensation.sets.seam import MAX_IDS, SetStore
from escrowmq.errors import Code, EscrowError
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

logger = logging.getLogger(__name__)
T = TypeVar("T")

MARGIN = 300.0
"""Reading of marks starts so many seconds earlier: a mark has the start time of its transaction, and clocks differ."""

PERMANENT = frozenset({Code.NO_TABLES, Code.SCHEMA_VERSION, Code.NO_TRANSACTION})
"""Errors that are permanent: do not retry."""


class Recovery:
    """Checks whether the store is reliable, and recovers it. Several processes may do so concurrently."""

    def __init__(self, journal: Journal, sets: SetStore, feed: KeyFeed, group: str, margin: float = MARGIN) -> None:
        self._journal = journal
        self._sets = sets
        self._feed = feed
        self._group = group
        self._margin_us = to_us(margin)
        self.recovered = 0
        """Number of recoveries that this object completed."""
        self.problem: EscrowError | None = None
        """Reason why the last :meth:`ensure` returned None."""

    def ensure(self) -> Standing | None:
        """Return the journal's row if the store is reliable, after a recovery if needed; None while suspended. Raises
        Misuse(NO_TABLES | SCHEMA_VERSION) and the database's own errors."""
        self.problem = None
        try:
            epoch = self._sets.epoch()
        except EscrowError as problem:
            self.problem = problem
            self._journal.begin(None, str(problem))
            self.suspend(str(problem))
            return None
        seen = self._journal.begin(epoch)
        if not seen.suspended and seen.epoch == epoch:
            return seen
        if not seen.suspended:
            self.suspend("the set store was replaced, or has lost its entries")
            return self.ensure()
        try:
            done = self._recover(seen, epoch)
        except EscrowError as problem:
            if problem.code in PERMANENT:
                raise
            logger.warning("compensation %s stays suspended: %s", self._journal.name, problem)
            self.problem = problem
            return None
        if not done:
            return None
        self.recovered += 1
        found = self._journal.read()
        return None if found is None or found.suspended else found

    def suspend(self, reason: str) -> None:
        """Record the suspension after a failure of the store, unless it is recorded already."""
        if self._journal.suspend(reason):
            logger.warning("compensation %s is suspended: %s", self._journal.name, reason)
            reach("compensation.suspended")

    def _recover(self, seen: Standing, epoch: str) -> bool:
        is_same = seen.epoch == epoch
        assert seen.suspended_us is not None
        since_us = seen.suspended_us if is_same else min(seen.settled_us, seen.suspended_us)
        marks = halves = 0
        now_us = self._journal.now_us()
        for page in self._journal.marks(self._group, max(since_us - self._margin_us, 0)):
            for ids in split_pieces(page):
                self._sets.add_commits(ids, now_us)
                marks += len(ids)
        reach("compensation.marks-read")
        if not is_same:
            for read, times in self._feed.read_again(seen.settled_us):
                for ids, stored in zip(split_pieces(read), split_pieces(times), strict=True):
                    self._sets.add_halves(ids, stored)
                    halves += len(ids)
                reach("compensation.keys-read")
        if self._sets.epoch() != epoch:  # emptied again meanwhile: the restored entries may be lost
            return False
        reach("compensation.recovering")
        if not self._journal.resume(seen, epoch):
            return False
        text = "compensation %s continues with %s epoch of its set store; read again: %d marks, %d keys"
        logger.info(text, self._journal.name, "its own" if is_same else "another", marks, halves)
        return True


def split_pieces(every: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield parts that fit into one call of a set store."""
    for at in range(0, len(every), MAX_IDS):
        yield every[at : at + MAX_IDS]
