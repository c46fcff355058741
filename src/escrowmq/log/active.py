"""The newest segment: space reserved ahead, frames buffered, one write and one sync for all of them."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, error
from escrowmq.log.frames import Chunk
from escrowmq.log.segments import HEADER_BYTES, SegmentHeader, segment_name
from escrowmq.platform.disk import TEMPORARY, Disk, File

RESERVE_STEP = 16 << 20
_PAGE = 4096


class ActiveSegment:
    """An open segment file. ``end`` is where the next frame goes, buffered ones included. Raises OSError as it comes."""

    def __init__(self, file: File, size: int, allocated: int) -> None:
        self._file = file
        self._written = size
        self._allocated = allocated
        self._mapped = -1
        self._buffer: list[Chunk] = []
        self.end = size

    @classmethod
    def resume(cls, disk: Disk, name: str, size: int) -> ActiveSegment:
        """Go on with the last segment of a recovered log."""
        return cls(disk.open(name), size, size)

    @classmethod
    def create(cls, disk: Disk, header: SegmentHeader, size: int, segment_bytes: int) -> PreparedSegment:
        """A new segment under a temporary name, with room for ``size`` bytes of frames; OSError(ENOSPC) leaves nothing."""
        temporary = segment_name(header.sequence) + TEMPORARY
        file = disk.open(temporary, create=True)
        try:
            file.truncate(0)
            allocated = _allocate(file, HEADER_BYTES + size, segment_bytes)
        except OSError:
            file.close()
            disk.remove(temporary)
            raise
        return PreparedSegment(disk, header, file, allocated)

    def make_room(self, size: int, segment_bytes: int) -> None:
        """Reserve the blocks of the next ``size`` bytes; OSError(ENOSPC) changes nothing."""
        if self.end + size > self._allocated:
            self._allocated = _allocate(self._file, self.end + size, segment_bytes)

    def put(self, chunks: list[Chunk], size: int) -> None:
        """Buffer a frame."""
        self._buffer += chunks
        self.end += size

    def take(self) -> Callable[[], pa.Buffer | None]:
        """Take out what is buffered. The function returned writes it in one write and syncs once, while frames go on being
        put; it gives the file mapped anew if it has grown, else None."""
        chunks, at, allocated = self._buffer, self._written, self._allocated
        self._buffer, self._written = [], self.end

        def flush() -> pa.Buffer | None:
            if chunks:
                self._file.write_at(at, chunks)
                self._file.sync()
            if self._mapped == allocated:
                return None
            self._mapped = allocated
            return self._file.map(allocated)

        return flush

    def seal(self) -> pa.Buffer:
        """Write what is buffered, cut the reserved tail, sync, close; the file mapped for good."""
        if self._buffer:
            self._file.write_at(self._written, self._buffer)
            self._buffer = []
        self._file.truncate(self.end)
        self._file.sync()
        data = self._file.map(self.end)
        self._file.close()
        return data

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()


class PreparedSegment:
    """A segment with its space reserved and no name yet: a crash leaves a temporary file that recovery removes."""

    def __init__(self, disk: Disk, header: SegmentHeader, file: File, allocated: int) -> None:
        self._disk = disk
        self._file = file
        self._allocated = allocated
        self.header = header
        self.name = segment_name(header.sequence)

    def begin(self) -> ActiveSegment:
        """Give it its header and its name, durably: so a segment that has its name has a good header."""
        self._file.write_at(0, [self.header.pack()])
        self._file.sync()
        self._file.close()
        self._disk.rename(self.name + TEMPORARY, self.name)
        self._disk.sync_folder()
        return ActiveSegment(self._disk.open(self.name), HEADER_BYTES, self._allocated)


def _allocate(file: File, needed: int, segment_bytes: int) -> int:
    """Reserve ``needed`` bytes, and a step more if the disk has it, so that few syncs meet a change of the file's size."""
    generous = max(min(needed + RESERVE_STEP, segment_bytes), needed)
    try:
        file.allocate(generous)
        return generous
    except OSError as problem:
        if problem.errno != errno.ENOSPC or generous == needed:
            raise
    exact = needed + -needed % _PAGE
    file.allocate(exact)
    return exact


def disk_error(problem: OSError) -> EscrowError:
    """Overloaded(DISK_FULL) for a disk without space, Corrupt(LOG_FAILED) for any other failure."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error(Code.DISK_FULL)
    return error(Code.LOG_FAILED, f"the disk failed: {problem}")
