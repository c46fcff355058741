"""The oldest undecided transaction of each producer group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from escrowmq.ledger.columns.arrays import Columns, Int64s
from escrowmq.model import TransactionState

OPEN = int(TransactionState.OPEN)
CHUNK = 65_536  # rows whose states are compared at a time


class OldestOpen:
    """The oldest OPEN transaction of each producer group. Derived: not in snapshots.

    New transactions are at the end of the table, except those that an operator reopens. So no transaction of a group is
    OPEN below the one that was its oldest at the last search, and the next search continues from there.
    """

    def __init__(self, rows: Columns, groups_of: Callable[[Int64s], Int64s]) -> None:
        self._rows, self._groups_of = rows, groups_of
        self._from: dict[int, int] = {}  # by group: no transaction below this ordinal is OPEN

    def back_to(self, ordinal: int) -> None:
        """Let the next searches begin at ``ordinal`` at the latest: a transaction from there on was reopened."""
        self._from = {group: min(at, ordinal) for group, at in self._from.items()}

    def find(self, counts: Mapping[int, int], lowest: int) -> dict[int, int]:
        """Return the ordinal of the oldest OPEN transaction by group. ``counts``: the number of OPEN ones by group;
        none is below the ordinal ``lowest``."""
        rows, end = self._rows, self._rows.end
        starts = {group: max(self._from.get(group, lowest), lowest) for group, count in counts.items() if count > 0}
        self._from = dict.fromkeys(counts, end) | starts
        inside = {group: at for group, at in starts.items() if at < end}
        groups, ordinals = (np.array([*column], np.int64) for column in (inside.keys(), inside.values()))
        same = (rows["state"][ordinals - rows.first] == OPEN) & (self._groups_of(ordinals) == groups)
        found = dict(zip(groups[same].tolist(), ordinals[same].tolist(), strict=True))
        wanted = starts.keys() - found.keys()
        ordinal = min((starts[group] for group in wanted), default=end)
        while wanted and ordinal < end:
            row = ordinal - rows.first
            ordinals = np.flatnonzero(rows["state"][row : row + CHUNK] == OPEN) + ordinal
            groups, firsts = np.unique(self._groups_of(ordinals), return_index=True)
            new = dict(zip(groups.tolist(), ordinals[firsts].tolist(), strict=True))
            found |= {group: at for group, at in new.items() if group in wanted}
            wanted -= found.keys()
            ordinal += CHUNK
        self._from |= found
        return found
