"""Marks, where a mirror can resume: states of the fold at a few offsets, in the file ``.kafka.json``.

The file also identifies a folder as a mirror. It is written first, durably, so that only copies are ever wiped. Its
content is only a hint: without a matching mark, the mirror is started over. A mark is true of the partition whatever
happened to the mirror, because only records that were read, or acknowledged at exactly the next offset, are marked.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import msgspec

from escrowmq.errors import Code, Misuse, error
from escrowmq.log.kafka.fold import Standing
from escrowmq.log.recovery import MIRROR_NAME
from escrowmq.platform.disk import Disk, disk_error, read_file, replace_file

VERSION = 1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Content(msgspec.Struct, frozen=True):
    """The file: one mark per segment, ascending; the newest of all; Kafka's cluster id, which outlives host names."""

    version: int
    partition: str
    boot: str
    kept: tuple[Standing, ...] = ()
    last: Standing | None = None
    cluster: str = ""


def boot_id() -> str:
    """Return the id of the machine's boot: unsynced writes of an earlier boot may be lost. Empty if unknown."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def is_mirror(disk: Disk) -> bool:
    """Return whether a folder is a mirror of any log."""
    return MIRROR_NAME in disk.list()


class Marks:
    """The marks of one mirror. Thread-safe."""

    def __init__(self, disk: Disk, partition: str, cluster: str, kept: list[Standing] | None = None) -> None:
        self._disk = disk
        self._partition, self._cluster = partition, cluster
        self._kept = kept or []
        self._last: Standing | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, disk: Disk, partition: str, cluster: str) -> tuple[Marks, bool] | None:
        """Load the marks of a folder as a mirror of a partition, None if it is not a mirror; and whether the machine
        has not rebooted since. An undecodable file has no marks. Raises Misuse(BAD_SETTING) for another partition,
        Corrupt(NEWER_FORMAT)."""
        if not is_mirror(disk):
            return None
        try:
            content = msgspec.json.decode(read_file(disk, MIRROR_NAME), type=_Content)
        except msgspec.DecodeError:
            return cls(disk, partition, cluster), False
        if content.version > VERSION:
            raise error(Code.NEWER_FORMAT, f"{MIRROR_NAME} is of format version {content.version}")
        place = slice(-2 if cluster and content.cluster == cluster else None, None)  # hosts may have new names
        if content.partition.split("/")[place] != partition.split("/")[place]:
            message = f"the folder is a mirror of {content.partition}, not of {partition}"
            raise Misuse(Code.BAD_SETTING, message, "name another folder: an empty one is filled from the partition")
        marks = cls(disk, partition, cluster, list(content.kept))
        marks._last = content.last
        return marks, bool(content.boot) and content.boot == boot_id()

    def at(self, sequence: int, act_bytes: int = 1 << 62) -> Standing | None:
        """Return the newest mark within the frames below ``sequence`` and this many bytes of the record of acts."""
        with self._lock:
            marks = [mark for mark in (*self._kept, self._last) if mark is not None]
        found = [mark for mark in marks if mark.sequence <= sequence and mark.act_bytes <= act_bytes]
        return max(found, key=lambda mark: mark.offset, default=None)

    def note(self, standing: Standing, *, keep: bool) -> None:
        """Add a mark: the mirror holds all that a fold counted up to ``standing``. ``keep``: a segment begins there, up
        to which retention may delete."""
        with self._lock:
            if keep and (not self._kept or standing.offset > self._kept[-1].offset):
                self._kept.append(standing)
            if self._last is None or standing.offset > self._last.offset:
                self._last = standing

    def drop_below(self, sequence: int) -> None:
        """Drop the kept marks that are not needed to resume from frame ``sequence``."""
        with self._lock:
            first = bisect_right(self._kept, sequence, key=lambda mark: mark.sequence) - 1
            del self._kept[: max(first, 0)]

    def drop_above(self, offset: int) -> None:
        """Drop the marks after ``offset`` of the partition: the mirror did not keep what they state."""
        with self._lock:
            self._kept = [mark for mark in self._kept if mark.offset <= offset]
            if self._last is not None and self._last.offset > offset:
                self._last = None

    def save(self, *, durable: bool = False) -> None:
        """Write the file. Not ``durable``: nothing is synced, and errors are ignored until the next write."""
        with self._lock:
            kept, last = tuple(self._kept), self._last
        content = _Content(VERSION, self._partition, boot_id(), kept, last, self._cluster)
        try:
            replace_file(self._disk, MIRROR_NAME, [[msgspec.json.encode(content)]], durable=durable)
        except (OSError, MemoryError) as problem:
            if durable:
                raise disk_error(problem) from problem
