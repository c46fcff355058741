"""The ordered parts (runs, full tails, gaps) searched by a log's look-ups, and the choice of runs to merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from escrowmq.log.bodies import SoundColumns
from escrowmq.log.lookups.entries import COLUMNS, MOST_POSITIONS, Int64s, Query, UInt64s, entries_of, positions_of
from escrowmq.log.lookups.runs import Extent, Run
from escrowmq.log.lookups.writing import CHUNK
from escrowmq.log.seam import Frame

AT_ONCE = 8  # a merge takes at most this many times ``fanout`` runs
SPARE_BYTES = 64 << 20  # disk space that writing a run must leave to the log


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the look-up files. A tail is full with ``run_rows`` messages or ``run_frames`` frames; ``wake_*`` of
    them are processed at a time; ``late_*`` are left to the first look-up after an opening; ``recent_bytes`` of frames
    are kept in memory; ``fanout`` runs are merged into one; a merge holds ``chunk`` entries. Not ``threaded``: only
    :meth:`Lookups.work` writes."""

    run_rows: int = 1 << 17
    run_frames: int = 1 << 12
    wake_rows: int = 1 << 13
    wake_frames: int = 256
    late_rows: int = 1 << 10
    late_frames: int = 8
    recent_bytes: int = 16 << 20
    fanout: int = 8
    chunk: int = CHUNK
    spare_bytes: int = SPARE_BYTES
    threaded: bool = True


class Tail:
    """The entries of the newest frames, 16 bytes per message. One thread; once it no longer grows, any thread."""

    def __init__(self, first_sequence: int, first_position: int) -> None:
        self.first_sequence = self.next_sequence = first_sequence
        self.first_position = first_position
        self.frames = 0
        self.holes: list[int] = []  # frames that could not be read, ascending
        self._columns = [np.empty(0, np.uint64), np.empty(0, np.uint64)]
        self._counts = [0, 0]

    @property
    def count(self) -> int:
        return self._counts[0]

    def add(self, frames: Sequence[Frame]) -> None:
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
        """Return an iterator over the log positions of rows that may match, newest first, as of this call."""
        column = COLUMNS.index(query.column)
        entries = self._columns[column][: self._counts[column]]
        low, high = query.bounds
        found = entries[(entries >= np.uint64(low)) & (entries <= np.uint64(high))]
        return iter(positions_of(found, self.first_position)[::-1].tolist())

    def sorted_columns(self) -> list[list[UInt64s]]:
        """Return the entries of ids, and of keys, sorted as in a run, each as one piece."""
        return [[np.sort(column[:count])] for column, count in zip(self._columns, self._counts, strict=True)]

    def extent(self, next_position: int, last_us: int) -> Extent:
        return Extent(self.first_sequence, self.next_sequence, self.first_position, next_position, last_us)


class StoredFrames(Protocol):
    """The methods of :class:`escrowmq.log.reading.Reader` that look-ups need. Any thread may call them."""

    def stored_from(self) -> tuple[int, int]: ...
    def message_frames(self, start: int, end: int) -> Int64s: ...
    def place(self, sequence: int) -> tuple[int, int]: ...
    def frame_at(self, position: int) -> tuple[int, int]: ...
    def frame(self, sequence: int, *, keep: bool = True) -> Frame: ...
    def columns(self, sequence: int) -> SoundColumns | None: ...
    def damaged_frames(self) -> list[int]: ...


class Gap(NamedTuple):
    """Frames that no run covers."""

    first_sequence: int
    next_sequence: int


Part = Run | Tail | Gap


def extent_of(part: Part) -> tuple[int, int]:
    """Return the sequences of the first frame of a part and of the one after its last."""
    if isinstance(part, Run):
        return part.extent.first_sequence, part.extent.next_sequence
    return part.first_sequence, part.next_sequence


def order_parts(parts: Iterable[Part], end: int, frames: StoredFrames) -> tuple[Part, ...]:
    """Order the parts (without gaps) and insert gaps wherever messages lie between them, up to the frame ``end``."""
    line: list[Part] = []
    at, _ = frames.stored_from()
    for part in sorted((part for part in parts if not isinstance(part, Gap)), key=extent_of):
        first, following = extent_of(part)
        if first > at and len(frames.message_frames(at, first)):
            line.append(Gap(at, first))
        line.append(part)
        at = following
    if end > at and len(frames.message_frames(at, end)):
        line.append(Gap(at, end))
    return tuple(line)


def choose_merge(parts: Sequence[Part], floor: int, sizes: Sizes) -> list[Run] | None:
    """Choose runs to merge, None if none: ``fanout`` or more neighbours that together reach the next level, or twice as
    many tiny ones; or a single run of which retention has removed more than half (below position ``floor``)."""
    runs = [part for part in parts if isinstance(part, Run)]
    for run in runs:
        if 2 * floor > run.extent.first_position + run.extent.next_position:
            return [run]
    if len(runs) < sizes.fanout:
        return None
    for level in range(max(_level(run.count, sizes) for run in runs) + 1):
        near: list[Run] = []
        for part in (*reversed(parts), None):
            small = part if isinstance(part, Run) and _level(part.count, sizes) <= level else None
            if small is not None and _fits(small, near, sizes):
                near.append(small)
                continue
            if _is_enough(near, level, sizes):
                return near[::-1]
            near = [] if small is None else [small]
    return None


def _is_enough(near: list[Run], level: int, sizes: Sizes) -> bool:
    if len(near) < sizes.fanout:
        return False
    return (level == 0 and len(near) >= 2 * sizes.fanout) or _level(sum(run.count for run in near), sizes) > level


def _fits(run: Run, near: list[Run], sizes: Sizes) -> bool:
    """Return whether a run may be merged with ``near``, the runs after it that were chosen so far: bounded range of
    positions, bounded number."""
    if not near:
        return True
    reach = near[0].extent.next_position - run.extent.first_position
    return reach <= MOST_POSITIONS and len(near) < AT_ONCE * sizes.fanout


def _level(count: int, sizes: Sizes) -> int:
    """Return the merge level of a run with ``count`` messages: 0 for few, one more for every factor of ``fanout``."""
    level, count = 0, count // (sizes.run_frames * sizes.fanout)
    while count:
        level, count = level + 1, count // sizes.fanout
    return level
