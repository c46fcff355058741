"""The commit log on local segment files. One writer thread; reading is safe from any thread (see seam.py for the
contract).
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, error
from escrowmq.log import frames as codec
from escrowmq.log import snapshots
from escrowmq.log.active import ActiveSegment
from escrowmq.log.index import Segment
from escrowmq.log.lookups.finder import Lookups
from escrowmq.log.lookups.parts import Sizes
from escrowmq.log.reading import ReadableLog, Reader
from escrowmq.log.recovery import Cut, Recovered, list_folder, recover, refuse_foreign, refuse_mirror, save_index
from escrowmq.log.report import DAMAGED_NAME, Damage, pack_damaged, unpack_damaged
from escrowmq.log.seam import Frame, Snapshot
from escrowmq.log.segments import (
    CLOSED_NAME,
    HEADER_BYTES,
    SegmentHeader,
    index_name,
    pack_closed,
)
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.platform.disk import Disk, disk_error, read_file, replace_file
from escrowmq.platform.logs import tell
from escrowmq.schemas import MESSAGES, STORED, Kind

Int64s = npt.NDArray[np.int64]

MOST_DAMAGED = 1 << 20
"""Bytes of the list of damaged frames that are read."""

_SEED = struct.Struct("<IQ")
_KEPT_SNAPSHOTS = 2


def open_log(
    disk: Disk,
    *,
    segment_bytes: int = 256 << 20,
    compression: str = "none",
    version: str = "",
    clock: Clock | None = None,
    seed: bytes | None = None,
    lookups: Sizes | None = None,
) -> SegmentLog:
    """Open the log in ``disk``'s folder, or make one; takes the folder's lock and appends a durable OPENED frame.

    ``compression`` ("none", "lz4") is of message frames; ``version`` is this program's, for the record; ``seed`` (12
    bytes) fixes the shard id and salt of a new log, random otherwise; ``lookups`` are the sizes of its look-up files.
    Raises Misuse(FOLDER_IN_USE, NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT, LOG_FAILED), Overloaded(DISK_FULL,
    OUT_OF_RESOURCES); the folder is given back then.
    """
    listing = list_folder(disk)
    refuse_foreign(listing)  # before the lock, which makes a file
    refuse_mirror(listing)
    disk.lock()
    try:
        listing = list_folder(disk)
        refuse_foreign(listing)
        refuse_mirror(listing)
        clock = clock or SystemClock()
        found = recover(disk, listing)
        if found is None:
            log = SegmentLog._create(disk, segment_bytes, compression == "lz4", clock.now_us(), seed)
        else:
            log = SegmentLog(disk, segment_bytes, compression == "lz4", found)
        log._begin_epoch(version, max(clock.now_us(), log.last_time_us))
        log._look_at_damage(found.damaged if found is not None else [])
        log._begin_lookups(lookups)
        return log
    except (OSError, MemoryError) as problem:
        disk.close()
        raise disk_error(problem) from problem
    except BaseException:
        disk.close()
        raise


def first_segment(disk: Disk, header: SegmentHeader, segment_bytes: int) -> tuple[Recovered, ActiveSegment]:
    """Make a log whose first segment has this header, of no frames yet; what recovery would find, and the segment to
    write to."""
    active = ActiveSegment.create(disk, header, 1 << 12, segment_bytes).begin()
    return Recovered([Segment.begun(header, HEADER_BYTES)], [], 0, 0, None), active


class SegmentLog(ReadableLog):
    """A CommitLog in a folder. ``cut`` tells of the torn tail that this opening cut off, if there was one."""

    def __init__(
        self, disk: Disk, segment_bytes: int, lz4: bool, found: Recovered, active: ActiveSegment | None = None
    ) -> None:
        super().__init__(Reader(disk, found.segments))
        last = found.segments[-1]
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._lz4 = lz4
        self._segment = last
        self._active = active or ActiveSegment.resume(disk, last.name, last.size)
        self.epoch = found.epoch
        self.next_sequence = self._durable = last.next_sequence
        self.next_position = last.next_position
        self.last_time_us = found.time_us
        self.bytes_written = 0  # of frames, by this opener
        self._snapshots = found.snapshots
        self._failure: EscrowError | None = None
        self._writing = threading.Lock()  # held while a hand-over is in the air
        self._closed = False
        self._listing = threading.Lock()
        self._listed: list[int] = []  # what the file ``damaged`` says
        self.cut: Cut | None = found.cut

    @classmethod
    def _create(cls, disk: Disk, segment_bytes: int, lz4: bool, now_us: int, seed: bytes | None) -> SegmentLog:
        shard, salt = _SEED.unpack(seed or os.urandom(_SEED.size))
        header = SegmentHeader(shard or 1, 1, 0, 0, now_us, salt)
        found, active = first_segment(disk, header, segment_bytes)
        return cls(disk, segment_bytes, lz4, found, active)

    def _begin_epoch(self, version: str, now_us: int) -> None:
        self.epoch += 1
        schema = STORED[Kind.OPENED]
        self.append(
            Kind.OPENED, pa.RecordBatch.from_pylist([{"shard": self.shard, "version": version}], schema), now_us
        )
        self.sync()

    def _look_at_damage(self, found: list[int]) -> None:
        """Look again at the frames in which damage was met before, or ``found`` now, and note from now on where more is
        met."""
        self._reader.noticed = self._notice
        with suppress(OSError):
            self._listed = unpack_damaged(read_file(self._disk, DAMAGED_NAME, MOST_DAMAGED))
        with suppress(OSError):
            for sequence in sorted({*self._listed, *found}):
                if self._reader.segments[0].sequence <= sequence < self.next_sequence:
                    self._reader.frame(sequence, keep=False)
            self._list_damage()

    def _begin_lookups(self, sizes: Sizes | None) -> None:
        lookups = Lookups(self._disk, self._reader, self.shard, writes=True, sizes=sizes)
        lookups.begin(self.next_sequence)
        self._lookups = lookups

    def settle_lookups(self, timeout: float | None = None) -> bool:
        """Wait until all look-up files are made, for ``timeout`` seconds at most; whether they are."""
        return self._lookups is None or self._lookups.settle(timeout)

    def _notice(self, damage: Damage) -> None:
        sentence = f"damaged: {damage}; nothing is deleted"
        facts = {"file": damage.file, "offset": damage.offset, "sequence": damage.sequence, "cause": damage.what}
        tell(logging.ERROR, "damaged", sentence, **facts)
        self._list_damage()

    def _list_damage(self) -> None:
        """Write the list of damage if possible: it is derived, and a later read finds the damage again."""
        with suppress(OSError), self._listing:
            frames = self._reader.damaged_frames()
            if frames != self._listed:
                replace_file(self._disk, DAMAGED_NAME, [[pack_damaged(frames)]], durable=False)
                self._listed = frames

    @property
    def durable_sequence(self) -> int:
        """Every frame below this is durable, and can be read."""
        return self._durable

    def stored_bytes(self) -> int:
        """Return bytes of all segments, without reserved space."""
        return sum(segment.size for segment in self._reader.segments)

    def free_bytes(self) -> int:
        """Free bytes on the disk; 0 if unknown."""
        try:
            return self._disk.free_bytes()
        except OSError:
            return 0

    # Writing

    def reserve(self, size: int) -> None:
        """Make sure that appends of ``size`` bytes (see frames.size_bound) will find room; Overloaded if not
        (DISK_FULL, OUT_OF_RESOURCES)."""
        self._check_usable()
        try:
            if self._active.end + size > self._segment_bytes and self._segment.index.count:
                self._roll(size)
            else:
                self._active.make_room(size, self._segment_bytes)
        except (OSError, MemoryError) as problem:
            refusal = disk_error(problem)
            if not isinstance(refusal, Overloaded):
                self._fail(refusal)
            raise refusal from problem

    def append(self, kind: Kind, content: codec.Content, time_us: int) -> int:
        """Add one frame of at least one row, no older than the last; the position of its first row.

        Overloaded if nothing was reserved and there is no room; nothing is changed then.
        """
        self._check_usable()
        if time_us < self.last_time_us:
            raise Misuse(Code.BAD_ARGUMENT, f"time {time_us} is before the last frame's, {self.last_time_us}")
        position, sequence = self.next_position, self.next_sequence
        chunks = codec.encode(
            kind,
            content,
            sequence=sequence,
            position=position,
            time_us=time_us,
            epoch=self.epoch,
            synced=self._durable,
            salt=self._segment.header.salt,
            lz4=self._lz4 and kind in (Kind.PLAIN, Kind.HALF),
        )
        size = sum(map(len, chunks))
        self.reserve(size)
        self._publish(Frame(kind, sequence, position, time_us, self.epoch, content), self._active.end, size)
        self._put(chunks, size)
        return position

    def _put(self, chunks: list[codec.Chunk], size: int) -> None:
        """Buffer the bytes of a frame."""
        self._active.put(chunks, size)

    def _publish(self, frame: Frame, offset: int, size: int) -> None:
        """Let readers see an appended frame."""
        self.next_sequence += 1
        self.next_position += frame.count
        self.last_time_us = frame.time_us
        self.bytes_written += size
        self._reader.publish(frame, offset, size, self._durable)

    def sync(self) -> None:
        """Write what is buffered in one write, sync once. Corrupt(LOG_FAILED) stops the log."""
        self.hand_over()()

    def hand_over(self) -> Callable[[], None]:
        """Take out what is buffered; the function returned writes and syncs it, on any thread. Corrupt(LOG_FAILED)."""
        self._writing.acquire()
        try:
            self._check_usable()
            if self._durable == self.next_sequence:
                self._writing.release()
                return _nothing
        except BaseException:
            self._writing.release()
            raise
        segment, end, flush = self._segment, self.next_sequence, self._active.take()

        def finish() -> None:
            try:
                self._settle(segment, flush(), end)
            except OSError as problem:  # whatever it is: nobody knows how much of it is on the disk
                raise self._fail(error(Code.LOG_FAILED, f"write or sync failed: {problem}")) from problem
            except BaseException as problem:
                self._fail(error(Code.LOG_FAILED, f"write or sync broke off: {problem!r}"))
                raise
            finally:
                self._writing.release()

        return finish

    def settle(self) -> None:
        """Do nothing: no work is deferred here."""

    def _settle(self, segment: Segment, data: pa.Buffer | None, end: int) -> None:
        """Every frame below sequence ``end`` is durable and lies in the mapped file."""
        with self._reader.lock:
            if data is not None:
                segment.data = data
            fresh = self._reader.fresh
            written = [fresh.pop(sequence, None) for sequence in range(self._durable, end)]
            size = segment.bytes_from(self._durable)
        self._durable = end
        if self._lookups is not None:
            messages = [frame for frame in written if frame is not None and frame.kind in MESSAGES]
            self._lookups.durable(messages, size, end)

    def _roll(self, size: int) -> None:
        """Begin a new segment with room for ``size`` bytes. What can run out (of space, descriptors, memory) comes
        first and changes nothing."""
        header = self._segment.header
        following = SegmentHeader(
            header.shard, self.epoch, self.next_sequence, self.next_position, self.last_time_us, header.salt
        )
        self._await_writing()
        self._check_usable()
        prepared = ActiveSegment.create(self._disk, following, size, self._segment_bytes)
        sealed = self._segment
        try:
            data = self._active.seal()
            self._settle(sealed, data, self.next_sequence)
            self._active = prepared.begin()
        except OSError as problem:
            raise self._fail(error(Code.LOG_FAILED, f"sealing a segment failed: {problem}")) from problem
        self._segment = Segment.begun(following, HEADER_BYTES)
        with self._reader.lock:
            self._reader.segments += (self._segment,)
        save_index(self._disk, sealed)

    def _await_writing(self) -> None:
        """Wait until no hand-over writes to the file."""
        with self._writing:
            pass

    def _fail(self, failure: EscrowError) -> EscrowError:
        self._failure = failure
        return failure

    def _check_usable(self) -> None:
        if self._closed:
            raise error(Code.CLOSED, "the log is closed")
        if self._failure is not None:
            raise error(Code.LOG_FAILED, self._failure.message)

    # Snapshots and retention

    def save_snapshot(self, tables: dict[str, pa.Table], sequence: int, position: int, time_us: int) -> None:
        """Store a snapshot of durable frames durably; keeps the last two.

        What cannot be stored leaves the old ones, and the log continues: Overloaded(DISK_FULL, OUT_OF_RESOURCES), or
        Corrupt(LOG_FAILED) of this snapshot alone. It can be derived again from the frames.
        """
        self._check_usable()
        if sequence > self._durable:
            raise Misuse(
                Code.BAD_ARGUMENT, f"a snapshot at {sequence} would be ahead of what is durable, {self._durable}"
            )
        try:
            name = snapshots.save(self._disk, self.shard, Snapshot(sequence, position, time_us, tables))
        except (OSError, MemoryError) as problem:
            raise disk_error(problem) from problem
        with self._reader.lock:
            kept = sorted({*self._snapshots, name}, reverse=True)
            old = [s for s in kept if s.first < 0][_KEPT_SNAPSHOTS:]
            self._snapshots = [s for s in kept if s not in old]
        for gone in old:
            self._remove(str(gone))

    def load_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot that checks; None when the log goes back to its beginning; else Corrupt."""
        self._check_usable()
        found = self._newest_snapshot()
        return found[1] if found is not None else None

    def _newest_snapshot(self) -> tuple[SnapshotName, Snapshot] | None:
        with self._reader.lock:
            names, first = list(self._snapshots), self._reader.segments[0].sequence
        try:
            return snapshots.newest(self._disk, self.shard, names, first, self.next_sequence)
        except (OSError, MemoryError) as problem:
            raise disk_error(problem) from problem

    def bytes_since_snapshot(self) -> int:
        """Return bytes of the frames from the newest snapshot on."""
        with self._reader.lock:
            start = self._snapshots[0].sequence if self._snapshots else 0
        return self._reader.bytes_from(start)

    def drop_before(self, position: int) -> int:
        """Drop whole segments below ``position`` that the newest snapshot covers, which becomes the base; how many."""
        self._check_usable()
        found = self._newest_snapshot()
        if found is None:
            return 0
        name, snapshot = found
        dropped = self._reader.droppable(position, snapshot.sequence)
        if not dropped:
            return 0
        old_base = self._make_base(name, dropped[-1].next_sequence)
        self._reader.drop(len(dropped))
        if self._lookups is not None:
            self._lookups.dropped()
        for segment in dropped:
            self._remove(segment.name)
            self._remove(index_name(segment.name))
        for old in old_base:
            self._remove(str(old))
        self._list_damage()
        return len(dropped)

    def _make_base(self, current: SnapshotName, first: int) -> list[SnapshotName]:
        """Make the snapshot ``current`` the base of a log that begins with frame ``first``; the bases it replaces.

        A rename that fails changed nothing: Overloaded or Corrupt(LOG_FAILED), and the log continues. When it is not
        known to be durable, the log stops.
        """
        base = SnapshotName(current.sequence, first)
        with self._reader.lock:
            others = [s for s in self._snapshots if s not in (current, base)]
        try:
            self._disk.rename(str(current), str(base))
        except OSError as problem:
            raise disk_error(problem) from problem
        try:
            self._disk.sync_folder()
        except OSError as problem:
            raise self._fail(error(Code.LOG_FAILED, f"renaming a snapshot failed: {problem}")) from problem
        replaced = [s for s in others if s.first >= 0]
        with self._reader.lock:
            self._snapshots = sorted({base, *(s for s in others if s.first < 0)}, reverse=True)
        return replaced

    def _remove(self, name: str) -> None:
        """Delete what is no longer part of the log; what cannot be deleted now is at the next opening."""
        with suppress(OSError):
            self._disk.remove(name)

    # The end

    def release(self) -> None:
        """Do nothing: no other node waits for this log."""

    def close(self, *, clean: bool = True) -> None:
        """Sync, cut the reserved tail, give the folder back. Not ``clean``: leave everything as a crash would."""
        if self._closed:
            return
        self._await_writing()
        try:
            if clean and self._failure is None:
                self._settle_last()
                self._seal_cleanly()
        finally:
            if self._lookups is not None:
                self._lookups.close(clean=clean and self._failure is None)
            self._closed = True
            self._active.abandon()
            self.acts.close()
            self._disk.close()

    def _settle_last(self) -> None:
        """Write everything that was appended."""
        self.sync()

    def _seal_cleanly(self) -> None:
        """Cut the reserved tail, and note in the file ``closed`` how far the log is durable. A full disk may keep it
        from that."""
        try:
            self._active.seal()
        except OSError as problem:
            raise self._fail(error(Code.LOG_FAILED, f"closing the log failed: {problem}")) from problem
        with suppress(OSError):
            replace_file(self._disk, CLOSED_NAME, [[pack_closed(self.shard, self.next_sequence, self.next_position)]])


def _nothing() -> None:
    """Do nothing: there is no deferred work without an append."""
