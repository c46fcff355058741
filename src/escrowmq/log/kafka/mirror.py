"""The local copy of what counts in the partition: segments like those of any log, filled from elsewhere, never synced,
and readable while they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.log import frames as codec
from escrowmq.log.active import ActiveSegment
from escrowmq.log.commit_log import SegmentLog
from escrowmq.log.frames import FrameHeader
from escrowmq.log.index import Segment
from escrowmq.log.kafka.fold import Standing
from escrowmq.log.kafka.marks import Marks
from escrowmq.log.lookups.parts import Sizes
from escrowmq.log.recovery import Recovered
from escrowmq.log.seam import Frame
from escrowmq.platform.disk import Disk, File, WrappedDisk, WrappedFile, disk_error, map_file
from escrowmq.platform.failpoints import reach
from escrowmq.schemas import Kind

MARK_BYTES = 8 << 20
"""After so many bytes, how far they go is noted: at most so many are followed again when the node is started anew."""


class Differs(Exception):
    """The mirror holds a frame that is not the one in the partition: it is to be begun anew."""


class Mirror(SegmentLog):
    """A :class:`escrowmq.log.seam.StoredLog` that grows by :meth:`take`. One thread takes; any may read."""

    def __init__(
        self,
        disk: Disk,
        segment_bytes: int,
        lz4: bool,
        found: Recovered,
        marks: Marks,
        lookups: Sizes | None = None,
        active: ActiveSegment | None = None,
    ) -> None:
        super().__init__(disk, segment_bytes, lz4, found, active)
        self.marks = marks
        self._unmarked = 0
        self._compared: tuple[str, pa.Buffer] | None = None  # a segment whose frames are compared
        self._look_at_damage(found.damaged)
        self._begin_lookups(lookups)

    @property
    def salt(self) -> int:
        """Of the frames' checksums."""
        return self._segment.header.salt

    def take(self, content: memoryview, places: Sequence[tuple[int, FrameHeader]], before: Standing) -> list[Frame]:
        """Take in checked frames, which lie in ``content`` at ``places`` and follow what there is; those that are new,
        which :meth:`settle` makes readable for the other threads' looks at what is durable. ``before``: where a fold
        can continue that has not seen them.

        Overloaded(DISK_FULL, OUT_OF_RESOURCES) may leave some of them taken: the same may be given again.
        Corrupt(LOG_FAILED); :class:`Differs` if there is another frame in the place of one.
        """
        taken: list[Frame] = []
        for at, header in places:
            if header.sequence < self.next_sequence:
                self._compare(header)
                continue
            size = header.frame_bytes
            try:
                if self._active.end + size > self._segment_bytes and self._segment.index.count:
                    self.settle()
                    self._roll(size)
                    self.note(before, keep=True)
                self._active.make_room(size, self._segment_bytes)
            except (OSError, MemoryError) as problem:
                raise disk_error(problem) from problem
            raw = pa.py_buffer(content[at : at + size])
            batch = codec.decode(raw, 0, header, "the partition")
            frame = Frame(Kind(header.kind), header.sequence, header.position, header.time_us, header.epoch, batch)
            self.epoch = header.epoch
            self._publish(frame, self._active.end, size)
            self._active.put([raw], size)
            taken.append(frame)
        return taken

    def settle(self) -> None:
        """Write what was taken. Overloaded or Corrupt(LOG_FAILED): the mirror is to be opened anew."""
        if self._durable == self.next_sequence:
            return
        try:
            self._settle(self._segment, self._active.take()(), self.next_sequence)
        except (OSError, MemoryError) as problem:
            raise self._fail(disk_error(problem)) from problem

    def noted(self, size: int, standing: Standing) -> None:
        """So many bytes more came into the mirror, up to where a fold stands there: from time to time that is noted."""
        self._unmarked += size
        if self._unmarked > MARK_BYTES:
            self._unmarked = 0
            self.note(standing)

    def note(self, standing: Standing, *, keep: bool = False) -> None:
        """Note that the mirror holds all that a fold has counted which stands there."""
        self.marks.note(standing, keep=keep)
        self.marks.save()
        reach("mirror.marked")

    def _compare(self, header: FrameHeader) -> None:
        """Raise Corrupt if a stored frame differs from the same one of the partition."""
        with self._reader.lock:
            found = [s for s in self._reader.segments if s.sequence <= header.sequence]
        if not found:
            return  # before the base
        segment: Segment = found[-1]
        offset = int(segment.index.offsets[header.sequence - segment.sequence])
        if self._compared is None or self._compared[0] != segment.name:
            self._compared = segment.name, map_file(self._disk, segment.name, segment.size)
        data = self._compared[1]
        if offset + codec.HEADER_BYTES > data.size:
            raise Differs(f"{segment.name} ends before frame {header.sequence}")
        stored = codec.read_header(data, offset)
        if stored.checksum != header.checksum:
            raise Differs(f"frame {header.sequence} in {segment.name} is not the one in the partition")

    # What a log does that nobody leads here

    def reserve(self, size: int) -> None:
        """Only who leads appends."""
        self._check_leads()
        super().reserve(size)

    def _settle_last(self) -> None:
        self.settle()

    def _check_leads(self) -> None:
        raise Misuse(Code.BAD_ARGUMENT, "this node follows the log, and does not lead it")


class UnsyncedDisk(WrappedDisk):
    """A disk that is never asked to make anything durable. The folder's lock stays with whoever has the disk below."""

    def open(self, name: str, *, create: bool = False) -> File:
        """Return the file of that name."""
        return _UnsyncedFile(super().open(name, create=create))

    def sync_folder(self) -> None:
        """Do nothing: a mirror is never synced."""

    def lock(self) -> None:
        """Do nothing: the maker of this disk has the folder."""

    def close(self) -> None:
        """Do nothing: the folder belongs to the caller who made this disk."""


class _UnsyncedFile(WrappedFile):
    def sync(self) -> None:
        """Do nothing: a mirror is never synced."""
