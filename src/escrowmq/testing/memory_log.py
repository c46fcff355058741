"""An in-memory commit log for tests, with the interface of the one on disk. In a crash it loses what was not synced."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.log.frames import HEADER_BYTES, Content, Packed
from escrowmq.log.index import Segment
from escrowmq.log.reading import ReadableLog, Reader
from escrowmq.log.seam import Frame, Snapshot
from escrowmq.log.segments import SegmentHeader
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.schemas import STORED, Kind
from escrowmq.testing.disks import MemoryDisk


@dataclass(slots=True)
class MemoryStore:
    """State that survives an opener: pass it to the next :class:`MemoryLog`. ``frames`` are by sequence, in order."""

    shard: int = field(default_factory=lambda: secrets.randbelow((1 << 32) - 1) + 1)
    epoch: int = 0
    frames: dict[int, Frame] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    in_use: bool = False


class MemoryLog(ReadableLog):
    """A CommitLog in memory. ``capacity``: bytes (None: unlimited); ``fail_next_sync`` makes the next sync fail."""

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
        self.epoch = self.store.epoch
        self.capacity = capacity
        self.fail_next_sync = False
        self.bytes_written = 0
        self._segment_bytes = segment_bytes
        self._failure: EscrowError | None = None
        self._closed = False
        stored = list(self.store.frames.values())
        self.next_sequence, self.next_position = (stored[0].sequence, stored[0].position) if stored else (0, 0)
        self.last_time_us = 0
        super().__init__(Reader(MemoryDisk(), [self._new_segment()]))
        self._reader.fresh = self.store.frames
        for frame in stored:
            self._publish(frame)
        self._durable = self.next_sequence
        now_us = max((clock or SystemClock()).now_us(), self.last_time_us)
        row = {"shard": self.shard, "version": version}
        self.append(Kind.OPENED, pa.RecordBatch.from_pylist([row], STORED[Kind.OPENED]), now_us)
        self.sync()

    @property
    def durable_sequence(self) -> int:
        """First sequence that is not durable; every frame below it can be read."""
        return self._durable

    def _new_segment(self) -> Segment:
        header = SegmentHeader(self.store.shard, self.epoch, self.next_sequence, self.next_position, 0, 0)
        return Segment.create(header, 0)

    def _publish(self, frame: Frame) -> None:
        """Make a frame readable, in a new segment if the last one is full."""
        size, last = _size(frame), self._reader.segments[-1]
        if last.index.count and last.size + size > self._segment_bytes:
            self._reader.segments += (self._new_segment(),)
        self._reader.publish(frame, self._reader.segments[-1].size, size, 0)
        self.next_sequence += 1
        self.next_position += frame.batch.num_rows
        self.last_time_us = frame.time_us

    def stored_bytes(self) -> int:
        """Return 0: nothing is on a disk."""
        return 0

    free_bytes = stored_bytes

    def reserve(self, size: int) -> None:
        """Raise Overloaded(DISK_FULL) if ``capacity`` has no room for ``size`` more bytes."""
        self._check_usable()
        if self.capacity is not None and sum(map(_size, self.store.frames.values())) + size > self.capacity:
            raise error(Code.DISK_FULL)

    def append(self, kind: Kind, content: Content, time_us: int) -> int:
        """Append one frame. Returns the position of its first row."""
        self._check_usable()
        batch = content.batch if isinstance(content, Packed) else content
        if not batch.schema.equals(STORED[kind]) or batch.num_rows == 0:
            raise Misuse(Code.BAD_ARGUMENT, f"not a batch of {kind.name} rows")
        if time_us < self.last_time_us:
            raise Misuse(Code.BAD_ARGUMENT, f"time {time_us} is before the last frame's, {self.last_time_us}")
        frame = Frame(kind, self.next_sequence, self.next_position, time_us, self.epoch, batch)
        self.reserve(_size(frame))
        self._publish(frame)
        self.bytes_written += _size(frame)
        return frame.position

    def sync(self) -> None:
        """Make appended frames survive :meth:`crash`."""
        self.hand_over()()

    def hand_over(self) -> Callable[[], None]:
        """Return a function that makes the frames appended so far survive :meth:`crash`."""
        self._check_usable()
        end = self.next_sequence

        def finish() -> None:
            if self.fail_next_sync:
                self.fail_next_sync = False
                self._failure = error(Code.LOG_FAILED, "write or sync failed: as told")
                raise self._failure
            self._durable = end

        return finish

    def settle(self) -> None:
        """Do nothing: there is no deferred work."""

    def crash(self) -> None:
        """Stop like a crash: frames that were not synced are lost; open the ``store`` anew."""
        if not self._closed:
            self.store.frames = {n: frame for n, frame in self.store.frames.items() if n < self._durable}
        self.close(clean=False)

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Store a snapshot; the last two are kept."""
        self._check_usable()
        if sequence > self._durable:
            text = f"a snapshot at {sequence} would be ahead of what is durable, {self._durable}"
            raise Misuse(Code.BAD_ARGUMENT, text)
        snapshot = Snapshot(sequence, position, time_us, dict(tables))
        kept = [s for s in self.store.snapshots if s.sequence != sequence]
        self.store.snapshots = sorted([*kept, snapshot], key=lambda s: s.sequence)[-2:]

    def load_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot."""
        self._check_usable()
        return self.store.snapshots[-1] if self.store.snapshots else None

    def bytes_since_snapshot(self) -> int:
        """Return the bytes of the frames from the newest snapshot on."""
        return self._reader.bytes_from(self._covered)

    @property
    def _covered(self) -> int:
        """First sequence that no snapshot covers."""
        return self.store.snapshots[-1].sequence if self.store.snapshots else 0

    def drop_before(self, position: int) -> int:
        """Drop whole segments below ``position`` that the newest snapshot covers. Returns their number."""
        self._check_usable()
        dropped = self._reader.droppable(position, self._covered)
        self._reader.drop(len(dropped))
        for segment in dropped:
            for sequence in range(segment.sequence, segment.next_sequence):
                del self.store.frames[sequence]
        return len(dropped)

    def release(self) -> None:
        """Do nothing: no other process waits for it."""

    def close(self, *, clean: bool = True) -> None:
        """Sync and release the store."""
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
