"""The files of a log and their valid sizes, for copying a log in use.

A segment is only appended to, and its durable part never changes. So a copy of these files up to their valid sizes is
the log as of the listing, however long copying takes. Retention may remove a file meanwhile: its reader gets
RANGE_PURGED and lists the files again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from threading import Lock
from typing import Protocol

from escrowmq.acts.journal import Journal
from escrowmq.errors import Code, error
from escrowmq.log import snapshots
from escrowmq.log.index import Segment
from escrowmq.log.seam import LogFiles, StoredFile
from escrowmq.platform.disk import Disk, disk_errors, file_size

_RETRIES = 5  # retries of listing if retention drops segments meanwhile
_NAMES = re.compile(r"\d{20}\.segment|snapshot-\d{20}\.snapshot|base-\d{20}-\d{20}\.snapshot|acts\.journal")


class Segments(Protocol):
    """A provider of a log's segments, which change under ``lock``."""

    disk: Disk
    lock: Lock
    segments: tuple[Segment, ...]


@disk_errors()
def list_files(log: Segments, durable: Callable[[], int], acts: Journal) -> LogFiles:
    """List the files as of now. ``durable`` returns the sequence after the last durable frame."""
    disk = log.disk
    for _ in range(_RETRIES):
        names = snapshots.listed(disk.list())  # first: a snapshot is of durable frames
        base = max((s for s in names if s.first >= 0), key=lambda s: (s.first, s.sequence), default=None)
        first = base.first if base is not None else 0
        end = durable()
        with log.lock:
            segments = log.segments
            sizes = [s.size - s.bytes_from(end) for s in segments]
        parts = zip(segments, sizes, strict=True)
        listed = [StoredFile(segment.name, size) for segment, size in parts if first <= segment.sequence <= end]
        if segments[0].sequence > first:  # dropped since the names were read
            continue
        newest = next((s for s in names if s.first < 0 and s.sequence <= end), None)
        wanted = [s for s in (base, newest) if s is not None]
        try:
            stood_for = [StoredFile(str(s), file_size(disk, str(s))) for s in wanted]
        except FileNotFoundError:
            continue
        extent = acts.extent()  # last: an action is recorded before it enters the log
        return LogFiles(end, tuple(listed), tuple(stood_for), *extent)
    raise error(Code.RANGE_PURGED, "retention drops segments faster than their files can be listed")


@disk_errors()
def read_part(disk: Disk, name: str, start: int, size: int) -> bytes:
    """Read up to ``size`` bytes of a file from ``start``. Raises Rejected(RANGE_PURGED) if it is gone,
    Rejected(NOT_FOUND) if it is not part of a log, Corrupt(LOG_FAILED), of this read alone, if the disk fails."""
    if not _NAMES.fullmatch(name):  # only a log's underived files are read for a copy
        raise error(Code.NOT_FOUND, f"{name!r:.100} is no file of a log")
    try:
        with closing(disk.open(name)) as file:
            return file.read_at(start, size)
    except FileNotFoundError:
        raise error(Code.RANGE_PURGED, f"{name} has left the log") from None
