"""A folder whose files have a suffix: copies in a backup, and files of a restore that are not visible yet.

A broker does not accept such a folder as its own: it refuses to start on it.
"""

from __future__ import annotations

from escrowmq.platform.disk import Disk, File, WrappedDisk

COPY = ".copy"  # suffix of the files of a backup
UNFINISHED = ".restoring"  # suffix of the files of a data folder being restored


class SuffixedDisk(WrappedDisk):
    """A :class:`~escrowmq.platform.disk.Disk` with only the files that have ``suffix``, named without it."""

    def __init__(self, disk: Disk, suffix: str) -> None:
        super().__init__(disk)
        self._suffix = suffix

    def open(self, name: str, *, create: bool = False) -> File:
        return self._disk.open(name + self._suffix, create=create)

    def list(self) -> list[str]:
        return [name.removesuffix(self._suffix) for name in self._disk.list() if name.endswith(self._suffix)]

    def rename(self, old: str, new: str) -> None:
        self._disk.rename(old + self._suffix, new + self._suffix)

    def reveal(self, name: str) -> None:
        """Remove the suffix from a file's name, which removes the file from this disk."""
        self._disk.rename(name + self._suffix, name)

    def remove(self, name: str) -> None:
        self._disk.remove(name + self._suffix)
