"""The oldest OPEN transaction of each producer group, found without a look at all of them each time.

Transactions become OPEN at the end of the table, but for those that a person opens anew. So below the one that was a
group's oldest at the last look none of it is OPEN, and the search continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from escrowmq.ledger.columns.arrays import Columns, Int64s
from escrowmq.model import TransactionState

OPEN = int(TransactionState.OPEN)
CHUNK = 65_536


class OldestOpen:
    """The oldest open transactions, from one look to the next. Derived: it is in no snapshot. ``groups_of`` gives the
    groups of transactions by their ordinals.
    """

    def __init__(self, rows: Columns, groups_of: Callable[[Int64s], Int64s]) -> None:
        self._rows, self._groups_of = rows, groups_of
        self._from: dict[int, int] = {}  # by group: below this ordinal none of it is OPEN

    def back_to(self, ordinal: int) -> None:
        """Note that a transaction from ``ordinal`` on was reopened."""
        self._from = {group: min(at, ordinal) for group, at in self._from.items()}

    def find(self, counts: Mapping[int, int], lowest: int) -> dict[int, int]:
        """Return ordinals, by the groups with something OPEN (``counts``: how much). Nothing is OPEN below
        ``lowest``."""
        end = self._rows.end
        starts = {group: max(self._from.get(group, lowest), lowest) for group, count in counts.items() if count > 0}
        self._from = dict.fromkeys(counts, end) | starts
        found = self._still_open(starts)
        wanted = starts.keys() - found.keys()
        ordinal = min((starts[group] for group in wanted), default=end)
        while wanted and ordinal < end:
            row = ordinal - self._rows.first
            ordinals = np.flatnonzero(self._rows["state"][row : row + CHUNK] == OPEN) + ordinal
            groups, firsts = np.unique(self._groups_of(ordinals), return_index=True)
            for group, at in zip(groups.tolist(), ordinals[firsts].tolist(), strict=True):
                if group in wanted:
                    found[group] = at
            wanted -= found.keys()
            ordinal += CHUNK
        self._from |= found
        return found

    def _still_open(self, starts: Mapping[int, int]) -> dict[int, int]:
        """Return the groups whose search ends where it begins."""
        inside = {group: at for group, at in starts.items() if at < self._rows.end}
        groups, ordinals = (np.array([*column], np.int64) for column in (inside.keys(), inside.values()))
        same = self._rows["state"][ordinals - self._rows.first] == OPEN
        same &= self._groups_of(ordinals) == groups
        return dict(zip(groups[same].tolist(), ordinals[same].tolist(), strict=True))
