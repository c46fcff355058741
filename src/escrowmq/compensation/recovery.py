"""Suspension and recovery: what is done when the set store is down, was emptied, or is another one than before.

A missing entry of the commit set costs a look-up; a missing entry of the half set would be a lost repair. So:

1. The store does not answer, or its epoch is not the journal's: the journal says *suspended*. The half-set consumer
   takes nothing.
2. It answers. Of the same epoch, nothing it held is lost: marks since the suspension are read from ``trans_recv_log``
   into the commit set. Of another epoch it may lack anything: marks since ``settled_us`` are read, and the key topic is
   read again from there.
3. Only then one compare-and-set makes the journal say: this epoch, not suspended. Whoever dies before it leaves the
   suspension, and another process recovers anew; whatever is recorded twice is one entry.
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
"""Seconds that marks are read from before: a transaction's mark has the time of its beginning, and clocks differ. More
only costs reading.
"""

_STOPS = frozenset({Code.NO_TABLES, Code.SCHEMA_VERSION, Code.NO_TRANSACTION})
"""What no waiting mends."""


class Recovery:
    """Looks whether the store can be relied on, and makes it so. Any process of a compensation may, several at once
    too."""

    def __init__(self, journal: Journal, sets: SetStore, feed: KeyFeed, group: str, margin: float = MARGIN) -> None:
        self._journal = journal
        self._sets = sets
        self._feed = feed
        self._group = group
        self._margin_us = to_us(margin)
        self.recovered = 0
        """Recoveries that this object has brought to their end."""
        self.problem: EscrowError | None = None
        """Why the last :meth:`ensure` gave None."""

    def ensure(self) -> Standing | None:
        """Return how the compensation stands, if its store can be relied on (after a recovery, if that was needed);
        None: it is suspended.

        Raises Misuse(NO_TABLES | SCHEMA_VERSION) and the database's own errors.
        """
        self.problem = None
        try:
            epoch = self._sets.epoch()
        except EscrowError as problem:
            self.problem = problem
            self._journal.begin(None, str(problem))
            self.suspend(problem)
            return None
        seen = self._journal.begin(epoch)
        if not seen.suspended and seen.epoch == epoch:
            return seen
        if not seen.suspended:
            self._suspend("the set store is another one than before, or has lost what it held")
            return self.ensure()
        try:
            done = self._recover(seen, epoch)
        except EscrowError as problem:
            if problem.code in _STOPS:
                raise
            logger.warning("compensation %s stays suspended: %s", self._journal.name, problem)
            self.problem = problem
            return None
        if not done:
            return None
        self.recovered += 1
        found = self._journal.read()
        return None if found is None or found.suspended else found

    def suspend(self, problem: EscrowError) -> None:
        """Note, once, that the store failed."""
        self._suspend(str(problem))

    def _suspend(self, reason: str) -> None:
        if self._journal.suspend(reason):
            logger.warning("compensation %s is suspended: %s", self._journal.name, reason)
            reach("compensation.suspended")

    def _recover(self, seen: Standing, epoch: str) -> bool:
        whole = seen.epoch == epoch
        assert seen.suspended_us is not None
        since_us = seen.suspended_us if whole else min(seen.settled_us, seen.suspended_us)
        marks = halves = 0
        now_us = self._journal.now_us()
        for page in self._journal.marks(self._group, max(since_us - self._margin_us, 0)):
            for ids in pieces(page):
                self._sets.add_commits(ids, now_us)
                marks += len(ids)
        reach("compensation.marks-read")
        if not whole:
            for read, times in self._feed.read_again(seen.settled_us):
                for ids, stored in zip(pieces(read), pieces(times), strict=True):
                    self._sets.add_halves(ids, stored)
                    halves += len(ids)
                reach("compensation.keys-read")
        if self._sets.epoch() != epoch:  # emptied once more meanwhile: what was put back may be gone
            return False
        reach("compensation.recovering")
        if not self._journal.resume(seen, epoch):
            return False
        kind = "its own" if whole else "another"
        text = "compensation %s goes on with %s epoch of its set store; read again: %d marks, %d keys"
        logger.info(text, self._journal.name, kind, marks, halves)
        return True


def pieces(whole: Sequence[T]) -> Iterator[Sequence[T]]:
    """Parts that a set store takes in one call."""
    for at in range(0, len(whole), MAX_IDS):
        yield whole[at : at + MAX_IDS]
