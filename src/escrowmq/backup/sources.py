"""Sources of a backup: a running broker, local or remote, or the folder of a stopped one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from escrowmq.errors import Code, Misuse
from escrowmq.log.offline import open_offline
from escrowmq.log.seam import LogFiles, StoredFile
from escrowmq.platform.disk import RealDisk
from escrowmq.wire import FILE_PREFIX, Link, ask
from escrowmq.wire.actions import backups
from escrowmq.wire.values import MAX_PAGE

Progress = Callable[[int, int], None]


class Source(Protocol):
    """A log that can be copied."""

    @property
    def address(self) -> str: ...

    def files(self) -> tuple[int, LogFiles]: ...

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Read the bytes of a file. Raises Rejected(RANGE_PURGED) if retention removed it: list the files again."""


class BrokerSource:
    """A running broker. ``timeout``: seconds per request."""

    def __init__(self, link: Link, timeout: float = 30.0) -> None:
        self._link, self._timeout = link, timeout

    @property
    def address(self) -> str:
        return self._link.address

    def files(self) -> tuple[int, LogFiles]:
        first = found = ask(self._link, backups.FILES({"limit": MAX_PAGE}), self._timeout)
        segments = _files(found["segments"])
        while "next" in found:
            found = ask(self._link, backups.FILES({"limit": MAX_PAGE, "after": found["next"]}), self._timeout)
            segments += _files(found["segments"])
        acts = found["acts"]
        snapshots = tuple(_files(first["snapshots"]))
        state = (found["sequence"], tuple(segments), snapshots, acts["bytes"], acts["records"], acts["last"])
        return first["shard"], LogFiles(*state)

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        for batch in self._link.read({"source": FILE_PREFIX + name, "start": start, "end": end}):
            yield from batch.column("content").to_pylist()


class FolderSource:
    """A data folder not in use. Raises Misuse(FOLDER_IN_USE, NOT_A_DATA_FOLDER), Corrupt(DAMAGED, NEWER_FORMAT)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._open()

    def _open(self) -> None:
        disk = RealDisk(self._folder, read_only=True)
        if disk.in_use():
            hint = (
                "only the process that has it open knows what is acknowledged: --url escrow://HOST:PORT; a program "
                "with the broker inside calls escrowmq.backup.back_up"
            )
            raise Misuse(Code.FOLDER_IN_USE, f"{self._folder} is in use", hint)
        self._log = open_offline(disk, in_use=False)

    @property
    def address(self) -> str:
        return f"file:{self._folder}"

    def files(self) -> tuple[int, LogFiles]:
        self._open()
        return self._log.shard, self._log.files()

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        while start < end and (piece := self._log.read_file(name, start, min(1 << 20, end - start))):
            start += len(piece)
            yield piece


def _files(listed: list[backups.File]) -> list[StoredFile]:
    return [StoredFile(file["name"], file["bytes"]) for file in listed]
