"""Offsets of a queue at which one group gets another content, which an operator wrote in place of a dead letter's.

The message in the topic never changes, and other groups get it. The edit stands further behind in the log; it leaves
with its offset, as the log is dropped from its beginning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from escrowmq.ledger.columns.arrays import Int64s, locate


class Edit(NamedTuple):
    """The log position of an edit, and its message id."""

    position: int
    message_id: bytes


class Edited:
    """The edits of one group in one queue, the last of each offset."""

    __slots__ = ("_edits", "_offsets", "_positions")

    def __init__(self) -> None:
        self._edits: dict[int, Edit] = {}
        self._offsets: Int64s = np.empty(0, np.int64)
        self._positions: Int64s = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._edits)

    def put(self, offset: int, edit: Edit) -> None:
        """Set the group's message at ``offset``."""
        self._edits[offset] = edit
        self._arrange()

    def get(self, offset: int) -> Edit | None:
        """Return the edit at ``offset``, or None."""
        return self._edits.get(offset)

    def find(self, message_id: bytes) -> int | None:
        """Return the offset of the edit with this message id."""
        return next((offset for offset, edit in self._edits.items() if edit.message_id == message_id), None)

    def instead(self, offsets: Int64s, positions: Int64s) -> Int64s:
        """Return the log positions of the group's messages at ``offsets``; ``positions``: those of the topic's."""
        if not self._edits:
            return positions
        at = locate(self._offsets, offsets)
        return np.where(at >= 0, self._positions[at], positions)

    def trim(self, head: int) -> None:
        """Remove offsets below ``head``."""
        if self._edits and self._offsets[0] < head:
            self._edits = {offset: edit for offset, edit in self._edits.items() if offset >= head}
            self._arrange()

    def rows(self) -> list[tuple[int, int, bytes]]:
        """Return offset, position and message id of each, by offset."""
        return [(offset, *self._edits[offset]) for offset in self._offsets.tolist()]

    def _arrange(self) -> None:
        self._offsets = np.array(sorted(self._edits), np.int64)
        self._positions = np.array([self._edits[offset].position for offset in self._offsets.tolist()], np.int64)
