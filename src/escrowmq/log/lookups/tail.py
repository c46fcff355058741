"""Entries not in a file yet: in memory, in log order, searched linearly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from escrowmq.log.lookups.entries import COLUMNS, Query, UInt64s, entries_of, positions_of
from escrowmq.log.lookups.runs import Extent
from escrowmq.log.seam import Frame


class Tail:
    """The entries of the frames from ``first_sequence`` to before ``next_sequence``; 16 bytes per message.
    One thread at a time; once it no longer grows, any thread."""

    def __init__(self, first_sequence: int, first_position: int) -> None:
        self.first_sequence = self.next_sequence = first_sequence
        self.first_position = first_position
        self.frames = 0
        self.holes: list[int] = []  # frames that could not be read, ascending
        self._columns = [np.empty(0, np.uint64), np.empty(0, np.uint64)]
        self._counts = [0, 0]

    @property
    def count(self) -> int:
        """Number of messages."""
        return self._counts[0]

    def add(self, frames: Sequence[Frame]) -> None:
        """Add message frames that follow the previous ones."""
        whole = [frame for frame in frames if frame.damage is None or frame.damage.bodies_only]
        if whole:
            for column, entries in enumerate(entries_of(whole, self.first_position)):
                self._extend(column, entries)
        self.holes += [frame.sequence for frame in frames if frame.damage is not None and not frame.damage.bodies_only]
        self.frames += len(frames)

    def _extend(self, column: int, entries: UInt64s) -> None:
        count = self._counts[column]
        end = count + len(entries)
        if end > len(self._columns[column]):
            grown = np.empty(max(2 * end, 1024), np.uint64)
            grown[:count] = self._columns[column][:count]
            self._columns[column] = grown
        self._columns[column][count:end] = entries
        self._counts[column] = end

    def positions(self, query: Query) -> Iterator[int]:
        """Iterate over the positions of rows that may match, newest first, as of this call."""
        column = COLUMNS.index(query.column)
        entries = self._columns[column][: self._counts[column]]
        low, high = query.bounds
        found = entries[(entries >= np.uint64(low)) & (entries <= np.uint64(high))]
        return iter(positions_of(found, self.first_position)[::-1].tolist())

    def sorted_columns(self) -> list[list[UInt64s]]:
        """Return the entries of ids and of keys in run order."""
        return [[np.sort(column[:count])] for column, count in zip(self._columns, self._counts, strict=True)]

    def extent(self, next_position: int, last_us: int) -> Extent:
        """Return the extent as stored in a run."""
        return Extent(self.first_sequence, self.next_sequence, self.first_position, next_position, last_us)
