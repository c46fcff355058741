"""Logs to back up, without a broker: a source over an open log, and what a copy of it must say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from escrowmq.backup.manifest import COPY, Manifest, read_manifest
from escrowmq.log.commit_log import SegmentLog
from escrowmq.log.offline import OfflineLog, open_offline
from escrowmq.log.seam import LogFiles, StoredLog
from escrowmq.platform.disk import Disk
from escrowmq.testing.disks import MemoryDisk

Content = tuple[Any, ...]


class LogSource:
    """A log in this process as a :class:`escrowmq.backup.Source`; ``before`` is called with the name before each
    read."""

    address = "file:here"

    def __init__(self, log: StoredLog, before: Callable[[str], None] = lambda name: None, piece: int = 1 << 20) -> None:
        self.log = log
        self.before = before
        self.piece = piece
        self.fetched = 0

    def files(self) -> tuple[int, LogFiles]:
        return self.log.shard, self.log.files()

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        self.before(name)
        while start < end and (piece := self.log.read_file(name, start, min(self.piece, end - start))):
            self.fetched += len(piece)
            start += len(piece)
            yield piece


def offline(disk: MemoryDisk) -> LogSource:
    """The log of a folder that no process has open."""
    return LogSource(open_offline(disk, in_use=False))


def in_memory(folder: Path) -> MemoryDisk:
    return MemoryDisk({path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"})


def copied(disk: MemoryDisk) -> OfflineLog:
    """The log in a backup, each file as long as its manifest says."""
    manifest, files = read_manifest(disk), disk.files()
    return open_offline(
        MemoryDisk({file.name: files[file.name + COPY][: file.bytes] for file in manifest.files}), in_use=False
    )


def contents_of(log: StoredLog, end: int | None = None) -> list[Content]:
    return [
        (frame.kind, frame.sequence, frame.position, frame.time_us, frame.epoch, frame.batch.to_pylist())
        for frame in log.frames(end=end)
    ]


def drop_half(log: SegmentLog) -> None:
    """What retention does: a snapshot of now, and the first half of what is stored goes."""
    log.save_snapshot({"at": pa.table({"n": [1]})}, log.next_sequence, log.next_position, log.last_time_us)
    log.drop_before((log.first_position + log.next_position) // 2)


def whole(disk: Disk) -> Manifest | None:
    """The manifest, if there is one."""
    try:
        return read_manifest(disk)
    except Exception:
        return None
