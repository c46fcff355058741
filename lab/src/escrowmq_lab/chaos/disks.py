"""Full disks: below a broker's log, and by a page limit in SQLite. A marker file in the node's folder means full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import sqlalchemy as sa

from escrowmq.platform.disk import Disk, File, RealDisk, WrappedDisk, WrappedFile

MARKER = "full"
_MOST_PAGES = 4_294_967_294
"""SQLite's own limit."""


def set_full(folder: Path, full: bool) -> None:
    """Make the disk of the node with this folder full, or free."""
    marker = folder / MARKER
    if full:
        marker.touch()
    else:
        marker.unlink(missing_ok=True)


def fillable_disk(folder: Path) -> Callable[[Path], Disk]:
    """Return a function that opens the disk of the broker whose node has ``folder``."""
    return lambda data: FillableDisk(RealDisk(data), folder / MARKER)


class FillableDisk(WrappedDisk):
    """A disk that is full while ``marker`` exists: no file grows, and none is created. Allocated blocks may still be
    written, files may be renamed and removed, and everything may be read and synced."""

    def __init__(self, disk: Disk, marker: Path) -> None:
        super().__init__(disk)
        self._marker = str(marker)

    @property
    def full(self) -> bool:
        """Return whether the disk is full."""
        return os.path.exists(self._marker)

    def open(self, name: str, *, create: bool = False) -> File:
        """Open a file for reading and writing. Raises OSError(ENOSPC) if a full disk would have to create it."""
        if create and self.full:
            try:
                return _FillableFile(self._disk.open(name), self)
            except FileNotFoundError:
                raise _no_space(name) from None
        return _FillableFile(self._disk.open(name, create=create), self)

    def free_bytes(self) -> int:
        """Return the free bytes, 0 on a full disk."""
        return 0 if self.full else self._disk.free_bytes()


class _FillableFile(WrappedFile):
    def __init__(self, file: File, disk: FillableDisk) -> None:
        super().__init__(file)
        self._disk = disk

    def write_at(self, offset: int, chunks: list[bytes | memoryview | pa.Buffer]) -> None:
        if self._disk.full and offset + sum(map(len, chunks)) > (size := self._file.size()):
            if size > offset:  # allocated blocks are written before the system finds that there are no more
                whole = b"".join(chunks)
                self._file.write_at(offset, [whole[: size - offset]])
            raise _no_space()
        self._file.write_at(offset, chunks)

    def allocate(self, size: int) -> None:
        if self._disk.full and size > self._file.size():
            raise _no_space()
        self._file.allocate(size)


def fill_database(engine: sa.Engine, folder: Path) -> None:
    """Stop the SQLite database of ``engine`` from growing while the disk of the node with ``folder`` is full:
    statements that need a page fail with SQLITE_FULL, and their transaction is rolled back. Other databases are
    unchanged."""
    if engine.dialect.name != "sqlite":
        return
    marker = str(folder / MARKER)

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        # A limit below the size equals the size; it belongs to the connection, which is reused when there is room.
        connection.exec_driver_sql(f"PRAGMA max_page_count = {1 if os.path.exists(marker) else _MOST_PAGES}")


def _no_space(name: str = "") -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name or None)
