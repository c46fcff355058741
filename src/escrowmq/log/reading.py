"""Log reader: decodes frames in place and collects rows by position. Safe from any thread."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.acts.journal import Journal
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, error
from escrowmq.log import frames as codec
from escrowmq.log import snapshots
from escrowmq.log.bodies import SoundColumns
from escrowmq.log.frames import Encoding
from escrowmq.log.index import Segment
from escrowmq.log.lookups.entries import Column, Query
from escrowmq.log.lookups.finder import Lookups
from escrowmq.log.report import Damage, DamagedLog, RowDamage
from escrowmq.log.rows import (
    READ_SCHEMA,
    Located,
    Recent,
    expected_of,
    gather,
    row_damage,
    salvage_frame,
    sound_columns,
)
from escrowmq.log.seam import Frame, Kinds, LogFiles, Match, StoredFile
from escrowmq.message.names import is_text
from escrowmq.platform.disk import Disk, disk_error, disk_errors, file_size, map_file
from escrowmq.schemas import MESSAGES, Kind

Int64s = npt.NDArray[np.int64]

MAX_RECHECKED = 16  # maximum number of damaged frames to recheck when all damage is listed
KINDS_AT_ONCE = 4096  # number of frames whose kinds are compared at a time
_RETRIES = 5  # retries of listing the files if retention drops segments meanwhile
_COPIED = re.compile(r"\d{20}\.segment|snapshot-\d{20}\.snapshot|base-\d{20}-\d{20}\.snapshot|acts\.journal")
_CACHE_BYTES = 64 << 20
_COLUMNS_BYTES = 16 << 20
_FRAME_COST = 4096  # memory of a decoded frame besides its mapped bytes
_IS_MESSAGE = np.isin(np.arange(256), MESSAGES)  # by kind; looking it up is ten times faster than ``isin``
LARGE = 64 << 10
"""Frame size (bytes) from which a single row is read without the other bodies; smaller frames are read whole."""


class Reader:
    """The segments of a log, and the frames not yet written. ``lock`` guards all of its state."""

    def __init__(self, disk: Disk, segments: list[Segment]) -> None:
        self.lock = Lock()
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.fresh: dict[int, Frame] = {}
        self.disk = disk
        self._frame_cache: Recent[Frame] = Recent(_CACHE_BYTES)
        self._column_cache: Recent[SoundColumns] = Recent(_COLUMNS_BYTES)
        self._damages: dict[int, Damage] = {}  # by the sequence of the frame
        self.on_damage: Callable[[Damage], None] = lambda damage: None  # called on the thread that finds new damage

    def locate(self, positions: Int64s) -> Located:
        """Find the frames of log positions. Raises Rejected(RANGE_PURGED) below the log, Misuse beyond it."""
        with self.lock:
            segments = self.segments
            if len(positions):
                self._check_range(int(positions.min()), int(positions.max()))
            bases = np.fromiter((s.header.position for s in segments), np.int64, len(segments))
            which = np.searchsorted(bases, positions, side="right") - 1
            sequences, starts, times = np.empty((3, len(positions)), np.int64)
            found = Located(sequences, starts, times, np.empty(len(positions), np.uint8))
            for number in np.unique(which):
                mask = which == number
                segment, columns = segments[number], segments[number].index
                index = np.searchsorted(columns.positions, positions[mask], side="right") - 1
                found.sequences[mask] = segment.sequence + index
                starts[mask], times[mask] = columns.positions[index], columns.times[index]
                found.kinds[mask] = columns.kinds[index]
            return found

    def message(self, position: int) -> pa.RecordBatch | None:
        """Return the message at log ``position`` as ``gather`` does, reading no other body of a large frame. None if
        there is no message, or damage: ``gather`` reports which."""
        with self.lock:
            if (found := self._find(position)) is None:
                return None
            segment, index = found
            sequence, kind = segment.sequence + index, segment.index.kinds.item(index)
            start, time_us = segment.index.positions.item(index), segment.index.times.item(index)
        if kind not in MESSAGES:
            return None
        columns = self.columns(sequence)
        row = None if columns is None else columns.row(position - start)
        if row is None:
            frame = self.frame(sequence)
            if frame.damage is not None:
                return None
            row = frame.batch.slice(position - start, 1)
        return pa.RecordBatch.from_arrays([*row.columns, pa.array([time_us], pa.int64())], schema=READ_SCHEMA)

    def _find(self, position: int) -> tuple[Segment, int] | None:
        """Return segment and index in it of a log position's frame; None if it is not stored. The lock must be held."""
        segment = self.segments[max(bisect_right(self.segments, position, key=lambda s: s.header.position) - 1, 0)]
        if not segment.header.position <= position < segment.next_position:
            return None
        return segment, int(segment.index.positions.searchsorted(position, side="right")) - 1

    def stored_from(self) -> tuple[int, int]:
        with self.lock:
            return self.segments[0].sequence, self.segments[0].header.position

    def frame_at(self, position: int) -> tuple[int, int]:
        """Return the sequence of a log position's frame, and that frame's first position. Raises as :meth:`locate`."""
        with self.lock:
            if (found := self._find(position)) is None:
                self._check_range(position, position)
                raise Misuse(Code.BAD_ARGUMENT, f"there is no position {position}")
            segment, index = found
            return segment.sequence + index, segment.index.positions.item(index)

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the log position of the first row of frame ``sequence``, which may be the one after the last; and the
        time (µs) of the frame before it."""
        with self.lock:
            segment = self._segment_of(sequence)
            at = sequence - segment.sequence
            if at > segment.index.count:
                raise Misuse(Code.BAD_ARGUMENT, f"there is no frame {sequence} yet")
            position = segment.index.positions.item(at) if at < segment.index.count else segment.next_position
            return position, segment.index.times.item(at - 1) if at else segment.header.created_us

    def message_frames(self, start: int, end: int) -> Int64s:
        """Return the sequences of the stored message frames with ``start`` <= sequence < ``end``, ascending."""
        found: list[Int64s] = []
        with self.lock:
            first = max(bisect_right(self.segments, start, key=lambda s: s.sequence) - 1, 0)
            for segment in self.segments[first:]:
                if segment.sequence >= end:
                    break
                low = max(start, segment.sequence)
                kinds = segment.index.kinds[low - segment.sequence : max(end - segment.sequence, 0)]
                found.append(np.flatnonzero(_IS_MESSAGE[kinds]) + low)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _check_range(self, low: int, high: int) -> None:
        if low < self.segments[0].header.position:
            raise error(Code.RANGE_PURGED, f"position {low} has left the log")
        if high >= self.segments[-1].next_position:
            raise Misuse(Code.BAD_ARGUMENT, f"there is no position {high} yet")

    def frame(self, sequence: int, *, keep: bool = True) -> Frame:
        """Read one frame and verify its checksum; if it is wrong, return the readable part. ``keep`` caches it."""
        with self.lock:
            if (fresh := self.fresh.get(sequence)) is not None:
                return fresh
            if (known := self._frame_cache.get(sequence)) is not None:
                return known
            segment = self._segment_of(sequence)
            offset, size, rows, expected = expected_of(segment, sequence)
            data = self._map(segment)
        try:
            if isinstance(data, DamagedLog):
                raise data
            frame, encoding = _decode_frame(data, segment, offset, sequence)
        except DamagedLog as problem:
            if problem.damage.newer:
                raise
            with self.lock:
                known_damage = sequence in self._damages
                self._damages[sequence] = problem.damage
            if not known_damage:
                self.on_damage(problem.damage)
            part = None if isinstance(data, DamagedLog) or offset + size > data.size else data.slice(offset, size)
            # not cached: it may be repaired
            return salvage_frame(expected, rows, part, segment.header.salt, problem.damage)
        if self._damages:
            with self.lock:
                self._damages.pop(sequence, None)  # it was repaired
        if keep:
            extra = frame.batch.nbytes if encoding == Encoding.ARROW_LZ4 else 0
            with self.lock:
                self._frame_cache.put(sequence, frame, _FRAME_COST + extra)
        return frame

    def columns(self, sequence: int) -> SoundColumns | None:
        """Read and cache the verified columns of a large message frame, without bodies. Raises Rejected(RANGE_PURGED).
        None, so that :meth:`frame` reads it whole, if it is small, cached, damaged or without checksums of bodies."""
        with self.lock:
            if sequence in self.fresh or sequence in self._damages or self._frame_cache.get(sequence) is not None:
                return None
            if (known := self._column_cache.get(sequence)) is not None:
                return known
            segment = self._segment_of(sequence)
            offset, size, rows, expected = expected_of(segment, sequence)
            if size < LARGE or expected[0] not in MESSAGES:
                return None
            data = self._map(segment)
        if isinstance(data, DamagedLog) or offset + size > data.size:
            return None
        found = sound_columns(expected, rows, data.slice(offset, size), segment.header.salt)
        if found is not None:
            with self.lock:
                self._column_cache.put(sequence, found, _FRAME_COST)
        return found

    @property
    def is_damaged(self) -> bool:
        return bool(self._damages)

    def damages(self) -> list[Damage]:
        """Return the damage found, oldest frame first, after rechecking the first few places."""
        for sequence in self.damaged_frames()[:MAX_RECHECKED]:
            with suppress(EscrowError):  # removed by retention meanwhile
                self.frame(sequence, keep=False)
        with self.lock:
            return [self._damages[sequence] for sequence in sorted(self._damages)]

    def damaged_frames(self) -> list[int]:
        """Return the sequences of the frames of :meth:`damages`, ascending."""
        with self.lock:
            return sorted(self._damages)

    def _segment_of(self, sequence: int) -> Segment:
        if sequence < self.segments[0].sequence:
            raise error(Code.RANGE_PURGED, f"frame {sequence} has left the log")
        return self.segments[bisect_right(self.segments, sequence, key=lambda s: s.sequence) - 1]

    def _map(self, segment: Segment) -> pa.Buffer | DamagedLog:
        """Return the segment's mapped file, mapped on first use; if it is gone (retention may delete it) or unreadable,
        the damage. The lock must be held. Raises Overloaded(OUT_OF_RESOURCES) without a descriptor or memory for it."""
        if segment.data is None:
            try:
                data = map_file(self.disk, segment.name)
            except FileNotFoundError:
                return DamagedLog(segment.name, 0, segment.sequence, "the segment is missing")
            except (OSError, MemoryError) as problem:
                refusal = disk_error(problem)
                if isinstance(refusal, Overloaded):
                    raise refusal from problem
                return DamagedLog(segment.name, 0, segment.sequence, f"the segment cannot be read: {problem}")
            segment.data = data.slice(0, min(segment.size, data.size))
        return segment.data

    def publish(self, frame: Frame, offset: int, size: int, synced: int) -> None:
        """Add a frame of ``size`` bytes at byte ``offset`` of the last segment. Its header says that frames below
        ``synced`` are durable."""
        with self.lock:
            segment = self.segments[-1]
            segment.index.append(frame.position, frame.time_us, offset, frame.kind)
            segment.size += size
            segment.next_position = frame.position + frame.count
            segment.epoch = frame.epoch
            segment.synced = max(segment.synced, synced)
            self.fresh[frame.sequence] = frame

    def bytes_from(self, sequence: int) -> int:
        size = 0
        with self.lock:
            for segment in reversed(self.segments):  # called every round: stop at the first one needed
                size += segment.bytes_from(sequence)
                if segment.sequence <= sequence:
                    break
        return size

    def droppable(self, position: int, covered: int) -> tuple[Segment, ...]:
        """Return the first segments (never the last) below log ``position`` and below the sequence ``covered``."""
        segments = self.segments[:-1]
        return tuple(s for s in segments if s.next_position <= position and s.next_sequence <= covered)

    def drop(self, count: int) -> None:
        """Remove the first ``count`` segments from memory, with their cached frames. Their files are not deleted."""
        with self.lock:
            self.segments = self.segments[count:]
            self._frame_cache.drop_below(self.segments[0].sequence)
            self._column_cache.drop_below(self.segments[0].sequence)
            self._damages = {s: found for s, found in self._damages.items() if s >= self.segments[0].sequence}

    def frames(self, start: int, end: int, kinds: Sequence[Kind] | None, damaged: bool) -> Iterator[Frame]:
        """Iterate over frames ``start`` <= sequence < ``end``; see :meth:`ReadableLog.frames`."""
        for segment in self.segments:
            low, high = max(start, segment.sequence), min(end, segment.next_sequence)
            if low >= high:
                continue
            with self.lock:
                stored = segment.index.kinds[low - segment.sequence : high - segment.sequence]
            wanted = None if kinds is None else np.isin(stored, [int(k) for k in kinds])
            chosen = range(low, high) if wanted is None else low + np.flatnonzero(wanted)
            for sequence in chosen:
                frame = self.frame(int(sequence), keep=False)
                if frame.damage is not None and not damaged:
                    raise DamagedLog.of(frame.damage.place)
                yield frame


class ReadableLog:
    """A :class:`escrowmq.log.seam.StoredLog`, except for its snapshots, over the segments of a :class:`Reader`."""

    next_sequence: int
    next_position: int
    epoch: int
    last_time_us: int

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.acts = Journal(reader.disk, self.shard)  # the record of operator actions, beside the log
        self._lookups: Lookups | None = None
        self._lookups_lock = Lock()

    def find(self, column: Column, value: bytes | str, topic: str | None = None, *, end: int) -> Iterator[Match]:
        """Find the PLAIN and HALF rows with this id (16 bytes) or key below sequence ``end`` (durable), newest first.
        ``topic`` None means any topic. Unreadable frames are returned whole, if their damage was found before or is
        found now. Reads the matching rows, plus a number of blocks that grows with the logarithm of the messages."""
        self._check_usable()
        if not all(is_text(text) for text in (value, topic) if isinstance(text, str)):
            return iter(())  # columns hold only valid text
        lookups = self._open_lookups()
        return lookups.find(Query(column, value, topic), end, self._reader.place(end)[0])

    def _open_lookups(self) -> Lookups:
        """Return the look-ups; a read-only log creates them on first use from the existing files."""
        with self._lookups_lock:
            if self._lookups is None:
                lookups = Lookups(self._reader.disk, self._reader, self.shard, writes=False)
                lookups.begin(self.next_sequence)
                self._lookups = lookups
            return self._lookups

    def _check_usable(self) -> None:
        """Raise the error that prevents reading; subclasses override this."""

    @property
    def durable_sequence(self) -> int:
        return self.next_sequence

    @disk_errors()
    def files(self) -> LogFiles:
        """List the files of a log in use and their valid sizes. A segment is only appended to, and its durable part
        never changes: so a copy of these is the log as of now, however long copying takes."""
        reader = self._reader
        for _ in range(_RETRIES):
            names = snapshots.listed(reader.disk.list())  # first: a snapshot is of durable frames
            base = snapshots.find_base(names)
            first = base.first if base is not None else 0
            end = self.durable_sequence
            with reader.lock:
                sizes = [(s, s.size - s.bytes_from(end)) for s in reader.segments]
            listed = [StoredFile(s.name, size) for s, size in sizes if first <= s.sequence <= end]
            if sizes[0][0].sequence > first:  # dropped since the names were read
                continue
            newest = next((s for s in names if s.first < 0 and s.sequence <= end), None)
            wanted = [str(s) for s in (base, newest) if s is not None]
            with suppress(FileNotFoundError):
                stood_for = tuple(StoredFile(name, file_size(reader.disk, name)) for name in wanted)
                extent = self.acts.extent()  # last: an action is recorded before it enters the log
                return LogFiles(end, tuple(listed), stood_for, *extent)
        raise error(Code.RANGE_PURGED, "retention drops segments faster than their files can be listed")

    @disk_errors()
    def read_file(self, name: str, start: int, size: int) -> bytes:
        """Read a part of one of :meth:`files`. Raises Rejected(RANGE_PURGED) after retention removed the file: list
        them again; Rejected(NOT_FOUND) for any other file; Corrupt(LOG_FAILED), of this read alone."""
        if not _COPIED.fullmatch(name):
            raise error(Code.NOT_FOUND, f"{name!r:.100} is no file of a log")
        try:
            with closing(self._reader.disk.open(name)) as file:
                return file.read_at(start, size)
        except FileNotFoundError:
            raise error(Code.RANGE_PURGED, f"{name} has left the log") from None

    @property
    def shard(self) -> int:
        return self._reader.segments[0].header.shard

    @property
    def first_position(self) -> int:
        return self._reader.segments[0].header.position

    def position_before(self, time_us: int) -> int:
        with self._reader.lock:
            segments = self._reader.segments
            newer = (s.header.position for s in segments if s.index.count and s.index.times[-1] > time_us)
            return next(newer, segments[-1].header.position)

    def frames(
        self, start: int = 0, kinds: Kinds = None, end: int | None = None, *, damaged: bool = False
    ) -> Iterator[Frame]:
        """Iterate over stored frames, ``start <= sequence < end``, of these kinds, in order; bodies are not copied.
        A damaged frame raises Corrupt(DAMAGED) with its place; with ``damaged`` its readable part is returned."""
        self._check_usable()
        limit = self.next_sequence if end is None else min(end, self.next_sequence)
        return self._reader.frames(start, limit, kinds, damaged)

    def frames_at(
        self, position: int, kinds: Kinds = None, end_position: int | None = None, *, damaged: bool = False
    ) -> Iterator[Frame]:
        """Iterate as :meth:`frames`, from the frame of ``position`` to those that begin below ``end_position``."""
        self._check_usable()
        limit = self.next_position if end_position is None else min(end_position, self.next_position)
        if position >= limit:
            return iter(())
        sequences = self._reader.locate(np.array([position, limit - 1], np.int64)).sequences
        return self._reader.frames(int(sequences[0]), int(sequences[1]) + 1, kinds, damaged)

    def read(self, positions: Int64s, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the PLAIN and HALF rows at ``positions``, in order (READ_SCHEMA, or some of its columns; the others
        are not read). Raises Rejected(RANGE_PURGED) if a row has left the log, Corrupt(DAMAGED) if one is damaged in
        these columns. Runs of consecutive positions within one frame are returned without copying bodies."""
        batch, damaged = self.salvage(positions, columns)
        for row in damaged.values():
            if not row.body_only or columns is None or "body" in columns:
                raise row.error()
        return batch

    def salvage(
        self, positions: Int64s, columns: Sequence[str] | None = None
    ) -> tuple[pa.RecordBatch, dict[int, RowDamage]]:
        """Read as :meth:`read`, but return damaged rows without content, and their damage (in any column) by row."""
        self._check_usable()
        if len(positions) == 1 and columns is None and (alone := self._reader.message(int(positions[0]))) is not None:
            return alone, {}
        positions = np.asarray(positions, np.int64)
        located = self._reader.locate(positions)
        damaged: dict[int, Frame] = {}

        def fetch(sequence: int) -> Frame:
            frame = self._reader.frame(sequence)
            if frame.damage is not None:
                damaged[sequence] = frame
            return frame

        batch = gather(positions, located, fetch, columns)
        return batch, row_damage(damaged, located.sequences, positions - located.starts) if damaged else {}

    @property
    def is_damaged(self) -> bool:
        return self._reader.is_damaged

    def damages(self) -> list[Damage]:
        """Return the damage found so far in stored frames, oldest frame first: on opening, or by later reads."""
        return self._reader.damages()

    def time_at(self, positions: Int64s) -> Int64s:
        """Return the time (µs) of the frame that holds each log position."""
        self._check_usable()
        return self._reader.locate(np.asarray(positions, np.int64)).times

    def position_at(self, time_us: int) -> int:
        """Return the position of the first row stored at ``time_us`` or later; if none is, the log's next position."""
        with self._reader.lock:
            for segment in self._reader.segments:
                if segment.index.count and segment.index.times[-1] >= time_us:
                    return int(segment.index.positions[np.searchsorted(segment.index.times, time_us)])
        return self.next_position

    def holds(self, position: int, kinds: Sequence[Kind]) -> bool:
        """Return whether a frame of one of these kinds holds log ``position`` or comes after it."""
        with self._reader.lock:
            segments = [s for s in self._reader.segments if s.next_position > position]
            found = [(s.index.positions, s.index.kinds) for s in segments]
        wanted = [int(kind) for kind in kinds]
        for positions, stored in found:
            first = max(int(np.searchsorted(positions, position, side="right")) - 1, 0)
            starts = range(first, len(stored), KINDS_AT_ONCE)
            if any(np.isin(stored[start : start + KINDS_AT_ONCE], wanted).any() for start in starts):
                return True
        return False

    def kind_at(self, positions: Int64s) -> npt.NDArray[np.uint8]:
        self._check_usable()
        return self._reader.locate(np.asarray(positions, np.int64)).kinds

    def sequence_at(self, positions: Int64s) -> Int64s:
        """Return the sequence of each position's frame: rows of one frame are read without joining parts."""
        self._check_usable()
        return self._reader.locate(np.asarray(positions, np.int64)).sequences


def _decode_frame(data: pa.Buffer, segment: Segment, offset: int, sequence: int) -> tuple[Frame, int]:
    """Decode the frame at byte ``offset`` of a segment's ``data``, expected to be ``sequence``; also return its
    encoding. Raises Corrupt with the place if it is not that frame."""
    view = memoryview(data)
    if offset + codec.HEADER_BYTES > len(view):
        raise DamagedLog(segment.name, offset, sequence, "the file ends before the frame")
    header = codec.read_header(view, offset)
    if header.magic != codec.MAGIC or offset + header.frame_bytes > len(view):
        problem = "no frame begins here"
    elif not codec.is_intact(view, offset, header, segment.header.salt):
        problem = "the checksum is wrong"
    elif header.sequence != sequence:
        problem = f"a frame out of place: sequence {header.sequence}"
    else:
        batch = codec.decode(data, offset, header, segment.name)
        return Frame.of(header, batch), header.encoding
    raise DamagedLog(segment.name, offset, sequence, problem)
