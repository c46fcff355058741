"""The commit log's twin in memory: the same seam, without a disk. What it forgets in a crash is what was not synced."""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log.frames import HEADER_BYTES
from escrowmq.log.reading import Located, gather
from escrowmq.log.seam import Frame, Snapshot
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.schemas import STORED, Kind

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class MemoryStore:
    """What outlives an opener of a :class:`MemoryLog`: pass it to the next one."""

    shard: int = field(default_factory=lambda: secrets.randbelow((1 << 32) - 1) + 1)
    epoch: int = 0
    frames: list[Frame] = field(default_factory=list)
    dropped: int = 0  # frames dropped before the first
    snapshots: list[Snapshot] = field(default_factory=list)
    segments: list[int] = field(default_factory=lambda: [0])  # first sequences
    in_use: bool = False


class MemoryLog:
    """A CommitLog in memory. ``capacity`` is in bytes (None: no end); ``fail_next_sync`` makes the next sync fail."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        segment_bytes: int = 1 << 20,
        version: str = "",
        clock: Clock | None = None,
        capacity: int | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        if self.store.in_use:
            raise Misuse(Code.FOLDER_IN_USE, "the store is in use by another log of this process")
        self.store.in_use = True
        self.store.epoch += 1
        self.capacity = capacity
        self.fail_next_sync = False
        self._segment_bytes = segment_bytes
        self._segment_size = 0
        self._bytes_written = 0
        self._failure: EscrowError | None = None
        self._closed = False
        self._durable = self.next_sequence
        now_us = max((clock or SystemClock()).now_us(), self.last_time_us)
        row = {"shard": self.shard, "version": version}
        self.append(Kind.OPENED, pa.RecordBatch.from_pylist([row], STORED[Kind.OPENED]), now_us)
        self.sync()

    @property
    def shard(self) -> int:
        """The shard's id."""
        return self.store.shard

    @property
    def epoch(self) -> int:
        """How often the log was opened."""
        return self.store.epoch

    @property
    def next_sequence(self) -> int:
        """Sequence of the next frame."""
        return self.store.dropped + len(self.store.frames)

    @property
    def next_position(self) -> int:
        """Position of the next row."""
        frames = self.store.frames
        return frames[-1].position + frames[-1].batch.num_rows if frames else 0

    @property
    def last_time_us(self) -> int:
        """Time of the last frame."""
        return self.store.frames[-1].time_us if self.store.frames else 0

    @property
    def first_position(self) -> int:
        """The lowest position still stored."""
        return self.store.frames[0].position if self.store.frames else 0

    @property
    def bytes_written(self) -> int:
        """Bytes of frames appended by this opener, headers included."""
        return self._bytes_written

    def reserve(self, size: int) -> None:
        """Overloaded(DISK_FULL) if ``capacity`` does not hold ``size`` bytes more."""
        self._check_usable()
        if self.capacity is not None and sum(map(_size, self.store.frames)) + size > self.capacity:
            raise error(Code.DISK_FULL)

    def append(self, kind: Kind, batch: pa.RecordBatch, time_us: int) -> int:
        """Add one frame; the position of its first row."""
        self._check_usable()
        if not batch.schema.equals(STORED[kind]) or batch.num_rows == 0:
            raise Misuse(Code.BAD_ARGUMENT, f"not a batch of {kind.name} rows")
        if time_us < self.last_time_us:
            raise Misuse(Code.BAD_ARGUMENT, f"time {time_us} is before the last frame's, {self.last_time_us}")
        frame = Frame(kind, self.next_sequence, self.next_position, time_us, self.epoch, batch)
        self.reserve(_size(frame))
        if self._segment_size and self._segment_size + _size(frame) > self._segment_bytes:
            self.store.segments.append(frame.sequence)
            self._segment_size = 0
        self._segment_size += _size(frame)
        self._bytes_written += _size(frame)
        self.store.frames.append(frame)
        return frame.position

    def sync(self) -> None:
        """What was appended survives :meth:`crash` from now on."""
        self.hand_over()()

    def hand_over(self) -> Callable[[], None]:
        """What was appended until now survives :meth:`crash` once the function returned has run."""
        self._check_usable()
        end = self.next_sequence

        def finish() -> None:
            if self.fail_next_sync:
                self.fail_next_sync = False
                self._failure = error(Code.LOG_FAILED, "write or sync failed: as told")
                raise self._failure
            self._durable = end

        return finish

    def crash(self) -> None:
        """Stop as a crash would: what was not synced is gone; open the ``store`` anew."""
        if not self._closed:
            del self.store.frames[self._durable - self.store.dropped :]
            self.store.segments = [s for s in self.store.segments if s == 0 or s <= self._durable]
        self.close(clean=False)

    def frames(self, start: int = 0, kinds: Sequence[Kind] | None = None, end: int | None = None) -> Iterator[Frame]:
        """Stored frames with ``start <= sequence < end``, of the given kinds."""
        self._check_usable()
        low = max(start - self.store.dropped, 0)
        high = self.next_sequence if end is None else end
        chosen = self.store.frames[low : max(high - self.store.dropped, 0)]
        return iter([frame for frame in chosen if kinds is None or frame.kind in kinds])

    def frames_at(
        self, position: int, kinds: Sequence[Kind] | None = None, end_position: int | None = None
    ) -> Iterator[Frame]:
        """As :meth:`frames`, from the frame that holds ``position``."""
        limit = self.next_position if end_position is None else min(end_position, self.next_position)
        if position >= limit:
            return iter(())
        located = self._locate(np.array([position, limit - 1], np.int64))
        return self.frames(int(located.sequences[0]), kinds, int(located.sequences[1]) + 1)

    def read(self, positions: Int64s, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The PLAIN and HALF rows at ``positions``, in that order."""
        positions = np.asarray(positions, np.int64)
        located = self._locate(positions)
        return gather(positions, located, lambda sequence: self.store.frames[sequence - self.store.dropped], columns)

    def time_at(self, positions: Int64s) -> Int64s:
        """The time_us of the frame that holds each position."""
        return self._locate(np.asarray(positions, np.int64)).times

    def _locate(self, positions: Int64s) -> Located:
        self._check_usable()
        if len(positions) and positions.min() < self.first_position:
            raise error(Code.RANGE_PURGED, f"position {positions.min()} has left the log")
        if len(positions) and positions.max() >= self.next_position:
            raise Misuse(Code.BAD_ARGUMENT, f"there is no position {positions.max()} yet")
        frames = self.store.frames
        starts = np.array([frame.position for frame in frames], np.int64)
        index = np.searchsorted(starts, positions, side="right") - 1
        times = np.array([frame.time_us for frame in frames], np.int64)
        kinds = np.array([frame.kind for frame in frames], np.uint8)
        return Located(self.store.dropped + index, starts[index], times[index], kinds[index])

    def position_before(self, time_us: int) -> int:
        """The position that begins the first segment holding anything newer; the last segment at most."""
        frames = self.store.frames
        segments = self.store.segments
        for frame in frames:
            if frame.time_us > time_us:
                first = segments[bisect_right(segments, frame.sequence) - 1]
                return frames[first - self.store.dropped].position
        return frames[segments[-1] - self.store.dropped].position

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Keep a snapshot; keeps the last two."""
        self._check_usable()
        if sequence > self._durable:
            raise Misuse(
                Code.BAD_ARGUMENT, f"a snapshot at {sequence} would be ahead of what is durable, {self._durable}"
            )
        snapshot = Snapshot(sequence, position, time_us, dict(tables))
        kept = [s for s in self.store.snapshots if s.sequence != sequence]
        self.store.snapshots = sorted([*kept, snapshot], key=lambda s: s.sequence)[-2:]

    def load_snapshot(self) -> Snapshot | None:
        """The newest snapshot."""
        self._check_usable()
        return self.store.snapshots[-1] if self.store.snapshots else None

    def bytes_since_snapshot(self) -> int:
        """Bytes of the frames from the newest snapshot on."""
        start = self.store.snapshots[-1].sequence if self.store.snapshots else 0
        return sum(_size(frame) for frame in self.store.frames if frame.sequence >= start)

    def drop_before(self, position: int) -> int:
        """Drop whole segments below ``position`` that the newest snapshot covers; how many."""
        self._check_usable()
        if not self.store.snapshots:
            return 0
        covered = self.store.snapshots[-1].sequence
        segments, frames = self.store.segments, self.store.frames
        count = 0
        while count + 1 < len(segments):
            following = segments[count + 1]
            if following > covered or frames[following - self.store.dropped].position > position:
                break
            count += 1
        del frames[: segments[count] - self.store.dropped]
        self.store.dropped = segments[count]
        del segments[:count]
        return count

    def close(self, *, clean: bool = True) -> None:
        """Sync and give the store back."""
        if self._closed:
            return
        try:
            if clean and self._failure is None:
                self.sync()
        finally:
            self._closed = True
            self.store.in_use = False

    def _check_usable(self) -> None:
        if self._closed:
            raise error(Code.CLOSED, "the log is closed")
        if self._failure is not None:
            raise error(Code.LOG_FAILED, self._failure.message)


def _size(frame: Frame) -> int:
    return HEADER_BYTES + int(frame.batch.nbytes)
