"""Verifies that a backup matches its manifest and opens as a shard; reports the contents of a data folder."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, cast

import pyarrow as pa

from escrowmq.backup.manifest import NAME, CopiedFile, Manifest, read_manifest
from escrowmq.backup.sources import PIECE_BYTES
from escrowmq.backup.suffixed import COPY, SuffixedDisk
from escrowmq.broker.offline import OfflineShard
from escrowmq.ledger.listings import topics_list
from escrowmq.log.offline import open_offline
from escrowmq.log.report import DamagedLog
from escrowmq.platform.disk import Disk, File, disk_error


@dataclass(frozen=True, slots=True)
class TopicContents:
    """A topic: the number of stored messages, and the end of each queue."""

    topic: str
    messages: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupContents:
    """A consumer group: its unsettled messages, and its dead letters."""

    group: str
    lag: int
    dead: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a shard's ledger."""

    topics: tuple[TopicContents, ...]
    groups: tuple[GroupContents, ...]
    undecided: int
    parked: int

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)


def check_manifest(disk: Disk, manifest: Manifest) -> None:
    """Raise Corrupt(DAMAGED) unless the log in a folder is the one described by a manifest.
    Anyone who can change a manifest can also compute its digest, so the segments themselves decide."""
    log = open_offline(disk, in_use=False)
    expected = (manifest.shard, manifest.epoch, manifest.sequence, manifest.position)
    found = (log.shard, log.epoch, log.next_sequence, log.next_position)
    for field, one, other in zip(("shard", "epoch", "sequence", "position"), expected, found, strict=True):
        if one != other:
            raise DamagedLog(NAME, 0, -1, f"the manifest says {field} {one}, and the log has {other}")


def contents(disk: Disk) -> Contents:
    """Return the contents of the log in a folder, opened read-only as by a broker. Raises Corrupt if it cannot be."""
    ledger = OfflineShard(open_offline(disk, in_use=False)).ledger
    groups = ledger.groups.describe(ledger.topics, ledger.rules)
    return Contents(
        tuple(
            TopicContents(
                topic["name"],
                sum(queue["end"] - queue["head"] for queue in topic["queues"]),
                tuple(queue["end"] for queue in topic["queues"]),
            )
            for topic in topics_list(ledger)
        ),
        tuple(
            GroupContents(
                group["name"],
                sum(queue["waiting"] + queue["leased"] + queue["retrying"] for queue in group["queues"]),
                group["dead_letters"],
            )
            for group in groups
        ),
        sum(ledger.transactions.open.values()),
        sum(ledger.transactions.parked.values()),
    )


def verify(disk: Disk) -> tuple[Manifest, Contents]:
    """Verify a whole backup: the digest of each file, then the log, opened as by a broker.
    Raises Misuse(BAD_ARGUMENT) if there is no complete backup, Corrupt(DAMAGED) with the place."""
    try:
        manifest = read_manifest(disk)
        copies = SuffixedDisk(disk, COPY)
        for file in manifest.files:
            check_digest(copies, file)
        listed = _ManifestDisk(copies, manifest)
        check_manifest(listed, manifest)
        return manifest, contents(listed)
    except (OSError, MemoryError) as problem:
        raise disk_error(problem) from problem


def check_digest(disk: Disk, file: CopiedFile) -> None:
    """Raise Corrupt(DAMAGED) unless the file exists and its content is what was copied."""
    digest, at = hashlib.sha256(), 0
    try:
        with closing(disk.open(file.name)) as copy:
            while at < file.bytes and (piece := copy.read_at(at, min(PIECE_BYTES, file.bytes - at))):
                digest.update(piece)
                at += len(piece)
    except FileNotFoundError:
        raise DamagedLog(file.name, 0, -1, "the file is missing in the backup") from None
    if at < file.bytes:
        raise DamagedLog(file.name, at, -1, f"the copy ends here, and it should have {file.bytes} bytes")
    if digest.hexdigest() != file.sha256:
        raise DamagedLog(file.name, 0, -1, "the copy is damaged: its SHA-256 differs")


class _ManifestDisk(SuffixedDisk):
    """The files of a backup, each with the size in its manifest."""

    def __init__(self, copies: SuffixedDisk, manifest: Manifest) -> None:
        super().__init__(copies, "")
        self._sizes = {file.name: file.bytes for file in manifest.files}

    def list(self) -> list[str]:
        """List the names in the manifest."""
        return sorted(self._sizes)

    def open(self, name: str, *, create: bool = False) -> File:
        """Open a file of the manifest."""
        if name not in self._sizes:
            raise FileNotFoundError(name)
        return cast(File, _TruncatedFile(super().open(name), self._sizes[name]))


class _TruncatedFile:
    """A file limited to its size in the manifest."""

    def __init__(self, file: File, size: int) -> None:
        self._file = file
        self._size = min(size, file.size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, size: int) -> bytes:
        return self._file.read_at(offset, min(size, max(self._size - offset, 0)))

    def map(self, size: int) -> pa.Buffer:
        return self._file.map(min(size, self._size))
