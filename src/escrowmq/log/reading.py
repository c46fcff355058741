"""Reads the log: decodes frames in place and collects rows by position. Safe from any thread."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, Misuse, error
from escrowmq.log import frames as codec
from escrowmq.log.frames import Encoding
from escrowmq.log.index import Segment
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import Frame
from escrowmq.platform.disk import Disk, map_file
from escrowmq.schemas import STORED, Kind, empty

Int64s = npt.NDArray[np.int64]

READ_SCHEMA: pa.Schema = STORED[Kind.PLAIN].append(pa.field("stored_us", pa.int64(), nullable=False))
"""What ``read`` answers."""

_CACHE_BYTES = 64 << 20
_FRAME_COST = 4096  # what a decoded frame takes apart from its mapped bytes


@dataclass(frozen=True, slots=True)
class Located:
    """For each position asked for (arrays of one length): its frame's sequence, first position, time and kind."""

    sequences: Int64s
    starts: Int64s
    times: Int64s
    kinds: npt.NDArray[np.uint8]


class Reader:
    """The segments of a log, and frames that are appended but not yet written.

    ``lock`` guards all of its state; the log's writer takes it for the moment of a change.
    """

    def __init__(self, disk: Disk, segments: list[Segment]) -> None:
        self.lock = Lock()
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.fresh: dict[int, Frame] = {}
        self._disk = disk
        self._cache: OrderedDict[int, tuple[Frame, int]] = OrderedDict()
        self._cached_bytes = 0

    def locate(self, positions: Int64s) -> Located:
        """Find the frames of positions; Rejected(RANGE_PURGED) below the log, Misuse beyond it."""
        with self.lock:
            segments = self.segments
            if len(positions):
                self._check_range(int(positions.min()), int(positions.max()))
            bases = np.fromiter((s.header.position for s in segments), np.int64, len(segments))
            which = np.searchsorted(bases, positions, side="right") - 1
            size = len(positions)
            found = Located(
                np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint8)
            )
            for number in np.unique(which):
                mask = which == number
                segment = segments[number]
                index = np.searchsorted(segment.index.positions, positions[mask], side="right") - 1
                found.sequences[mask] = segment.sequence + index
                found.starts[mask] = segment.index.positions[index]
                found.times[mask] = segment.index.times[index]
                found.kinds[mask] = segment.index.kinds[index]
            return found

    def _check_range(self, low: int, high: int) -> None:
        if low < self.segments[0].header.position:
            raise error(Code.RANGE_PURGED, f"position {low} has left the log")
        if high >= self.segments[-1].next_position:
            raise Misuse(Code.BAD_ARGUMENT, f"there is no position {high} yet")

    def frame(self, sequence: int, *, keep: bool = True) -> Frame:
        """One frame, its checksum verified; ``keep`` remembers it for the next reader."""
        with self.lock:
            if (fresh := self.fresh.get(sequence)) is not None:
                return fresh
            if (cached := self._cache.get(sequence)) is not None:
                self._cache.move_to_end(sequence)
                return cached[0]
            segment = self._segment_of(sequence)
            offset = int(segment.index.offsets[sequence - segment.sequence])
            data = self._mapped(segment)
        frame, encoding = _decoded(data, segment, offset, sequence)
        if keep:
            self._remember(frame, frame.batch.nbytes if encoding == Encoding.ARROW_LZ4 else 0)
        return frame

    def _segment_of(self, sequence: int) -> Segment:
        if sequence < self.segments[0].sequence:
            raise error(Code.RANGE_PURGED, f"frame {sequence} has left the log")
        return self.segments[bisect_right(self.segments, sequence, key=lambda s: s.sequence) - 1]

    def _mapped(self, segment: Segment) -> pa.Buffer:
        """The segment's file as a buffer; retention may delete the file meanwhile."""
        if segment.data is None:
            try:
                data = map_file(self._disk, segment.name)
            except FileNotFoundError:
                raise DamagedLog(segment.name, 0, segment.sequence, "the segment is missing") from None
            if data.size < segment.size:
                what = f"the file has {data.size} bytes of {segment.size}"
                raise DamagedLog(segment.name, data.size, -1, what)
            segment.data = data.slice(0, segment.size)
        return segment.data

    def _remember(self, frame: Frame, extra: int) -> None:
        cost = _FRAME_COST + extra
        with self.lock:
            if frame.sequence in self._cache:
                return
            self._cache[frame.sequence] = (frame, cost)
            self._cached_bytes += cost
            while self._cached_bytes > _CACHE_BYTES:
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]

    def publish(self, frame: Frame, offset: int, size: int, synced: int) -> None:
        """Add a frame of ``size`` bytes that is to lie at ``offset`` of the last segment; frames below ``synced`` are durable."""
        with self.lock:
            segment = self.segments[-1]
            segment.index.append(frame.position, frame.time_us, offset, frame.kind)
            segment.size += size
            segment.next_position = frame.position + frame.batch.num_rows
            segment.epoch = frame.epoch
            segment.synced = synced
            self.fresh[frame.sequence] = frame

    def bytes_from(self, sequence: int) -> int:
        """Bytes of the frames from ``sequence`` on."""
        with self.lock:
            return sum(segment.bytes_from(sequence) for segment in self.segments)

    def droppable(self, position: int, covered: int) -> tuple[Segment, ...]:
        """The first segments, all but the last at most, that lie below ``position`` and below the sequence ``covered``."""
        segments = self.segments[:-1]
        return tuple(s for s in segments if s.next_position <= position and s.next_sequence <= covered)

    def drop(self, count: int) -> None:
        """Forget the first ``count`` segments and what was decoded of them."""
        with self.lock:
            self.segments = self.segments[count:]
            for gone in [s for s in self._cache if s < self.segments[0].sequence]:
                self._cached_bytes -= self._cache.pop(gone)[1]

    def frames(self, start: int, end: int, kinds: Sequence[Kind] | None) -> Iterator[Frame]:
        """Frames ``start`` <= sequence < ``end`` of the given kinds, in order."""
        with self.lock:
            segments = self.segments
        for segment in segments:
            low, high = max(start, segment.sequence), min(end, segment.next_sequence)
            if low >= high:
                continue
            with self.lock:
                stored = segment.index.kinds[low - segment.sequence : high - segment.sequence]
            wanted = range(low, high)
            chosen = wanted if kinds is None else low + np.flatnonzero(np.isin(stored, [int(k) for k in kinds]))
            for sequence in chosen:
                yield self.frame(int(sequence), keep=False)


class ReadableLog:
    """The reading half of a log (see :class:`escrowmq.log.seam.StoredLog`) over the segments of a :class:`Reader`."""

    next_sequence: int  # behind the last frame
    next_position: int  # behind the last row
    epoch: int
    last_time_us: int

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def _check_usable(self) -> None:  # nothing keeps one from reading, unless a subclass knows better
        """Raises what keeps one from reading."""

    @property
    def shard(self) -> int:
        """The shard's id."""
        return self._reader.segments[0].header.shard

    @property
    def first_position(self) -> int:
        """The lowest position still stored."""
        return self._reader.segments[0].header.position

    def position_before(self, time_us: int) -> int:
        """The position that begins the first segment holding anything newer than ``time_us``; the last segment at most."""
        with self._reader.lock:
            segments = self._reader.segments
            newer = (s.header.position for s in segments if s.index.count and s.index.times[-1] > time_us)
            return next(newer, segments[-1].header.position)

    def frames(self, start: int = 0, kinds: Sequence[Kind] | None = None, end: int | None = None) -> Iterator[Frame]:
        """Stored frames with ``start <= sequence < end``, in order, of the given kinds; Corrupt at one that does not check."""
        self._check_usable()
        limit = self.next_sequence if end is None else min(end, self.next_sequence)
        return self._reader.frames(start, limit, kinds)

    def frames_at(
        self, position: int, kinds: Sequence[Kind] | None = None, end_position: int | None = None
    ) -> Iterator[Frame]:
        """As :meth:`frames`, from the frame that holds ``position``; Rejected(RANGE_PURGED) if that has left the log."""
        self._check_usable()
        limit = self.next_position if end_position is None else min(end_position, self.next_position)
        if position >= limit:
            return iter(())
        sequences = self._reader.locate(np.array([position, limit - 1], np.int64)).sequences
        return self._reader.frames(int(sequences[0]), int(sequences[1]) + 1, kinds)

    def read(self, positions: Int64s, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """The PLAIN and HALF rows at ``positions``, in that order (schema READ_SCHEMA, or some of its columns)."""
        self._check_usable()
        positions = np.asarray(positions, np.int64)
        return gather(positions, self._reader.locate(positions), self._reader.frame, columns)

    def time_at(self, positions: Int64s) -> Int64s:
        """The time_us of the frame that holds each position."""
        self._check_usable()
        return self._reader.locate(np.asarray(positions, np.int64)).times

    def sequence_at(self, positions: Int64s) -> Int64s:
        """The sequence of the frame that holds each position."""
        self._check_usable()
        return self._reader.locate(np.asarray(positions, np.int64)).sequences


def _decoded(data: pa.Buffer, segment: Segment, offset: int, sequence: int) -> tuple[Frame, int]:
    """The frame at ``offset``, which the index says is ``sequence``; Corrupt with the place if it is not, or is damaged."""
    view = memoryview(data)
    header = codec.read_header(view, offset)
    problem: str | None = None
    if header.magic != codec.MAGIC or offset + header.frame_bytes > len(view):
        problem = "no frame begins here"
    elif not codec.checks(view, offset, header, segment.header.salt):
        problem = "the checksum is wrong"
    elif header.sequence != sequence:
        problem = f"a frame out of place: sequence {header.sequence}"
    if problem is not None:
        raise DamagedLog(segment.name, offset, sequence, problem)
    batch = codec.decode(data, offset, header, segment.name)
    frame = Frame(Kind(header.kind), sequence, header.position, header.time_us, header.epoch, batch)
    return frame, header.encoding


def gather(
    positions: Int64s, located: Located, fetch: Callable[[int], Frame], columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """The PLAIN and HALF rows at ``positions``, in that order, with their frame's time as ``stored_us``; only ``columns``
    of them, and in that order, if they are given (``stored_us`` comes last in any case).

    Neighbouring rows of one frame come as slices: one run is not copied at all, several are copied once. Rows scattered
    over their frames are taken frame by frame, then put in order if they were not.
    """
    schema = READ_SCHEMA if columns is None else pa.schema([*map(READ_SCHEMA.field, columns), READ_SCHEMA[-1]])
    if not len(positions):
        return empty(schema)
    wrong = np.flatnonzero((located.kinds != Kind.PLAIN) & (located.kinds != Kind.HALF))
    if len(wrong):
        raise Misuse(Code.BAD_ARGUMENT, f"position {positions[wrong[0]]} holds no message")
    if len(schema) == 1:
        return pa.RecordBatch.from_arrays([pa.array(located.times)], schema=schema)
    rows = positions - located.starts

    def get(sequence: int) -> pa.RecordBatch:
        batch = fetch(sequence).batch
        return batch if columns is None else batch.select(list(columns))

    breaks = np.flatnonzero((np.diff(located.sequences) != 0) | (np.diff(rows) != 1)) + 1
    if 4 * len(breaks) <= len(rows):
        batch = _slices(rows, located.sequences, breaks, get)
    else:
        batch = _takes(rows, located.sequences, get)
    return pa.RecordBatch.from_arrays([*batch.columns, pa.array(located.times)], schema=schema)


def _slices(rows: Int64s, sequences: Int64s, breaks: Int64s, get: Callable[[int], pa.RecordBatch]) -> pa.RecordBatch:
    edges = itertools.pairwise([0, *breaks.tolist(), len(rows)])
    runs = [get(int(sequences[start])).slice(int(rows[start]), end - start) for start, end in edges]
    return runs[0] if len(runs) == 1 else pa.concat_batches(runs)


def _takes(rows: Int64s, sequences: Int64s, get: Callable[[int], pa.RecordBatch]) -> pa.RecordBatch:
    order = None
    if (np.diff(sequences) < 0).any():
        order = np.argsort(sequences, kind="stable")
        rows, sequences = rows[order], sequences[order]
    edges = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(rows)]
    pieces = []
    for start, end in itertools.pairwise(edges):
        batch = get(int(sequences[start]))
        chosen = rows[start:end]
        whole = end - start == 1 or (chosen[-1] - chosen[0] == end - start - 1 and (np.diff(chosen) == 1).all())
        pieces.append(batch.slice(int(chosen[0]), end - start) if whole else batch.take(pa.array(chosen)))
    combined = pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
    if order is None:
        return combined
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return combined.take(pa.array(inverse))
