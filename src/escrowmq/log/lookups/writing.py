"""Run writer: writes entries from memory, or merges older runs in pieces of bounded size.

A file gets its name when it is complete. Losing it loses no data, so a small one is not synced. A merged one is synced
before its sources are removed, because rebuilding it means reading the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress

import numpy as np
import pyarrow as pa
import xxhash

from escrowmq.log.lookups.entries import MOST_POSITIONS, UInt64s
from escrowmq.log.lookups.runs import BLOCK, HEADER_BYTES, Extent, Run, RunHeader, blocks_of, open_run, run_name
from escrowmq.platform.disk import TEMPORARY, Disk, File

CHUNK = 1 << 20  # entries held at a time by a merge: about 8 MiB, a few times over
_POSITION = np.uint64(MOST_POSITIONS - 1)


def write_run(
    disk: Disk, shard: int, extent: Extent, columns: Sequence[Iterable[UInt64s]], holes: Sequence[int], *, durable: bool
) -> Run:
    """Write the run of ``extent``; both ``columns`` yield sorted entries in pieces. ``holes``: sequences of unreadable
    frames; ``durable``: sync the file. OSError leaves nothing behind."""
    name = run_name(extent.first_sequence, extent.next_sequence)
    temporary = name + TEMPORARY
    try:
        with closing(disk.open(temporary, create=True)) as file:
            file.truncate(0)
            _write(file, shard, extent, columns, holes)
            if durable:
                file.sync()
        disk.rename(temporary, name)
        if durable:
            disk.sync_folder()
    except Exception:
        with suppress(OSError):
            disk.remove(temporary)
        raise
    return open_run(disk, name, shard)


def _write(file: File, shard: int, extent: Extent, columns: Sequence[Iterable[UInt64s]], holes: Sequence[int]) -> None:
    end, counts, fences, digests = HEADER_BYTES, [0, 0], list[int](), list[int]()
    for column, pieces in enumerate(columns):
        for blocks in _whole_blocks(pieces):
            fences += blocks[::BLOCK].tolist()
            digests += [xxhash.xxh3_64_intdigest(blocks[at : at + BLOCK].data) for at in range(0, len(blocks), BLOCK)]
            file.write_at(end, [pa.py_buffer(blocks)])
            end += blocks.nbytes
            counts[column] += len(blocks)
    tables = np.array([*fences, *digests, *holes], np.uint64)
    header = RunHeader(shard, extent, (counts[0], counts[1]), len(holes), xxhash.xxh3_64_intdigest(tables.data))
    file.write_at(end, [pa.py_buffer(tables)])
    file.write_at(0, [header.pack()])


def _whole_blocks(pieces: Iterable[UInt64s]) -> Iterator[UInt64s]:
    """Regroup the entries into pieces of whole blocks; only the last block may be partial."""
    rest = np.empty(0, np.uint64)
    for piece in pieces:
        joined = np.concatenate([rest, piece]) if len(rest) else piece
        whole = len(joined) - len(joined) % BLOCK
        if whole:
            yield np.ascontiguousarray(joined[:whole])
        rest = joined[whole:].copy()
    if len(rest):
        yield rest


def merge(
    disk: Disk, shard: int, runs: Sequence[Run], floor: Extent, between: Callable[[], None], chunk: int = CHUNK
) -> Run:
    """Merge neighbouring runs, given in order, into one; omit what lies below the first position of ``floor`` (the
    log's stored part). ``between`` is called between pieces and may abort by raising. Raises OSError, UnsoundRun."""
    first, last = runs[0].extent, runs[-1].extent
    if floor.first_sequence > first.first_sequence:
        first = floor
    extent = Extent(first.first_sequence, last.next_sequence, first.first_position, last.next_position, last.last_us)
    base = extent.first_position
    columns = [_merge_sources([_Source(run, column, base) for run in runs], between, chunk) for column in (0, 1)]
    holes = sorted(hole for run in runs for hole in run.holes if hole >= extent.first_sequence)
    return write_run(disk, shard, extent, columns, holes, durable=True)


class _Source:
    """The entries of one run in order, with positions relative to ``base``; lower ones are omitted."""

    def __init__(self, run: Run, column: int, base: int) -> None:
        self._run, self._column = run, column
        self._moved = np.uint64((run.extent.first_position - base) % (1 << 64))
        self._lowest = max(base - run.extent.first_position, 0)
        self._next, self._blocks = 0, blocks_of(len(run.entries[column]))
        self.ahead = np.empty(0, np.uint64)

    @property
    def more(self) -> bool:
        return self._next < self._blocks

    def fill(self, count: int) -> None:
        """Read until ``count`` entries are ahead, or all."""
        parts = [self.ahead]
        have = len(self.ahead)
        while have < count and self.more:
            entries = self._run.block(self._column, self._next)
            self._next += 1
            if self._lowest:
                entries = entries[(entries & _POSITION) >= np.uint64(self._lowest)]
            parts.append(entries + self._moved)
            have += len(entries)
        if len(parts) > 1:
            self.ahead = np.concatenate(parts)

    def take(self, limit: np.uint64 | None) -> UInt64s:
        """Remove and return the entries ahead up to ``limit``, included; None: all of them."""
        count = len(self.ahead) if limit is None else int(self.ahead.searchsorted(limit, side="right"))
        taken, self.ahead = self.ahead[:count], self.ahead[count:]
        return taken


def _merge_sources(sources: list[_Source], between: Callable[[], None], chunk: int) -> Iterator[UInt64s]:
    """Merge the entries of all sources in order, in pieces of at most ``chunk`` (but at least a block of each)."""
    each = max(chunk // len(sources), BLOCK)
    while True:
        for source in sources:
            source.fill(each)
        # Beyond the last entry read from an unfinished source, smaller entries may still be unread.
        limits = [source.ahead[-1] for source in sources if source.more]
        joined = np.concatenate([source.take(min(limits) if limits else None) for source in sources])
        if not len(joined):
            return
        joined.sort()
        yield joined
        between()
