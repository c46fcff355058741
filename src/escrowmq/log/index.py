"""The index of the frames in a segment: four NumPy columns, in memory or mapped from an index file.
That file is derived: it may be deleted at any time and is rebuilt identically."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from escrowmq.log.report import DamagedLog
from escrowmq.log.segments import FORMAT_VERSION, Scan, SegmentHeader, open_header, seal_header, segment_name

Int64s = npt.NDArray[np.int64]

_MAGIC = b"EMQI"
_HEADER = struct.Struct("<4sHHIIQQQQQQ")
HEADER_BYTES = _HEADER.size + 8
_DTYPES: tuple[Any, ...] = ("<i8", "<i8", "<i8", "u1")


class FrameIndex:
    """Columns ``positions`` (of the first row), ``times`` (µs), ``offsets`` (bytes in the file; int64), ``kinds``
    (uint8): one entry per frame, in order. One thread appends. Views taken before stay valid, as growing replaces the
    arrays."""

    __slots__ = ("_columns", "count")

    def __init__(self, columns: list[npt.NDArray[Any]], count: int | None = None) -> None:
        self._columns = columns
        self.count = len(columns[0]) if count is None else count

    @classmethod
    def of(cls, scan: Scan) -> FrameIndex:
        lists = (scan.positions, scan.times, scan.offsets, scan.kinds)
        return cls([np.array(values, dtype) for values, dtype in zip(lists, _DTYPES, strict=True)])

    def append(self, position: int, time_us: int, offset: int, kind: int) -> None:
        count = self.count
        if count == len(self._columns[0]):
            capacity = max(2 * count, 256)
            self._columns = [np.concatenate([c[:count], np.empty(capacity - count, c.dtype)]) for c in self._columns]
        for column, value in zip(self._columns, (position, time_us, offset, kind), strict=True):
            column[count] = value
        self.count = count + 1

    @property
    def positions(self) -> Int64s:
        return self._columns[0][: self.count]

    @property
    def times(self) -> Int64s:
        return self._columns[1][: self.count]

    @property
    def offsets(self) -> Int64s:
        return self._columns[2][: self.count]

    @property
    def kinds(self) -> npt.NDArray[np.uint8]:
        return self._columns[3][: self.count]


@dataclass(slots=True)
class Segment:
    """One segment. ``epoch`` is its last opener, ``data`` its mapped file, None until first read."""

    name: str
    header: SegmentHeader
    index: FrameIndex
    size: int
    next_position: int
    epoch: int
    synced: int
    data: pa.Buffer | None = None

    @classmethod
    def create(cls, header: SegmentHeader, size: int) -> Segment:
        index = FrameIndex([np.empty(0, dtype) for dtype in _DTYPES])
        return cls(segment_name(header.sequence), header, index, size, header.position, header.epoch, header.sequence)

    @property
    def sequence(self) -> int:
        return self.header.sequence

    @property
    def next_sequence(self) -> int:
        return self.header.sequence + self.index.count

    def bytes_from(self, sequence: int) -> int:
        first = max(sequence - self.sequence, 0)
        return self.size - int(self.index.offsets[first]) if first < self.index.count else 0


def pack(segment: Segment) -> bytes:
    """Encode the index file of a sealed segment."""
    header, index = segment.header, segment.index
    body = b"".join(column.tobytes() for column in (index.positions, index.times, index.offsets, index.kinds))
    body += bytes(-len(body) % 8)
    fields = (header.shard, segment.epoch, header.sequence, segment.synced, segment.size, index.count)
    more = (segment.next_position, xxhash.xxh3_64_intdigest(body))
    return seal_header(_HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, *fields, *more)) + body


def unpack(data: pa.Buffer, header: SegmentHeader) -> Segment | None:
    """Decode the index file of the sealed segment with this header; the index columns of the result lie in ``data``.
    None if the file is invalid or of another segment."""
    name = segment_name(header.sequence)
    try:
        fields = _HEADER.unpack(open_header(data, _MAGIC, HEADER_BYTES, name))[3:]
    except DamagedLog:
        return None
    shard, epoch, sequence, synced, size, count, next_position, checksum = fields
    body = data.slice(HEADER_BYTES)
    known = (header.shard, header.sequence, 25 * count + -25 * count % 8)
    if (shard, sequence, body.size) != known or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    columns, at = [], HEADER_BYTES
    for dtype in _DTYPES:
        columns.append(np.frombuffer(data, dtype, count, at))
        at += columns[-1].nbytes
    return Segment(name, header, FrameIndex(columns), size, next_position, epoch, synced)
