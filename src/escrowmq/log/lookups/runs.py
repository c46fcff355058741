"""A run: one file of sorted entries of a range of frames, read by binary search. ``FORMAT.md`` describes its bytes.

Nothing in a file is trusted before its checksum is verified: header and tables on opening, each block when read. The
tables hold the first entry of each block, so a search for values with few rows reads one block, at most two.
"""

from __future__ import annotations

import heapq
import re
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import pyarrow as pa
import xxhash

from escrowmq.log.lookups import entries as codec
from escrowmq.log.lookups.entries import Int64s, Query, UInt64s
from escrowmq.log.report import DamagedLog
from escrowmq.log.segments import FORMAT_VERSION, open_header, seal_header
from escrowmq.platform.disk import TEMPORARY, Disk, map_file

BLOCK = 2048  # entries per checksum: 16 KiB
FEW_BLOCKS = 2  # a hash with at most this many blocks is read at once; otherwise each topic is read separately
_MAGIC = b"EMQL"
_HEADER = struct.Struct("<4sHHIIQQQQQQQQQ")
HEADER_BYTES = _HEADER.size + 8
_NAME = re.compile(r"(\d{20})-(\d{20})\.lookup")


def run_name(first: int, end: int) -> str:
    """Return the file name of the run of frames ``first`` to before ``end``."""
    return f"{first:020d}-{end:020d}.lookup"


def is_run(name: str) -> bool:
    """Return whether a file name is that of a run, complete or being written."""
    return _NAME.fullmatch(name.removesuffix(TEMPORARY)) is not None


@dataclass(frozen=True, slots=True)
class Extent:
    """Frames covered by a run: sequence and position of the first and after the last, and the last one's time."""

    first_sequence: int
    next_sequence: int
    first_position: int
    next_position: int
    last_us: int


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The first bytes of a file; ``counts`` of ids and of keys; ``holes``: the number of unreadable frames."""

    shard: int
    extent: Extent
    counts: tuple[int, int]
    holes: int
    tables: int  # checksum of the bytes after the entries

    def pack(self) -> bytes:
        fields = (self.shard, 0, *astuple(self.extent), *self.counts, self.holes, self.tables)
        return seal_header(_HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, *fields))

    @classmethod
    def unpack(cls, raw: pa.Buffer, file: str) -> RunHeader:
        """Decode the header from a file's first bytes; raise DamagedLog if it is invalid."""
        fields = _HEADER.unpack(open_header(raw, _MAGIC, HEADER_BYTES, file))
        return cls(fields[3], Extent(*fields[5:10]), (fields[10], fields[11]), fields[12], fields[13])

    @property
    def file_bytes(self) -> int:
        blocks = sum(map(blocks_of, self.counts))
        return HEADER_BYTES + 8 * (sum(self.counts) + 2 * blocks + self.holes)


def blocks_of(entries: int) -> int:
    """Return the number of blocks that hold this many entries."""
    return -(-entries // BLOCK)


class UnsoundRun(Exception):
    """A block of a run has a wrong checksum."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.name)
        self.run = run


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """An opened file. ``entries``, ``fences`` (the first entry of each block) and ``digests`` lie in the mapped file,
    ids first; ``holes`` are the sequences of frames that were unreadable when it was written, ascending."""

    name: str
    extent: Extent
    entries: tuple[UInt64s, UInt64s]
    fences: tuple[UInt64s, UInt64s]
    digests: tuple[UInt64s, UInt64s]
    holes: list[int]
    file_bytes: int

    @property
    def count(self) -> int:
        return len(self.entries[0])

    def positions(self, query: Query) -> Iterator[int]:
        """Iterate over the positions of rows that may match, newest first. Raises UnsoundRun, also while iterating."""
        column = codec.COLUMNS.index(query.column)
        low, high = query.bounds
        if query.topic is not None:
            return self._flat(column, low, high)
        first, last = self._blocks(column, low, high)
        if last - first < FEW_BLOCKS:  # few: read all topics at once and sort
            found = [self.within(column, block, low, high) for block in range(first, last + 1)]
            positions = np.concatenate(found) if found else np.empty(0, np.int64)
            return iter(np.sort(positions)[::-1].tolist())
        lows = [low | tag << codec.POSITION_BITS for tag in range(codec.TAGS)]
        return heapq.merge(*(self._flat(column, at, at | (codec.MOST_POSITIONS - 1)) for at in lows), reverse=True)

    def _flat(self, column: int, low: int, high: int) -> Iterator[int]:
        """Yield the log positions of the entries ``low`` to ``high``, which differ only in position, of a column (0:
        ids, 1: keys); highest first."""
        first, last = self._blocks(column, low, high)
        for block in range(last, first - 1, -1):
            yield from self.within(column, block, low, high)[::-1].tolist()

    def _blocks(self, column: int, low: int, high: int) -> tuple[int, int]:
        """Return first and last block for entries ``low`` to ``high`` of a column (0: ids, 1: keys); last < first if
        none."""
        fences = self.fences[column]
        first = max(int(fences.searchsorted(np.uint64(low), side="right")) - 1, 0)
        return first, int(fences.searchsorted(np.uint64(high), side="right")) - 1

    def within(self, column: int, block: int, low: int, high: int) -> Int64s:
        """Return the log positions of the entries ``low`` to ``high`` in one block of a column (0: ids, 1: keys), in
        entry order. Raises UnsoundRun."""
        entries = self.block(column, block)
        start = int(entries.searchsorted(np.uint64(low), side="left"))
        end = int(entries.searchsorted(np.uint64(high), side="right"))
        return codec.positions_of(entries[start:end], self.extent.first_position)

    def block(self, column: int, block: int) -> UInt64s:
        """Return one block's entries of a column (0: ids, 1: keys), their checksum verified. Raises UnsoundRun."""
        entries = self.entries[column][block * BLOCK : (block + 1) * BLOCK]
        if xxhash.xxh3_64_intdigest(entries.data) != int(self.digests[column][block]):
            raise UnsoundRun(self)
        return entries


def open_run(disk: Disk, name: str, shard: int) -> Run:
    """Open the run in a file. Raises OSError; DamagedLog if it is incomplete, or of another version or shard."""
    data = map_file(disk, name)
    header = RunHeader.unpack(data, name)
    if header.shard != shard or run_name(header.extent.first_sequence, header.extent.next_sequence) != name:
        raise DamagedLog(name, 0, -1, "a look-up file of other frames")
    if header.file_bytes != data.size:
        raise DamagedLog(name, 0, -1, f"{data.size} bytes instead of {header.file_bytes}")
    tables = HEADER_BYTES + 8 * sum(header.counts)
    if xxhash.xxh3_64_intdigest(data.slice(tables)) != header.tables:
        raise DamagedLog(name, tables, -1, "the checksum of the tables is wrong")
    ids, keys = header.counts
    lengths = [ids, keys, *2 * (blocks_of(ids), blocks_of(keys)), header.holes]
    words = np.frombuffer(data, np.uint64, sum(lengths), HEADER_BYTES)
    parts = np.split(words, np.cumsum(lengths)[:-1])
    columns = (parts[0], parts[1]), (parts[2], parts[3]), (parts[4], parts[5])
    return Run(name, header.extent, *columns, parts[6].tolist(), header.file_bytes)
