"""The newest segment: reserves space ahead, buffers frames, and writes and syncs them all at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from escrowmq.log.segments import HEADER_BYTES, SegmentHeader, segment_name
from escrowmq.platform.disk import NO_SPACE, TEMPORARY, Chunk, Disk, File

RESERVE_STEP = 16 << 20
_PAGE = 4096


class ActiveSegment:
    """An open segment file; ``end`` is the offset of the next frame, buffered ones included. Methods raise OSError.
    Only :meth:`create` and :meth:`make_room` need descriptors, address space and blocks, before anything is written: a
    process without descriptors rejects appends but does not stop."""

    def __init__(self, file: File, size: int, allocated: int, data: pa.Buffer | None = None) -> None:
        self._file, self._allocated, self._buffer = file, allocated, list[Chunk]()
        self._written = self.end = size
        self.data = data  # the allocated part of the file; it shows later writes; None until the first append

    @classmethod
    def resume(cls, disk: Disk, name: str, size: int) -> ActiveSegment:
        """Reopen the last segment of a recovered log."""
        return cls(disk.open(name), size, size)

    @classmethod
    def create(cls, disk: Disk, header: SegmentHeader, size: int, segment_bytes: int) -> PreparedSegment:
        """Create a segment under a temporary name, with room for ``size`` bytes of frames, and more up to
        ``segment_bytes``; OSError leaves nothing."""
        temporary = segment_name(header.sequence) + TEMPORARY
        file = disk.open(temporary, create=True)
        try:
            file.truncate(0)
            allocated = _allocate(file, HEADER_BYTES + size, segment_bytes)
            data = file.map(allocated)
        except (OSError, MemoryError):
            file.close()
            with suppress(OSError):  # the next opening removes it
                disk.remove(temporary)
            raise
        return PreparedSegment(disk, header, file, allocated, data)

    def make_room(self, size: int, segment_bytes: int) -> None:
        """Reserve and map the blocks of the next ``size`` bytes; OSError changes nothing that is stored."""
        if self.end + size > self._allocated:
            allocated = _allocate(self._file, self.end + size, segment_bytes)
            self.data = self._file.map(allocated)
            self._allocated = allocated

    def put(self, chunks: list[Chunk], size: int) -> None:
        self._buffer += chunks
        self.end += size

    def take(self) -> Callable[[], pa.Buffer | None]:
        """Take out the buffered frames. Returns a function that writes them at once and syncs once while more frames
        may be buffered; it returns the mapped file, None if nothing was ever appended."""
        chunks, at, data = self._buffer, self._written, self.data
        self._buffer, self._written = [], self.end

        def flush() -> pa.Buffer | None:
            if chunks:
                self._file.write_at(at, chunks)
                self._file.sync()
            return data

        return flush

    def seal(self) -> pa.Buffer | None:
        """Write the buffer, cut the reserved tail, sync and close. Returns the mapped file, if it was mapped."""
        if self._buffer:
            self._file.write_at(self._written, self._buffer)
            self._buffer = []
        self._file.truncate(self.end)
        self._file.sync()
        self._file.close()
        return None if self.data is None else self.data.slice(0, self.end)

    def abandon(self) -> None:
        """Close the file without writing the buffered frames."""
        self._file.close()


@dataclass
class PreparedSegment:
    """A segment with reserved space and a temporary name; after a crash, recovery removes the file."""

    _disk: Disk
    header: SegmentHeader
    _file: File
    _allocated: int
    _data: pa.Buffer

    @property
    def name(self) -> str:
        return segment_name(self.header.sequence)

    def begin(self) -> ActiveSegment:
        """Write the header and give the file its name, durably: a segment with its name always has a good header."""
        self._file.write_at(0, [self.header.pack()])
        self._file.sync()
        self._disk.rename(self.name + TEMPORARY, self.name)
        self._disk.sync_folder()
        self._file.renamed(self.name)
        return ActiveSegment(self._file, HEADER_BYTES, self._allocated, self._data)


def _allocate(file: File, needed: int, segment_bytes: int) -> int:
    """Reserve ``needed`` bytes of a file, and if possible a step more (up to ``segment_bytes`` in all), so that few
    syncs include a change of the file size. Returns the number of bytes reserved."""
    generous = max(min(needed + RESERVE_STEP, segment_bytes), needed)
    try:
        file.allocate(generous)
        return generous
    except OSError as problem:
        if problem.errno not in NO_SPACE or generous == needed:
            raise
    exact = needed + -needed % _PAGE
    file.allocate(exact)
    return exact
