"""The disk interface: the few file operations that the log needs, replaceable by a faulty disk in tests."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.platform.descriptors import with_reserve
from escrowmq.platform.logs import tell

Chunk: TypeAlias = bytes | memoryview | pa.Buffer

LOCK_NAME = "lock"
_LOCK_BYTES = 4096  # bytes read of the lock file, which has two short lines
_LOCK_TRIES = 5
_LOCK_PAUSE = 0.01  # seconds between two tries, as :meth:`RealDisk.holder` holds the lock for an instant
TEMPORARY = ".tmp"  # suffix of an incomplete file
_MOST_CHUNKS = 1024  # IOV_MAX of Linux and macOS
_COPY_BYTES = 1 << 16
"""Bytes up to which the chunks of one write are first copied into one piece: that costs less than a view of each."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk or the quota is full, or the file has its maximum size."""
SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
"""The process or the system has no descriptor or memory left, which may be temporary."""


def disk_error(problem: OSError | MemoryError) -> EscrowError:
    """Convert the error of an operation **that changed no stored data**. Overloaded(DISK_FULL) without space,
    Overloaded(OUT_OF_RESOURCES) without descriptors or memory: both may be temporary. Corrupt(LOG_FAILED) for all
    others, which may be permanent (EIO, EROFS, EACCES, ENOENT...). docs/disk-errors.md has the callers and the
    consequences."""
    number = errno.ENOMEM if isinstance(problem, MemoryError) else problem.errno
    if number in NO_SPACE:
        return error(Code.DISK_FULL)
    if number in SHORTAGE:
        return error(Code.OUT_OF_RESOURCES, f"{Code.OUT_OF_RESOURCES.sentence}: {problem}")
    return error(Code.LOG_FAILED, f"the disk failed: {problem}")


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise :func:`disk_error` for any failure of the disk or of memory inside."""
    try:
        yield
    except (OSError, MemoryError) as problem:
        raise disk_error(problem) from problem


class File(Protocol):
    """One open file. Offsets and sizes are bytes. A failure of any operation raises OSError."""

    def write_at(self, offset: int, chunks: list[Chunk]) -> None: ...  # after a failure, any part may be written
    def read_at(self, offset: int, size: int) -> bytes: ...  # fewer at the end of the file
    def map(self, size: int) -> pa.Buffer: ...  # it shows later writes, and outlives the file's deletion
    def allocate(self, size: int) -> None:
        """Extend the file to at least ``size`` bytes with reserved blocks. OSError(ENOSPC) leaves it unchanged."""

    def truncate(self, size: int) -> None: ...  # or extend with zeros
    def renamed(self, name: str) -> None: ...  # later maps use the new name
    def size(self) -> int: ...
    def sync(self) -> None: ...  # make all written data durable; after a failure the state of the file is undefined
    def close(self) -> None: ...  # maps stay valid


class Disk(Protocol):
    """One flat folder: names never contain a separator. A failure of any operation raises OSError."""

    def open(self, name: str, *, create: bool = False) -> File: ...  # FileNotFoundError unless ``create``
    def list(self) -> list[str]: ...  # sorted
    def rename(self, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` atomically; durable after :meth:`sync_folder`. An open file keeps its content."""

    def remove(self, name: str) -> None: ...
    def sync_folder(self) -> None: ...  # make creations, renames and removals durable
    def lock(self) -> None:
        """Lock the folder until :meth:`close`. Raises Misuse(FOLDER_IN_USE) with the process that has it."""

    def free_bytes(self) -> int: ...
    def close(self) -> None: ...  # unlock the folder


class WrappedFile:
    """A :class:`File` that forwards each operation that a subclass does not override."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class WrappedDisk:
    """A :class:`Disk` that forwards each operation that a subclass does not override."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def check_file_name(name: str) -> str:
    """Return ``name`` if it is a file of the folder itself. Raises Misuse otherwise, so that no name becomes a path."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise Misuse(Code.BAD_ARGUMENT, f"{name!r} is not a file name")
    return name


def is_neutral(name: str) -> bool:
    """Return whether a name belongs to no program's data: the lock file, hidden files, what a file system makes."""
    return name in (LOCK_NAME, "lost+found") or name.startswith(".")


def read_pieces(file: File, size: int, start: int = 0, most: int = 1 << 20) -> Iterator[bytes]:
    """Yield the bytes of a file from ``start`` to before ``size`` in pieces; fewer if the file is shorter."""
    while start < size and (piece := file.read_at(start, min(most, size - start))):
        start += len(piece)
        yield piece


def read_file(disk: Disk, name: str, size: int | None = None) -> bytes:
    """Read the first ``size`` bytes of a file, or all of it."""
    with closing(disk.open(name)) as file:
        return file.read_at(0, file.size() if size is None else size)


def file_size(disk: Disk, name: str) -> int:
    """Return the bytes of a file."""
    with closing(disk.open(name)) as file:
        return file.size()


def map_file(disk: Disk, name: str, size: int | None = None) -> pa.Buffer:
    """Map the first ``size`` bytes of a file, or all of it, as a buffer that outlives the file's deletion."""
    with closing(disk.open(name)) as file:
        return file.map(file.size() if size is None else size)


def replace_file(
    disk: Disk, name: str, parts: Iterable[list[Chunk]], *, durable: bool = True, step: int | None = None
) -> None:
    """Create or replace a whole file: written under a temporary name; if ``durable``, synced before and after the
    rename. With ``step``, ``parts`` are also synced after so many bytes each, so that concurrent syncs on this disk do
    not wait for all of a large file. An OSError leaves the old file."""
    temporary = name + TEMPORARY
    try:
        with closing(disk.open(temporary, create=True)) as file:
            file.truncate(0)
            end = synced = 0
            for chunks in parts if step is None else _split(parts, step):
                if step is not None and end - synced >= step:
                    file.sync()
                    synced = end
                file.write_at(end, chunks)
                end += sum(map(len, chunks))
            if durable:
                file.sync()
        disk.rename(temporary, name)
        if durable:
            disk.sync_folder()
    except OSError:
        with suppress(OSError):
            disk.remove(temporary)
        raise


def _split(parts: Iterable[list[Chunk]], step: int) -> Iterator[list[Chunk]]:
    for chunks in parts:
        for chunk in chunks:
            view = memoryview(chunk)
            for at in range(0, len(view), step):
                yield [view[at : at + step]]


class Holder(NamedTuple):
    """The process that has locked a folder."""

    process: str  # its number; "unknown" if unreadable
    url: str | None = None


def _read_holder(descriptor: int) -> Holder:
    """Read an open lock file; only complete lines count."""
    lines = os.pread(descriptor, _LOCK_BYTES, 0).decode("utf-8", "replace").split("\n")[:-1]
    return Holder(lines[0] if lines else "unknown", lines[1] if len(lines) > 1 else None)


def note_url(folder: str | Path, url: str) -> None:
    """Write the URL of this process into the lock file of a folder that it has locked, for readers of the folder. Only
    this user can read it, and the next owner overwrites it. A failure is ignored: then readers have no URL."""
    with suppress(OSError):
        descriptor = os.open(Path(folder) / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "r+b", 0):
            process = f"{os.getpid()}\n".encode()
            if os.pread(descriptor, len(process), 0) == process:
                os.ftruncate(descriptor, len(process))
                os.pwrite(descriptor, f"{url}\n".encode(), len(process))


class RealDisk:
    """A folder of the file system. ``read_only`` neither creates nor changes anything, for reading a folder in use."""

    def __init__(self, folder: str | Path, *, read_only: bool = False) -> None:
        self.folder = Path(folder)
        self._read_only = read_only
        self._lock: int | None = None
        self._opened: int | None = None
        if not read_only and not self.folder.exists():
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _sync_path(self.folder.parent)
            except OSError as problem:
                if problem.errno in NO_SPACE | SHORTAGE:
                    raise
                raise Misuse(Code.NOT_A_DATA_FOLDER, f"{self.folder} cannot be made: {problem.strerror}") from problem
        if not self.folder.is_dir():
            raise Misuse(Code.NOT_A_DATA_FOLDER, f"{self.folder} is not a folder")

    def open(self, name: str, *, create: bool = False) -> RealFile:
        flags = os.O_RDONLY if self._read_only else os.O_RDWR | (os.O_CREAT if create else 0)
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would block
        path = self.folder / check_file_name(name)
        number = with_reserve(lambda: os.open(path, flags, 0o600))
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return RealFile(path, number)

    def list(self) -> list[str]:
        return sorted(os.listdir(self.folder))

    def rename(self, old: str, new: str) -> None:
        os.replace(self.folder / check_file_name(old), self.folder / check_file_name(new))

    def remove(self, name: str) -> None:
        os.unlink(self.folder / check_file_name(name))

    def sync_folder(self) -> None:
        if self._opened is not None:
            os.fsync(self._opened)
        else:
            _sync_path(self.folder)

    def lock(self) -> None:
        try:
            descriptor = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as problem:
            if problem.errno in NO_SPACE | SHORTAGE:
                raise
            raise Misuse(Code.NOT_A_DATA_FOLDER, f"{self.folder} cannot be written: {problem.strerror}") from problem
        try:
            _check_owner_only(self.folder)
        except Misuse:
            os.close(descriptor)
            raise
        try:
            _lock(descriptor)
        except OSError as problem:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            if problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            hint = f"stop that process, or connect to it: {holder.url}" if holder.url else None
            raise Misuse(Code.FOLDER_IN_USE, f"{self.folder} is in use by process {holder.process}", hint) from None
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # on a full disk the lock still holds, only the number is missing
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor
        try:
            # Kept open: after the start of a segment, no operation may fail for lack of a descriptor.
            self._opened = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def in_use(self) -> bool:
        return self.holder() is not None

    def holder(self) -> Holder | None:
        """Return the process that has locked the folder. Creates nothing; holds the lock for an instant at most."""
        try:
            descriptor = os.open(self.folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except PermissionError:  # owned by another user: the state is unknown
            return Holder("unknown")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return _read_holder(descriptor)
        finally:
            os.close(descriptor)
        return None

    def free_bytes(self) -> int:
        state = os.statvfs(self.folder)
        return state.f_bavail * state.f_frsize

    def close(self) -> None:
        for descriptor in (self._opened, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._opened = self._lock = None


class RealFile:
    """A file of a :class:`RealDisk`. It is mapped by its name, so a map keeps no descriptor open."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def write_at(self, offset: int, chunks: list[Chunk]) -> None:
        if sum(map(len, chunks)) <= _COPY_BYTES:
            chunks = [b"".join(chunks)]
        views = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        while views:
            batch = views[:_MOST_CHUNKS]
            written = os.pwritev(self._descriptor, batch, offset)
            if written == 0:
                raise OSError(errno.EIO, "nothing was written", str(self._path))
            offset += written
            views = _drop_written(views, written) if len(views) > 1 or written < len(views[0]) else []

    def read_at(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, min(size, 1 << 30), offset)):
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)

    def map(self, size: int) -> pa.Buffer:
        if size == 0:
            return pa.py_buffer(b"")
        with with_reserve(lambda: pa.memory_map(str(self._path), "r")) as mapped:
            return mapped.read_buffer(size)

    def allocate(self, size: int) -> None:
        before = self.size()
        try:
            os.posix_fallocate(self._descriptor, 0, max(size, before))
        except OSError:
            if self.size() != before:  # some file systems keep the blocks reserved before the error
                os.ftruncate(self._descriptor, before)
            raise

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def renamed(self, name: str) -> None:
        self._path = self._path.with_name(check_file_name(name))

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _drop_written(views: list[memoryview], written: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if written < len(view):
            return [view[written:], *views[index + 1 :]]
        written -= len(view)
    return []


def _lock(descriptor: int) -> None:
    """Lock the open lock file. Raises OSError if another process holds it."""
    for left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as problem:
            if not left or problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        time.sleep(_LOCK_PAUSE)


def _check_owner_only(folder: Path) -> None:
    """Raise Misuse(NOT_A_DATA_FOLDER) if other users can write to the folder; warn if they can read it."""
    mode = folder.stat().st_mode
    if mode & 0o022:
        raise Misuse(Code.NOT_A_DATA_FOLDER, f"other users can write to {folder}", f"chmod go-rwx {folder}")
    if mode & 0o055:
        sentence = f"other users of this machine can read the data folder {folder}: chmod go-rwx {folder}"
        tell(logging.WARNING, "readable folder", sentence, folder=str(folder))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
