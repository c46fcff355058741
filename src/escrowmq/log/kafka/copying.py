"""Copies a whole log from a data folder into a partition, or back into its own folder; verifies it by digest."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from typing import NamedTuple

import msgspec

from escrowmq.acts import journal
from escrowmq.errors import Code, Misuse, error
from escrowmq.log.kafka.bases import Bases, Manifest, file_pieces
from escrowmq.log.kafka.channel import Channel, Round, claim
from escrowmq.log.kafka.fold import Fold
from escrowmq.log.kafka.partition import Partition, Partitions
from escrowmq.log.kafka.records import RecordType
from escrowmq.log.kafka.replica import ANSWER_SECONDS, PartitionReplica
from escrowmq.log.kafka.rule import Verdict
from escrowmq.log.offline import open_offline
from escrowmq.log.recovery import MIRROR_NAME
from escrowmq.log.report import DamagedLog
from escrowmq.log.seam import StoredFile
from escrowmq.log.segments import HEADER_BYTES, SegmentHeader, scan
from escrowmq.platform.disk import Disk, disk_errors, map_file, read_file

GROUP_BYTES = 4 << 20  # bytes of frames sent at once
AHEAD = 4  # maximum number of such groups in flight
_EMPTY_FIRST = "copy into topics that were made for it: `escrowmq log create`"


class Copied(NamedTuple):
    """A copied log: frames from ``first`` to before ``end``, their bytes and digest, and the number of acts."""

    first: int
    end: int
    bytes: int
    sha256: str
    acts: int


@disk_errors()
def to_partition(disk: Disk, partitions: Partitions, *, version: str) -> Copied:
    """Copy the log of ``disk``'s folder, locked meanwhile and unchanged, into an empty partition.
    Raises Misuse(FOLDER_IN_USE, BAD_ARGUMENT), Corrupt(DAMAGED); later failures leave topics that must be deleted."""
    disk.lock()
    try:
        with closing(partitions.log()) as partition, closing(partitions.base()) as base:
            partitions.check(ANSWER_SECONDS)
            for part in (partition, base):
                if part.ends(ANSWER_SECONDS)[1]:
                    raise Misuse(Code.BAD_ARGUMENT, f"{part.name} has records already", _EMPTY_FIRST)
            acts, sent = _send(disk, partition, base, version)
    finally:
        disk.close()
    with closing(partitions.log()) as partition, closing(partitions.base()) as base:
        found = _digest_partition(partition, base, partition.ends(ANSWER_SECONDS)[1])
    _compare(sent, found)
    return sent._replace(acts=acts)


@disk_errors()
def to_folder(partitions: Partitions, disk: Disk) -> Copied:
    """Copy a partition into ``disk``'s folder, which must be empty (or hold an earlier attempt): a separate log that no
    longer follows. Raises Misuse(NOT_A_DATA_FOLDER), Corrupt(DAMAGED)."""
    replica = PartitionReplica(disk, partitions, url="")
    try:
        with closing(partitions.log()) as partition, closing(partitions.base()) as base:
            end = partition.ends(ANSWER_SECONDS)[1]
            while replica.offset < end:
                replica.follow(1.0)
            expected = _digest_partition(partition, base, end)
            acts = replica.log.acts.extent()[1]
    finally:
        replica.close()
    if not expected.end:
        raise error(Code.NOT_FOUND, f"{partitions.name} holds no log")
    disk.lock()
    try:
        for name in disk.list():
            with suppress(FileNotFoundError), closing(disk.open(name)) as file:
                file.sync()
        disk.sync_folder()
        disk.remove(MIRROR_NAME)  # makes it an ordinary log
        disk.sync_folder()
        digest = _Digest(expected.first, expected.end)
        for group in _segments(disk, open_offline(disk, in_use=False).files().segments):
            digest.add(*group)
        _compare(expected, digest.copied())
    finally:
        disk.close()
    return expected._replace(acts=acts)


def _send(disk: Disk, partition: Partition, base: Partition, version: str) -> tuple[int, Copied]:
    log = open_offline(disk, in_use=False)
    files = log.files()
    first = SegmentHeader.unpack(read_file(disk, files.segments[0].name, HEADER_BYTES), files.segments[0].name)
    channel = claim(partition, Fold(), url="", version=version, seed=(log.shard, first.salt))
    try:
        acts = file_pieces(disk, journal.NAME, files.acts_bytes)
        if first.sequence:
            begin = {"sequence": first.sequence, "position": first.position, "frame_epoch": first.epoch}
            after = msgspec.structs.replace(channel.standing, act_bytes=files.acts_bytes, **begin)
            snapshot = max(files.snapshots, key=lambda stored: stored.name.startswith("base-"))
            sequence = int(snapshot.name.split("-")[1][:20])
            manifest = Manifest.of(first, sequence, snapshot.size, after)
            Bases(base).send(manifest, chain(file_pieces(disk, *snapshot), acts))
            channel.close()
            channel = Channel(partition, after)
            partition.delete_before(after.offset)
        else:
            for lines in _lines(acts):
                channel.send_act(lines).wait()
        waiting = deque[Round]()
        sent = _Digest(first.sequence, log.next_sequence)
        for sequence, group, data in _segments(disk, files.segments):
            sent.add(sequence, group, data)
            waiting.append(channel.send_frames(data))
            if len(waiting) > AHEAD:
                waiting.popleft().wait()
        for left in waiting:
            left.wait()
        channel.release(ANSWER_SECONDS)
    finally:
        channel.close()
    return files.acts, sent.copied()


class _Digest:
    """Digest of the frames from ``first`` to before ``end``."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end, self._next = first, end, first
        self._digest, self._bytes = hashlib.sha256(), 0

    def add(self, sequence: int, offsets: list[int], data: memoryview) -> None:
        """Add frames from ``sequence`` on, which begin at ``offsets`` of ``data``; skip those outside the range."""
        low = min(max(self._first - sequence, 0), len(offsets))
        high = min(max(self._end - sequence, 0), len(offsets))
        if low < high:
            bounds = [*offsets, len(data)]
            part = data[bounds[low] : bounds[high]]
            self._digest.update(part)
            self._bytes += len(part)
            self._next = sequence + high

    def copied(self) -> Copied:
        return Copied(self._first, self._next, self._bytes, self._digest.hexdigest(), 0)


def _segments(disk: Disk, segments: tuple[StoredFile, ...]) -> Iterator[tuple[int, list[int], memoryview]]:
    """Yield the checked frames of segments in groups: first sequence, offsets, bytes. Raises Corrupt with the place."""
    for name, size in segments:
        data = map_file(disk, name, size)
        header = SegmentHeader.unpack(data.slice(0, HEADER_BYTES).to_pybytes(), name)
        found = scan(data, header)
        if found.what is not None:
            raise DamagedLog(name, found.end, found.sequence, found.what, newer=found.newer)
        start = 0
        for n, end in enumerate([*found.offsets[1:], found.end], 1):
            if n == len(found.offsets) or end - found.offsets[start] >= GROUP_BYTES:
                begin = found.offsets[start]
                offsets = [at - begin for at in found.offsets[start:n]]
                yield header.sequence + start, offsets, memoryview(data)[begin:end]
                start = n


def _digest_partition(partition: Partition, base_partition: Partition, end: int) -> Copied:
    """Digest the frames that a reader finds in a partition below offset ``end``."""
    fold, first = Fold(), 0
    if (base := Bases(base_partition).newest()) is not None:
        fold, first = Fold(base.manifest.standing), base.manifest.sequence
    digest = _Digest(first, 1 << 62)
    while fold.standing.offset < end:
        for offset, raw in partition.read(fold.standing.offset, end, 1.0):
            taken = fold.take(offset, raw)
            if taken.verdict is Verdict.COUNTS and taken.type is RecordType.FRAMES:
                digest.add(taken.frames[0][1].sequence, [at for at, _ in taken.frames], taken.content)
    return digest.copied()


def _compare(expected: Copied, found: Copied) -> None:
    if expected != found:
        message = f"the copy holds frames {found.first} to {found.end} with the digest {found.sha256}"
        raise error(Code.DAMAGED, f"{message}, not {expected.first} to {expected.end} with {expected.sha256}")


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Regroup the bytes into parts that end with a whole line."""
    rest = b""
    for piece in pieces:
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if end:
            yield whole + end
