"""A folder whose files have a suffix to their names: copies in a backup, and what a restore has not made visible yet.

A broker takes such a folder for none of its own: it refuses to start on it.
"""

from __future__ import annotations

from escrowmq.platform.disk import Disk, File, WrappedDisk

COPY = ".copy"
"""Of the files of a backup."""
UNFINISHED = ".restoring"
"""Of the files of a data folder that is being restored."""


class SuffixedDisk(WrappedDisk):
    """A :class:`~escrowmq.platform.disk.Disk` that knows the files with ``suffix`` only, by their names without it."""

    def __init__(self, disk: Disk, suffix: str) -> None:
        super().__init__(disk)
        self._suffix = suffix

    def open(self, name: str, *, create: bool = False) -> File:
        """Return the file of that name."""
        return self._disk.open(name + self._suffix, create=create)

    def list(self) -> list[str]:
        """Return the names, sorted."""
        return [name.removesuffix(self._suffix) for name in self._disk.list() if name.endswith(self._suffix)]

    def rename(self, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` atomically."""
        self._disk.rename(old + self._suffix, new + self._suffix)

    def reveal(self, name: str) -> None:
        """Take the suffix from the name of a file: it is out of this folder then."""
        self._disk.rename(name + self._suffix, name)

    def remove(self, name: str) -> None:
        """Delete one file."""
        self._disk.remove(name + self._suffix)
