"""Verifies that a backup matches its manifest and opens as a shard; reports the contents of a data folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from escrowmq.backup.manifest import COPY, NAME, CopiedFile, Manifest, SuffixedDisk, read_manifest
from escrowmq.broker.offline import OfflineShard
from escrowmq.ledger.listings import topics_list
from escrowmq.log.offline import open_offline
from escrowmq.log.report import DamagedLog
from escrowmq.platform.disk import Disk, File, WrappedFile, disk_errors, read_pieces


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
    topics, groups = list[TopicContents](), list[GroupContents]()
    for topic in topics_list(ledger):
        stored = sum(queue["end"] - queue["head"] for queue in topic["queues"])
        topics.append(TopicContents(topic["name"], stored, tuple(queue["end"] for queue in topic["queues"])))
    for group in ledger.groups.describe(ledger.topics, ledger.rules):
        lag = sum(queue["waiting"] + queue["leased"] + queue["retrying"] for queue in group["queues"])
        groups.append(GroupContents(group["name"], lag, group["dead_letters"]))
    open_, parked = ledger.transactions.open, ledger.transactions.parked
    return Contents(tuple(topics), tuple(groups), sum(open_.values()), sum(parked.values()))


@disk_errors()
def verify(disk: Disk) -> tuple[Manifest, Contents]:
    """Verify a whole backup: the digest of each file, then the log, opened as by a broker.
    Raises Misuse(BAD_ARGUMENT) if there is no complete backup, Corrupt(DAMAGED) with the place."""
    manifest = read_manifest(disk)
    copies = SuffixedDisk(disk, COPY)
    for file in manifest.files:
        for _ in read_copy(copies, file):
            pass
    listed = _ManifestDisk(copies, manifest)
    check_manifest(listed, manifest)
    return manifest, contents(listed)


def read_copy(copies: Disk, file: CopiedFile) -> Iterator[bytes]:
    """Yield the bytes of a file of a backup. Raises Corrupt(DAMAGED), at the latest at the end."""
    digest, at = hashlib.sha256(), 0
    try:
        copy = copies.open(file.name)
    except FileNotFoundError:
        raise DamagedLog(file.name, 0, -1, "the file is missing in the backup") from None
    with closing(copy):
        for piece in read_pieces(copy, file.bytes):
            digest.update(piece)
            at += len(piece)
            yield piece
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
        return sorted(self._sizes)

    def open(self, name: str, *, create: bool = False) -> File:
        if name not in self._sizes:
            raise FileNotFoundError(name)
        return _TruncatedFile(super().open(name), self._sizes[name])


class _TruncatedFile(WrappedFile):
    """A file limited to its size in the manifest."""

    def __init__(self, file: File, size: int) -> None:
        super().__init__(file)
        self._size = min(size, file.size())

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, size: int) -> bytes:
        return self._file.read_at(offset, min(size, max(self._size - offset, 0)))

    def map(self, size: int) -> pa.Buffer:
        return self._file.map(min(size, self._size))
