"""The line of runs, full tails and gaps that a log's look-ups go along, and which runs are to become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from escrowmq.log.bodies import SoundColumns
from escrowmq.log.lookups.entries import MOST_POSITIONS, Int64s
from escrowmq.log.lookups.runs import Run
from escrowmq.log.lookups.tail import Tail
from escrowmq.log.lookups.writing import CHUNK
from escrowmq.log.seam import Frame

AT_ONCE = 8
"""How many times ``fanout`` runs are merged at a time, at most."""
SPARE_BYTES = 64 << 20
"""No run is written unless it leaves so much of the disk to the log."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of the look-up files; tests have smaller ones. A tail is full with ``run_rows`` messages or
    ``run_frames`` frames; ``wake_*`` of them are taken in at a time; ``late_*`` of them are left to the first look-up
    after an opening; ``recent_bytes`` of frames are kept in memory for that; ``fanout`` runs become one; ``chunk``
    entries of a merge are in memory. Not ``threaded``: nothing is written but by :meth:`Lookups.work`."""

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


class StoredFrames(Protocol):
    """The frames of a log, from any thread; a ``Reader`` is one."""

    def stored_from(self) -> tuple[int, int]:
        """Sequence and position of the first frame that is stored."""

    def message_frames(self, start: int, end: int) -> Int64s:
        """Return the sequences of the stored frames of messages, ``start`` <= sequence < ``end``, rising."""

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the position at which a frame begins (or would, behind the last), and the time of the one before.
        Rejected(RANGE_PURGED), Misuse beyond the log."""

    def frame_at(self, position: int) -> tuple[int, int]:
        """Return the frame that holds a position, and the position of its first row. Rejected(RANGE_PURGED)."""

    def frame(self, sequence: int, *, keep: bool = True) -> Frame:
        """One frame, or what is left of it. Rejected(RANGE_PURGED)."""

    def columns(self, sequence: int) -> SoundColumns | None:
        """Return the columns of a large frame without its bodies, verified; None: read it whole.
        Rejected(RANGE_PURGED)."""

    def damaged_frames(self) -> list[int]:
        """Return frames in which damage was met, rising."""


class Gap(NamedTuple):
    """Frames of which no run speaks."""

    first_sequence: int
    next_sequence: int


Part = Run | Tail | Gap


def extent_of(part: Part) -> tuple[int, int]:
    """Return the first frame of a part, and the one behind its last."""
    if isinstance(part, Run):
        return part.extent.first_sequence, part.extent.next_sequence
    return part.first_sequence, part.next_sequence


def lined_up(parts: Iterable[Part], end: int, frames: StoredFrames) -> tuple[Part, ...]:
    """Return the parts (gaps apart) in order, with gaps wherever messages lie between them, up to the frame ``end``."""
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


def due(parts: Sequence[Part], floor: int, sizes: Sizes) -> list[Run] | None:
    """Choose runs to merge into one: ``fanout`` neighbours or more that together make a run of the next level, or
    twice as many tiny ones; or one alone, of which retention has removed more than half (the part below the
    position ``floor``). None: all is well."""
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
    """Return whether a run may be merged with those behind it: a bounded range of positions, not too many at once."""
    if not near:
        return True
    reach = near[0].extent.next_position - run.extent.first_position
    return reach <= MOST_POSITIONS and len(near) < AT_ONCE * sizes.fanout


def _level(count: int, sizes: Sizes) -> int:
    """0 for few messages, one more for ``fanout`` times as many."""
    level, count = 0, count // (sizes.run_frames * sizes.fanout)
    while count:
        level, count = level + 1, count // sizes.fanout
    return level
