"""Consume queues: the log row of each offset. 12 bytes per message, in arrays.

Rules:

1. Offsets of a queue rise by one and are never reused (I16), also not when a topic of the same name is created again
   (``topics.py``); rows are only added at the end (I18).
2. A plain message is appended when it is applied, a half message with its COMMIT, a delayed one with its release
   (or never, if it is recalled).
3. ``head`` is the first offset still stored; it moves only by retention: of the log, or of the topic (``keeping.py``).
4. The time at which offsets became visible, and the bytes before them, are noted once for all of one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from escrowmq.ledger.columns.arrays import Columns, Int32s, Int64s, locate, with_zeros

NO_TAG = 0
ROW_BYTES = 100  # the approximate size of a message in the log beside its body; long keys and properties not counted
SCAN_ROWS = 1024
MOST_SCAN_ROWS = 1 << 18  # offsets that are compared with a position at a time: first, and at most


@dataclass(frozen=True, slots=True)
class Place:
    """The topic and the number of a queue."""

    topic: str
    queue: int


class QueueIndex:
    """One queue: positions and tags by offset, and when offsets became visible. ``first``: its first offset."""

    __slots__ = ("_entries", "_times", "bytes_total", "place")

    def __init__(self, place: Place, first: int = 0) -> None:
        self.place = place
        self._entries = Columns({"position": np.int64, "tag": np.int32}, first=first)
        self._times = Columns({"offset": np.int64, "time_us": np.int64, "bytes": np.int64})
        self.bytes_total = 0  # of all messages ever appended: their bodies and ``ROW_BYTES`` each

    @property
    def head(self) -> int:
        """The first offset still stored."""
        return self._entries.first

    @property
    def end(self) -> int:
        """The offset that the next message gets."""
        return self._entries.end

    @property
    def bytes_kept(self) -> int:
        """The size of the messages still stored: the bytes of their bodies, and ``ROW_BYTES`` each. Of messages that
        became visible at one time, all count until all are gone."""
        times = self._times
        return self.bytes_total - times.item("bytes", 0) if len(times) and len(self._entries) else 0

    def append(
        self, positions: Int64s | Sequence[int], tags: Int32s | Sequence[int] | int, time_us: int, size: int
    ) -> int:
        """Append messages that become visible at ``time_us``; ``size``: the bytes of their bodies together. Returns the
        first one's offset."""
        count = len(positions)
        offset = self._entries.extend(count, position=positions, tag=tags)
        times = self._times
        if not len(times) or times.item("time_us", len(times) - 1) < time_us:
            times.extend(1, offset=offset, time_us=time_us, bytes=self.bytes_total)
        self.bytes_total += size + count * ROW_BYTES
        return offset

    def positions(self, start: int, end: int) -> Int64s:
        """Return a copy of the log positions of offsets ``start`` .. ``end``-1 (both within head .. end)."""
        head = self._entries.first
        return self._entries["position"][start - head : end - head].copy()

    def positions_at(self, offsets: Int64s) -> Int64s:
        """Return the log positions of these offsets; -1 for those that are not stored."""
        entries, at = self._entries["position"], offsets - self._entries.first
        stored = (at >= 0) & (at < len(entries))
        positions = np.full(len(offsets), -1, np.int64)
        positions[stored] = entries[at[stored]]
        return positions

    def tags(self, start: int, end: int) -> Int32s:
        """Return a copy of the tag numbers of offsets ``start`` .. ``end``-1 (0: no tag)."""
        head = self._entries.first
        return self._entries["tag"][start - head : end - head].copy()

    def offset_at(self, time_us: int) -> int:
        """Return the first offset that became visible at ``time_us`` or later; ``end`` when there is none."""
        times = self._times["time_us"]
        index = int(np.searchsorted(times, time_us, side="left"))
        return max(int(self._times["offset"][index]), self.head) if index < len(times) else self.end

    def offset_of_start(self, start: str) -> int:
        """Return the offset of ``"earliest"``, ``"latest"`` or a time in microseconds as text."""
        ends = {"earliest": self.head, "latest": self.end}
        return ends[start] if start in ends else self.offset_at(int(start))

    def offset_within(self, size: int) -> int:
        """Return the offset from which on to keep messages, so that they have at most ``size`` bytes. Those that became
        visible at one time are kept or dropped together; the newest are always kept."""
        times = self._times
        if not len(times):
            return self.head
        index = int(np.searchsorted(times["bytes"], self.bytes_total - size, side="left"))
        return max(times.item("offset", min(index, len(times) - 1)), self.head)

    def visible_us(self, offset: int) -> int:
        """Return the time (µs) at which a stored offset became visible."""
        index = int(np.searchsorted(self._times["offset"], offset, side="right")) - 1
        return int(self._times["time_us"][max(index, 0)]) if len(self._times) else 0

    def find(self, position: int, since_us: int = 0) -> int | None:
        """Return the offset of the message at a log position, or None. Scans the messages that became visible at
        ``since_us`` or later."""
        positions = self._entries["position"]
        at, size = self.offset_at(since_us) - self.head, SCAN_ROWS
        while at < len(positions):
            found = np.flatnonzero(positions[at : at + size] == position)
            if len(found):
                return self.head + at + int(found[0])
            at, size = at + size, min(2 * size, MOST_SCAN_ROWS)
        return None

    def offsets_of(self, positions: Int64s) -> Int64s:
        """Return the offset of the message at each log position, -1 for those not in this queue. It scans the queue,
        once for all: for repeats only."""
        entries = self._entries["position"]
        at = np.flatnonzero(np.isin(entries, positions))
        at = at[np.argsort(entries[at])]
        index = locate(entries[at], positions)
        return np.where(index >= 0, np.append(at, 0)[index] + self.head, -1)

    def lowest_position(self, start: int) -> int | None:
        """Return the lowest log position among offsets from ``start`` on; None when there is none."""
        rest = self._entries["position"][max(start - self.head, 0) :]
        return int(rest.min()) if len(rest) else None

    def trim_below(self, position: int) -> None:
        """Drop everything up to the last offset whose message is below log position ``position``."""
        below = np.flatnonzero(self._entries["position"] < position)
        if len(below):
            self.trim(self.head + int(below[-1]) + 1)

    def trim(self, head: int) -> None:
        """Drop offsets below ``head``."""
        self._entries.trim(head)
        before = int(np.searchsorted(self._times["offset"], self.head, side="right")) - 1
        self._times.trim(self._times.first + max(before, 0))

    def to_tables(self) -> tuple[pa.Table, pa.Table]:
        """Return two tables (copies): position and tag of each offset; when offsets became visible."""
        return self._entries.to_table(), self._times.to_table()

    def load(self, head: int, entries: pa.Table, times: pa.Table, bytes_total: int) -> None:
        """Restore :meth:`to_tables` with the first offset ``head``. Older snapshots have no bytes: they count as 0."""
        self._entries.load(entries.replace_schema_metadata({"first": str(head)}))
        self._times.load(with_zeros(times, "bytes", np.int64).replace_schema_metadata())
        self.bytes_total = bytes_total
