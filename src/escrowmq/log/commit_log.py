"""The commit log on local segment files. One writer thread; any thread may read (contract: seam.py)."""

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
from escrowmq.log.recovery import Cut, Recovered, list_own_folder, recover, save_index
from escrowmq.log.report import DAMAGED_NAME, Damage, pack_damaged, unpack_damaged
from escrowmq.log.seam import Frame, Snapshot
from escrowmq.log.segments import CLOSED_NAME, HEADER_BYTES, SegmentHeader, index_name, pack_closed
from escrowmq.log.snapshots import SnapshotName
from escrowmq.platform.clock import Clock, SystemClock
from escrowmq.platform.disk import Chunk, Disk, disk_error, disk_errors, read_file, replace_file
from escrowmq.platform.logs import tell
from escrowmq.schemas import MESSAGES, STORED, Kind

Int64s = npt.NDArray[np.int64]

MOST_DAMAGED = 1 << 20  # maximum size (bytes) of the list of damaged frames

SEED = struct.Struct("<IQ")
_KEPT_SNAPSHOTS = 2


@disk_errors()
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
    """Open or create the log in ``disk``'s folder; lock the folder and append a durable OPENED frame. A new segment
    begins after ``segment_bytes``. ``compression`` ("none", "lz4") is that of message frames, ``version`` that of this
    program; ``seed`` (12 bytes) fixes the shard id and salt of a new log. Raises Misuse(FOLDER_IN_USE,
    NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT, LOG_FAILED), Overloaded(DISK_FULL, OUT_OF_RESOURCES); the folder
    is released then."""
    list_own_folder(disk)  # before the lock, which creates a file
    disk.lock()
    try:
        clock = clock or SystemClock()
        found = recover(disk, list_own_folder(disk))
        if found is None:
            shard, salt = SEED.unpack(seed or os.urandom(SEED.size))
            header = SegmentHeader(shard or 1, 1, 0, 0, clock.now_us(), salt)
            found = create_log(disk, header, segment_bytes)
        log = SegmentLog(disk, segment_bytes, compression == "lz4", found)
        log._begin_epoch(version, max(clock.now_us(), log.last_time_us))
        log._recheck_damage(found.damaged)
        log._begin_lookups(lookups)
        return log
    except BaseException:
        disk.close()
        raise


def create_log(disk: Disk, header: SegmentHeader, segment_bytes: int) -> Recovered:
    """Create a log without frames in an empty folder; its first segment has this header."""
    active = ActiveSegment.create(disk, header, 1 << 12, segment_bytes).begin()
    return Recovered([Segment.create(header, HEADER_BYTES)], [], 0, 0, None, active=active)


class SegmentLog(ReadableLog):
    """A CommitLog in a folder. ``cut`` is the torn tail that this opening cut off, or None."""

    def __init__(self, disk: Disk, segment_bytes: int, lz4: bool, found: Recovered) -> None:
        super().__init__(Reader(disk, found.segments))
        last = found.segments[-1]
        self._disk, self._segment_bytes, self._lz4 = disk, segment_bytes, lz4
        self._segment = last
        self._active = found.active or ActiveSegment.resume(disk, last.name, last.size)
        self.epoch = found.epoch
        self.next_sequence = self._durable = last.next_sequence
        self.next_position = last.next_position
        self.last_time_us = found.time_us
        self.bytes_written = 0  # frames of this opener
        self._snapshots = found.snapshots
        self._failure: EscrowError | None = None
        self._write_lock = threading.Lock()  # held while a hand-over is in flight
        self._closed = False
        self._damaged_lock = threading.Lock()
        self._saved_damaged: list[int] = []  # content of the file ``damaged``
        self.cut: Cut | None = found.cut

    def _begin_epoch(self, version: str, now_us: int) -> None:
        self.epoch += 1
        opened = pa.RecordBatch.from_pylist([{"shard": self.shard, "version": version}], STORED[Kind.OPENED])
        self.append(Kind.OPENED, opened, now_us)
        self.sync()

    def _recheck_damage(self, found: list[int]) -> None:
        """Read again the frames in ``found`` and those that the file ``damaged`` lists, to learn which are damaged now.
        From now on, damage that any read finds is recorded in that file."""
        self._reader.on_damage = self._on_damage
        with suppress(OSError):
            self._saved_damaged = unpack_damaged(read_file(self._disk, DAMAGED_NAME, MOST_DAMAGED))
        with suppress(OSError):
            for sequence in sorted({*self._saved_damaged, *found}):
                if self._reader.segments[0].sequence <= sequence < self.next_sequence:
                    self._reader.frame(sequence, keep=False)
            self._save_damaged()

    def _begin_lookups(self, sizes: Sizes | None) -> None:
        lookups = Lookups(self._disk, self._reader, self.shard, writes=True, sizes=sizes)
        lookups.begin(self.next_sequence)
        self._lookups = lookups

    def _on_damage(self, damage: Damage) -> None:
        sentence = f"damaged: {damage}; nothing is deleted"
        facts = {"file": damage.file, "offset": damage.offset, "sequence": damage.sequence, "cause": damage.what}
        tell(logging.ERROR, "damaged", sentence, **facts)
        self._save_damaged()

    def _save_damaged(self) -> None:
        """Write the file ``damaged``, the list of damaged frames, if it changed. It is derived: damage that cannot be
        saved now is found again."""
        with suppress(OSError), self._damaged_lock:
            frames = self._reader.damaged_frames()
            if frames != self._saved_damaged:
                replace_file(self._disk, DAMAGED_NAME, [[pack_damaged(frames)]], durable=False)
                self._saved_damaged = frames

    @property
    def durable_sequence(self) -> int:
        return self._durable

    def stored_bytes(self) -> int:
        return sum(segment.size for segment in self._reader.segments)

    def free_bytes(self) -> int:
        try:
            return self._disk.free_bytes()
        except OSError:
            return 0

    # Writing

    def reserve(self, size: int) -> None:
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
        self._check_usable()
        if time_us < self.last_time_us:
            raise Misuse(Code.BAD_ARGUMENT, f"time {time_us} is before the last frame's, {self.last_time_us}")
        frame = Frame(kind, self.next_sequence, self.next_position, time_us, self.epoch, content)
        place = {"sequence": frame.sequence, "position": frame.position, "time_us": time_us, "epoch": self.epoch}
        lz4, salt = self._lz4 and kind in (Kind.PLAIN, Kind.HALF), self._segment.header.salt
        synced = self._durable  # it may grow at any time: a sync can end on another thread
        chunks = codec.encode(kind, content, **place, synced=synced, salt=salt, lz4=lz4)
        size = sum(map(len, chunks))
        self.reserve(size)
        self._publish(frame, self._active.end, size, synced)
        self._put(chunks, size)
        return frame.position

    def _put(self, chunks: list[Chunk], size: int) -> None:
        self._active.put(chunks, size)

    def _publish(self, frame: Frame, offset: int, size: int, synced: int) -> None:
        self.next_sequence += 1
        self.next_position += frame.count
        self.last_time_us = frame.time_us
        self.bytes_written += size
        self._reader.publish(frame, offset, size, synced)

    def sync(self) -> None:
        self.hand_over()()

    def hand_over(self) -> Callable[[], None]:
        self._write_lock.acquire()
        try:
            self._check_usable()
            if self._durable == self.next_sequence:
                self._write_lock.release()
                return lambda: None
        except BaseException:
            self._write_lock.release()
            raise
        segment, end, flush = self._segment, self.next_sequence, self._active.take()

        def finish() -> None:
            try:
                self._mark_durable(segment, flush(), end)
            except OSError as problem:  # any error: it is unknown how much was written
                raise self._fail(error(Code.LOG_FAILED, f"write or sync failed: {problem}")) from problem
            except BaseException as problem:
                self._fail(error(Code.LOG_FAILED, f"write or sync was interrupted: {problem!r}"))
                raise
            finally:
                self._write_lock.release()

        return finish

    def settle(self) -> None:
        """Do nothing: there is no deferred work."""

    def _mark_durable(self, segment: Segment, data: pa.Buffer | None, end: int) -> None:
        """Note that every frame below sequence ``end`` is durable and lies in ``data``, the mapped file of ``segment``,
        and pass the new message frames to the look-ups."""
        with self._reader.lock:
            if data is not None:
                segment.data = data
            fresh = self._reader.fresh
            written = [fresh.pop(sequence, None) for sequence in range(self._durable, end)]
            size = segment.bytes_from(self._durable)
        self._durable = end
        if self._lookups is not None:
            messages = [frame for frame in written if frame is not None and frame.kind in MESSAGES]
            self._lookups.on_durable(messages, size, end)

    def _roll(self, size: int) -> None:
        """Seal the last segment and begin a new one with room for ``size`` bytes. What can fail for lack of space,
        descriptors or memory comes first and changes nothing."""
        header = self._segment.header
        place = (self.epoch, self.next_sequence, self.next_position, self.last_time_us)
        following = SegmentHeader(header.shard, *place, header.salt)
        self._await_writing()
        self._check_usable()
        prepared = ActiveSegment.create(self._disk, following, size, self._segment_bytes)
        sealed = self._segment
        try:
            data = self._active.seal()
            self._mark_durable(sealed, data, self.next_sequence)
            self._active = prepared.begin()
        except OSError as problem:
            raise self._fail(error(Code.LOG_FAILED, f"sealing a segment failed: {problem}")) from problem
        self._segment = Segment.create(following, HEADER_BYTES)
        with self._reader.lock:
            self._reader.segments += (self._segment,)
        save_index(self._disk, sealed)

    def _await_writing(self) -> None:
        with self._write_lock:
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
        self._check_usable()
        if sequence > self._durable:
            message = f"a snapshot at {sequence} would be ahead of what is durable, {self._durable}"
            raise Misuse(Code.BAD_ARGUMENT, message)
        with disk_errors():
            name = snapshots.save(self._disk, self.shard, Snapshot(sequence, position, time_us, tables))
        with self._reader.lock:
            kept = sorted({*self._snapshots, name}, reverse=True)
            old = [s for s in kept if s.first < 0][_KEPT_SNAPSHOTS:]
            self._snapshots = [s for s in kept if s not in old]
        self._remove(*old)

    def load_snapshot(self) -> Snapshot | None:
        self._check_usable()
        found = self._newest_snapshot()
        return found[1] if found is not None else None

    def _newest_snapshot(self) -> tuple[SnapshotName, Snapshot] | None:
        with self._reader.lock:
            names, first = list(self._snapshots), self._reader.segments[0].sequence
        with disk_errors():
            return snapshots.newest(self._disk, self.shard, names, first, self.next_sequence)

    def bytes_since_snapshot(self) -> int:
        with self._reader.lock:
            start = self._snapshots[0].sequence if self._snapshots else 0
        return self._reader.bytes_from(start)

    def drop_before(self, position: int) -> int:
        self._check_usable()
        if (found := self._newest_snapshot()) is None:
            return 0
        name, snapshot = found
        if not (dropped := self._reader.droppable(position, snapshot.sequence)):
            return 0
        old_base = self._make_base(name, dropped[-1].next_sequence)
        self._reader.drop(len(dropped))
        if self._lookups is not None:
            self._lookups.on_dropped()
        for segment in dropped:
            self._remove(segment.name, index_name(segment.name))
        self._remove(*old_base)
        self._save_damaged()
        return len(dropped)

    def _make_base(self, current: SnapshotName, first: int) -> list[SnapshotName]:
        """Make the snapshot ``current`` the base of a log that begins with frame ``first``; return the bases it
        replaces, to be deleted. If the rename fails, the log continues: Overloaded or Corrupt(LOG_FAILED). If it may
        not be durable, the log stops."""
        base = SnapshotName(current.sequence, first)
        with self._reader.lock:
            others = [s for s in self._snapshots if s not in (current, base)]
        with disk_errors():
            self._disk.rename(str(current), str(base))
        try:
            self._disk.sync_folder()
        except OSError as problem:
            raise self._fail(error(Code.LOG_FAILED, f"renaming a snapshot failed: {problem}")) from problem
        replaced = [s for s in others if s.first >= 0]
        with self._reader.lock:
            self._snapshots = sorted({base, *(s for s in others if s.first < 0)}, reverse=True)
        return replaced

    def _remove(self, *names: str | SnapshotName) -> None:
        """Delete files that are no longer part of the log; a failed deletion is repeated at the next opening."""
        for name in names:
            with suppress(OSError):
                self._disk.remove(str(name))

    # Closing

    def release(self) -> None:
        """Do nothing: no other node waits for the log."""

    def close(self, *, clean: bool = True) -> None:
        if self._closed:
            return
        self._await_writing()
        try:
            if clean and self._failure is None:
                self._write_last()
                self._active.seal()
                with suppress(OSError):  # a full disk may prevent it
                    end = pack_closed(self.shard, self.next_sequence, self.next_position)
                    replace_file(self._disk, CLOSED_NAME, [[end]])
        except OSError as problem:
            raise self._fail(error(Code.LOG_FAILED, f"closing the log failed: {problem}")) from problem
        finally:
            if self._lookups is not None:
                self._lookups.close(clean=clean and self._failure is None)
            self._closed = True
            self._active.abandon()
            self.acts.close()
            self._disk.close()

    def _write_last(self) -> None:
        self.sync()
