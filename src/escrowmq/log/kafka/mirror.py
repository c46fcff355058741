"""The local copy of what counts in the partition: segments as in any log, never synced, readable while being filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.log import frames as codec
from escrowmq.log.commit_log import SegmentLog
from escrowmq.log.frames import FrameHeader
from escrowmq.log.kafka.fold import Standing
from escrowmq.log.kafka.marks import Marks
from escrowmq.log.lookups.parts import Sizes
from escrowmq.log.recovery import Recovered
from escrowmq.log.seam import Frame
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.disk import Disk, File, WrappedDisk, WrappedFile, disk_error, disk_errors, map_file
from escrowmq.platform.failpoints import reach

MARK_BYTES = 8 << 20
"""Bytes between marks of the mirror's progress: at most this much is followed again after a restart."""


class Differs(Exception):
    """A frame of the mirror differs from the partition's: start the mirror over."""


class Mirror(SegmentLog):
    """A :class:`escrowmq.log.seam.StoredLog` that grows by :meth:`take`. One thread takes; any may read."""

    def __init__(
        self, disk: Disk, segment_bytes: int, lz4: bool, found: Recovered, marks: Marks, lookups: Sizes | None
    ) -> None:
        super().__init__(disk, segment_bytes, lz4, found)
        self.marks = marks
        self.on_close: Callable[[], None] = lambda: None  # called after closing the leading log
        self._unmarked_bytes = 0
        self._compared_segment: tuple[str, pa.Buffer] | None = None  # the segment being compared
        self._recheck_damage(found.damaged)
        self._begin_lookups(lookups)

    @property
    def salt(self) -> int:
        return self._segment.header.salt

    def take(self, content: memoryview, places: Sequence[tuple[int, FrameHeader]], before: Standing) -> list[Frame]:
        """Append checked frames, which lie in ``content`` at ``places`` and follow the last one; return the new ones.
        :meth:`settle` makes them visible to other threads. ``before``: where a fold that has not seen them can resume.
        After Overloaded the same call may be repeated. Raises Corrupt(LOG_FAILED); :class:`Differs`."""
        taken: list[Frame] = []
        for at, header in places:
            if header.sequence < self.next_sequence:
                self._compare(header)
                continue
            size = header.frame_bytes
            with disk_errors():
                if self._active.end + size > self._segment_bytes and self._segment.index.count:
                    self.settle()
                    self._roll(size)
                    self.note(before, keep=True)
                self._active.make_room(size, self._segment_bytes)
            raw = pa.py_buffer(content[at : at + size])
            batch = codec.decode(raw, 0, header, "the partition")
            frame = Frame.of(header, batch)
            self.epoch = header.epoch
            self._publish(frame, self._active.end, size, header.synced)
            self._active.put([raw], size)
            taken.append(frame)
        return taken

    def settle(self) -> None:
        """Write the frames taken to the file, so that any thread can read them. After Overloaded or Corrupt(LOG_FAILED)
        the mirror must be reopened."""
        if self._durable == self.next_sequence:
            return
        try:
            self._mark_durable(self._segment, self._active.take()(), self.next_sequence)
        except (OSError, MemoryError) as problem:
            raise self._fail(disk_error(problem)) from problem

    def add_bytes(self, size: int, standing: Standing) -> None:
        """Count ``size`` more bytes in the mirror, up to ``standing``; record a mark from time to time."""
        self._unmarked_bytes += size
        if self._unmarked_bytes > MARK_BYTES:
            self._unmarked_bytes = 0
            self.note(standing)

    def note(self, standing: Standing, *, keep: bool = False) -> None:
        """Save a mark: the mirror holds all that a fold counted up to ``standing``. ``keep``: a segment begins there,
        so keep the mark for retention."""
        self.marks.note(standing, keep=keep)
        self.marks.save()
        reach("mirror.marked")

    def _compare(self, header: FrameHeader) -> None:
        with self._reader.lock:
            found = [s for s in self._reader.segments if s.sequence <= header.sequence]
        if not found:
            return  # before the base
        segment = found[-1]
        offset = int(segment.index.offsets[header.sequence - segment.sequence])
        if self._compared_segment is None or self._compared_segment[0] != segment.name:
            self._compared_segment = segment.name, map_file(self._disk, segment.name, segment.size)
        data = self._compared_segment[1]
        if offset + codec.HEADER_BYTES > data.size:
            raise Differs(f"{segment.name} ends before frame {header.sequence}")
        stored = codec.read_header(data, offset)
        if stored.checksum != header.checksum:
            raise Differs(f"frame {header.sequence} in {segment.name} is not the one in the partition")

    def reserve(self, size: int) -> None:
        """Reject appends: only the leader appends."""
        raise Misuse(Code.BAD_ARGUMENT, "this node follows the log, and does not lead it")

    def _write_last(self) -> None:
        self.settle()

    # Retention

    def newest_snapshot_sequence(self) -> int:
        """Return the sequence of the newest local snapshot; -1 without one."""
        with self._reader.lock:
            return self._snapshots[0].sequence if self._snapshots else -1

    def reaches_base(self) -> bool:
        """Return whether the log has the frames up to the snapshot of its base, if any."""
        with self._reader.lock:
            return all(s.sequence <= self.next_sequence for s in self._snapshots if s.first >= 0)

    def follow_base(self, position: int, fetched: SnapshotName | None) -> None:
        """Drop segments and marks below log ``position``, as the leader did. ``fetched``: a new snapshot."""
        with self._reader.lock:
            self._snapshots = sorted({*self._snapshots, fetched} if fetched else self._snapshots, reverse=True)
        self.drop_before(position)
        self.marks.drop_below(self._reader.stored_from()[0])


class UnsyncedDisk(WrappedDisk):
    """A disk that never makes anything durable. The owner of the underlying disk keeps the folder's lock."""

    def open(self, name: str, *, create: bool = False) -> File:
        return _UnsyncedFile(self._disk.open(name, create=create))

    def sync_folder(self) -> None:
        """Do nothing: a mirror is never synced."""

    def lock(self) -> None:
        """Do nothing: the owner of the underlying disk has the lock."""

    def close(self) -> None:
        """Do nothing: the owner of the underlying disk closes it."""


class _UnsyncedFile(WrappedFile):
    def sync(self) -> None:
        """Do nothing: a mirror is never synced."""
