"""A folder whose writes nobody waits for: a mirror's. What a crash of the machine takes from it is in the partition."""

from __future__ import annotations

from escrowmq.platform.disk import Disk, File


class UnsyncedDisk:
    """Another disk (see :class:`escrowmq.platform.disk.Disk`) that is never asked to make anything durable, and stays locked when this one is closed."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def open(self, name: str, *, create: bool = False) -> UnsyncedFile:
        """The file of that name."""
        return UnsyncedFile(self._disk.open(name, create=create))

    def list(self) -> list[str]:
        """Names of everything in the folder."""
        return self._disk.list()

    def rename(self, old: str, new: str) -> None:
        """Replace ``new`` by ``old``."""
        self._disk.rename(old, new)

    def remove(self, name: str) -> None:
        """Delete one file."""
        self._disk.remove(name)

    def sync_folder(self) -> None:
        """Nothing is waited for."""

    def lock(self) -> None:
        """Whoever made this disk has the folder."""

    def free_bytes(self) -> int:
        """Bytes that may still be written."""
        return self._disk.free_bytes()

    def close(self) -> None:
        """The folder stays with whoever made this disk."""


class UnsyncedFile:
    """An open file (see :class:`escrowmq.platform.disk.File`) of an :class:`UnsyncedDisk`."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.write_at, self.read_at, self.map = file.write_at, file.read_at, file.map
        self.allocate, self.truncate, self.renamed = file.allocate, file.truncate, file.renamed
        self.size, self.close = file.size, file.close

    def sync(self) -> None:
        """Nothing is waited for."""

