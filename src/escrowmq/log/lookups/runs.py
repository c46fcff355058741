"""A run: one file of sorted entries of a range of frames, read by binary search. ``FORMAT.md`` has its bytes.

Nothing of a file is believed before its checksum is right: those of the header and of the tables when it is opened,
that of each block when it is read. The tables hold the first entry of each block, so a search reads one block, two at
most of what a few rows share.
"""

from __future__ import annotations

import heapq
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from escrowmq.log.lookups.entries import (
    COLUMNS,
    MOST_POSITIONS,
    POSITION_BITS,
    TAGS,
    Int64s,
    UInt64s,
    Wanted,
    positions_of,
)
from escrowmq.log.report import DamagedLog
from escrowmq.log.segments import FORMAT_VERSION, LARGEST_HEADER, open_header, seal_header
from escrowmq.platform.disk import TEMPORARY, Disk, map_file

BLOCK = 2048
"""Entries that have a checksum together: 16 KiB."""
FEW_BLOCKS = 2
"""A hash that fills no more blocks is read at once; of others each topic is read on its own."""
_MAGIC = b"EMQL"
_HEADER = struct.Struct("<4sHHIIQQQQQQQQQ")
HEADER_BYTES = _HEADER.size + 8
_NAME = re.compile(r"(\d{20})-(\d{20})\.lookup")


def run_name(first: int, end: int) -> str:
    """File name of the run of frames ``first`` to before ``end``."""
    return f"{first:020d}-{end:020d}.lookup"


def is_run(name: str) -> bool:
    """Return whether a file of that name is a run, or one that was being written."""
    return _NAME.fullmatch(name.removesuffix(TEMPORARY)) is not None


@dataclass(frozen=True, slots=True)
class Extent:
    """Which frames of the log a run speaks of: sequences and positions of the first, and behind the last, whose time
    is ``last_us``."""

    first_sequence: int
    next_sequence: int
    first_position: int
    next_position: int
    last_us: int


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The first bytes of a file. ``counts`` are entries of ids and of keys, ``holes`` frames that could not be read."""

    shard: int
    extent: Extent
    counts: tuple[int, int]
    holes: int
    tables: int  # the checksum of what follows the entries

    def pack(self) -> bytes:
        """Return the header's bytes."""
        at = self.extent
        fields = (at.first_sequence, at.next_sequence, at.first_position, at.next_position, at.last_us)
        body = (_MAGIC, FORMAT_VERSION, HEADER_BYTES, self.shard, 0, *fields, *self.counts, self.holes, self.tables)
        return seal_header(_HEADER.pack(*body))

    @classmethod
    def unpack(cls, raw: bytes, file: str) -> RunHeader:
        """Return the header from a file's first bytes; DamagedLog otherwise."""
        fields = _HEADER.unpack(open_header(raw, _MAGIC, HEADER_BYTES, file))
        return cls(fields[3], Extent(*fields[5:10]), (fields[10], fields[11]), fields[12], fields[13])

    @property
    def file_bytes(self) -> int:
        """How long the file is."""
        blocks = sum(map(blocks_of, self.counts))
        return HEADER_BYTES + 8 * (sum(self.counts) + 2 * blocks + self.holes)


def blocks_of(entries: int) -> int:
    """Return how many blocks so many entries fill."""
    return -(-entries // BLOCK)


class UnsoundRun(Exception):
    """A block of a run does not check."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.name)
        self.run = run


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """An opened file. ``entries``, ``fences`` (the first entry of each block) and ``digests`` lie in the mapped file,
    ids first; ``holes`` are the sequences of frames that could not be read when it was written, rising."""

    name: str
    extent: Extent
    entries: tuple[UInt64s, UInt64s]
    fences: tuple[UInt64s, UInt64s]
    digests: tuple[UInt64s, UInt64s]
    holes: list[int]

    @property
    def count(self) -> int:
        """Messages that it knows."""
        return len(self.entries[0])

    @property
    def file_bytes(self) -> int:
        """How long the file is."""
        counts = (len(self.entries[0]), len(self.entries[1]))
        return RunHeader(0, self.extent, counts, len(self.holes), 0).file_bytes

    def positions(self, wanted: Wanted) -> Iterator[int]:
        """Yield the positions of rows that may be what is wanted, newest first. Raises UnsoundRun, also half-way."""
        column = COLUMNS.index(wanted.column)
        low, high = wanted.bounds
        if wanted.topic is not None:
            return self._flat(column, low, high)
        first, last = self._blocks(column, low, high)
        if last - first < FEW_BLOCKS:  # few: of all topics at once, put in order
            found = [self.within(column, block, low, high) for block in range(first, last + 1)]
            positions = np.concatenate(found) if found else np.empty(0, np.int64)
            return iter(np.sort(positions)[::-1].tolist())
        lows = [low | tag << POSITION_BITS for tag in range(TAGS)]
        return heapq.merge(*(self._flat(column, at, at | (MOST_POSITIONS - 1)) for at in lows), reverse=True)

    def _flat(self, column: int, low: int, high: int) -> Iterator[int]:
        """Yield the positions of the entries ``low`` to ``high``, which differ in nothing else, from the last on."""
        first, last = self._blocks(column, low, high)
        for block in range(last, first - 1, -1):
            yield from self.within(column, block, low, high)[::-1].tolist()

    def _blocks(self, column: int, low: int, high: int) -> tuple[int, int]:
        """Return the first and the last block that may hold entries ``low`` to ``high``; the last is lower if there
        is none."""
        fences = self.fences[column]
        first = max(int(fences.searchsorted(np.uint64(low), side="right")) - 1, 0)
        return first, int(fences.searchsorted(np.uint64(high), side="right")) - 1

    def within(self, column: int, block: int, low: int, high: int) -> Int64s:
        """Return the positions of one block's entries ``low`` to ``high``, in the order of the entries."""
        entries = self.block(column, block)
        start = int(entries.searchsorted(np.uint64(low), side="left"))
        end = int(entries.searchsorted(np.uint64(high), side="right"))
        return positions_of(entries[start:end], self.extent.first_position)

    def block(self, column: int, block: int) -> UInt64s:
        """Return the entries of one block, their checksum compared. Raises UnsoundRun."""
        entries = self.entries[column][block * BLOCK : (block + 1) * BLOCK]
        if xxhash.xxh3_64_intdigest(entries.data) != int(self.digests[column][block]):
            raise UnsoundRun(self)
        return entries


def open_run(disk: Disk, name: str, shard: int) -> Run:
    """Return the run in a file. DamagedLog if it is not whole, of another version or another shard; OSError."""
    data = map_file(disk, name)
    header = RunHeader.unpack(data.slice(0, min(LARGEST_HEADER, data.size)).to_pybytes(), name)
    if header.shard != shard or run_name(header.extent.first_sequence, header.extent.next_sequence) != name:
        raise DamagedLog(name, 0, -1, "a look-up file of other frames")
    if header.file_bytes != data.size:
        raise DamagedLog(name, 0, -1, f"{data.size} bytes instead of {header.file_bytes}")
    tables = HEADER_BYTES + 8 * sum(header.counts)
    if xxhash.xxh3_64_intdigest(data.slice(tables)) != header.tables:
        raise DamagedLog(name, tables, -1, "the checksum of the tables is wrong")
    ids, keys = header.counts
    blocks = (blocks_of(ids), blocks_of(keys))
    parts = _parts(data, HEADER_BYTES, [ids, keys, blocks[0], blocks[1], blocks[0], blocks[1], header.holes])
    holes = [int(sequence) for sequence in parts[6]]
    return Run(name, header.extent, (parts[0], parts[1]), (parts[2], parts[3]), (parts[4], parts[5]), holes)


def _parts(data: pa.Buffer, start: int, counts: list[int]) -> list[UInt64s]:
    """Arrays of so many numbers, one behind the other."""
    parts: list[UInt64s] = []
    for count in counts:
        parts.append(np.frombuffer(data, np.uint64, count, start))
        start += 8 * count
    return parts
