"""The disk seam: the few file operations that the log needs, so that a fault disk can stand in for the real one."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa


class File(Protocol):
    """One open file. Offsets and sizes are bytes."""

    def write_at(self, offset: int, chunks: list[bytes | memoryview | pa.Buffer]) -> None:
        """Write all chunks one after the other from ``offset``. Raises OSError; on error any part may be written."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer at the end of the file."""
        ...

    def map(self, size: int) -> pa.Buffer:
        """The first ``size`` bytes as a buffer that sees later writes and outlives the file's deletion."""
        ...

    def allocate(self, size: int) -> None:
        """Make the file at least ``size`` bytes long with its blocks reserved. Raises OSError(ENOSPC) and leaves it as it was."""
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def sync(self) -> None:
        """Make everything written durable. Raises OSError; after that nothing about the file may be assumed."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """One folder, flat: names never contain a separator."""

    def open(self, name: str, *, create: bool = False) -> File:
        """The file, for reading and writing; FileNotFoundError unless ``create``."""
        ...

    def list(self) -> list[str]: ...

    def rename(self, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` atomically; durable after :meth:`sync_folder`."""
        ...

    def remove(self, name: str) -> None: ...

    def sync_folder(self) -> None: ...

    def lock(self) -> None:
        """Take the folder for this process until :meth:`close`; raises Misuse(FOLDER_IN_USE)."""
        ...

    def free_bytes(self) -> int: ...

    def close(self) -> None: ...
